// The page of the server: ask, correct, remember, undo. Sentences as tokens come from the modules before.

const KEY = "fairseq-ccpr-key"; // in the session's storage
const learned = new Map(); // ids of what was learned here, by source sentence
let cards = [], round = 0;

// ---- the server

async function ask(method, path, parameters = null) {
  const headers = { Accept: "application/json" };
  if (parameters) headers["Content-Type"] = "application/json";
  if (data.key) headers.Authorization = `Bearer ${byId("key").value}`;
  let response;
  try {
    response = await fetch(path, { method, headers, body: parameters && JSON.stringify(parameters) });
  } catch {
    throw new Error("The server does not answer.");
  }
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  if (data.key) sessionStorage.setItem(KEY, byId("key").value);
  return answer;
}

// Do something that may fail, and say how it went; buttons wait meanwhile.
async function attempt(work) {
  const buttons = [...document.querySelectorAll("button:enabled")];
  say("…");
  for (const button of buttons) button.disabled = true;
  try {
    say(await work());
  } catch (error) {
    say(error.message, true);
  } finally {
    for (const button of buttons) button.disabled = false;
  }
}

function say(text, fault = false) {
  byId("status").textContent = text;
  byId("status").className = fault ? "fault" : "";
}

// Sentences of a text with their translations; they have no tokens where the server cannot explain them.
async function translated(text) {
  const explanation = await ask("POST", "explain", { q: text });
  data.score_name = explanation.score_name;
  const first = data.texts.length;
  data.texts.push(...explanation.texts);
  for (const sentence of explanation.sentences) {
    sentence.number = ++round; // no two of this page have the same
    for (const token of sentence.tokens) for (const one of token.neighbours) one.sentence += first;
    for (const phrase of sentence.phrases) for (const one of phrase.retrieved) one.sentence += first;
  }
  return explanation.sentences;
}

// ---- sentences

function makeCard(sentence, before = null) {
  const card = { sentence, buttons: [], panel: null, editing: false };
  const target = language(data.target_language);
  const row = (name, settings, ...content) => make("div", { class: `row ${settings.class || ""}` },
    make("dt", {}, name), make("dd", settings, ...content));
  const explained = sentence.tokens.length > 0;
  card.buttons = sentence.tokens.map((token, at) => tokenButton(sentence, token, at, card));
  const shown = explained
    ? make("div", { ...target, class: "tokens", role: "group", "aria-label": "Translation, token by token; the arrow keys move" },
      ...words(sentence, card.buttons))
    : make("div", { ...target, class: "plain" }, sentence.translation);
  card.tokens = make("dl", {}, row("Translation", { class: "translation" }, shown));
  card.actions = make("div", { class: "actions" });
  const changed = before !== null && before !== sentence.translation;
  card.element = make("article", { class: "card", "aria-label": sentence.source },
    make("dl", {}, row("Source", language(data.source_language), sentence.source)),
    card.tokens, card.actions);
  showActions(card, changed);
  return card;
}

function showActions(card, changed = false) {
  const { source } = card.sentence, id = learned.get(source);
  const button = (name, work, first = false) => make("button",
    { type: "button", class: first ? "button first" : "button", onclick: work }, name);
  card.editing = false;
  card.actions.replaceChildren(
    ...(data.learns ? [button("Correct", () => edit(card))] : []),
    ...(id ? [make("span", { class: "badge" }, `remembered: ${id}`), button("Undo", () => undo(source, id))] : []),
    ...(changed ? [make("span", { class: "badge" }, "changed")] : []));
}

function edit(card) {
  const box = make("textarea", { ...language(data.target_language), "aria-label": "Correct translation", rows: 2 });
  box.value = card.sentence.translation;
  const keep = () => remember(card, box.value);
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) keep();
    if (event.key !== "Escape") return;
    showActions(card);
    card.actions.querySelector("button").focus();
  });
  card.editing = true;
  card.actions.replaceChildren(box,
    make("button", { type: "button", class: "button first", onclick: keep }, "Remember"),
    make("button", { type: "button", class: "button", onclick: () => showActions(card) }, "Cancel"));
  box.focus();
}

function remember(card, target) {
  const { source } = card.sentence;
  attempt(async () => {
    const { id } = await ask("POST", "learn", { q: source, s: target });
    learned.set(source, id);
    showActions(card);
    return `Remembered. ${await refresh(source)}`;
  });
}

function undo(source, id) {
  attempt(async () => {
    await ask("DELETE", `memory/${id}`);
    for (const [text, of] of learned) if (of === id) learned.delete(text);
    return `Forgotten. ${await refresh(source)}`;
  });
}

// Translate what is shown again, but for what is just being corrected; the focus goes to the sentence that it was about.
async function refresh(source) {
  if (byId("memory").open) await showMemory();
  const waiting = cards.filter((card) => !card.editing);
  if (!waiting.length) return "";
  const sentences = await translated(waiting.map((card) => card.sentence.source).join("\n"));
  if (open.card !== null) shut(false);
  let changed = 0;
  waiting.forEach((card, at) => {
    const before = card.sentence.translation;
    const made = makeCard(sentences[at], before);
    changed += sentences[at].translation !== before;
    card.element.replaceWith(made.element);
    cards[cards.indexOf(card)] = made;
  });
  cards.find((card) => card.sentence.source === source)?.actions.querySelector("button")?.focus({ preventScroll: true });
  return changed === 1 ? "1 translation has changed." : `${changed} translations have changed.`;
}

// ---- what was learned

async function showMemory() {
  const { pairs, found } = await ask("GET", `memory?q=${encodeURIComponent(byId("search").value)}`);
  byId("found").textContent = pairs.length < found ? `${pairs.length} of ${found} pairs, the newest` : `${found} ${found === 1 ? "pair" : "pairs"}`;
  byId("pairs").replaceChildren(...pairs.map((pair) => make("li", {},
    make("span", language(data.source_language), pair.source),
    make("span", language(data.target_language), pair.target),
    make("button", { type: "button", class: "button", "aria-label": `Forget ${quoted(pair.source)}`,
      onclick: () => undo(pair.source, pair.id) }, "Forget"))));
}

// ---- the page

function start() {
  const { source, target } = data.names;
  document.title = byId("title").textContent = `${source} → ${target}`;
  byId("text").lang = data.source_language;
  byId("key-label").hidden = !data.key;
  byId("key").value = sessionStorage.getItem(KEY) || "";
  byId("memory").hidden = !data.learns;
  byId("legend").append(...ALL.map((part) => make("li", {}, make("i", { class: `swatch ${PARTS[part].by}` }), PARTS[part].name)));
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    attempt(async () => {
      const sentences = await translated(byId("text").value);
      if (open.card !== null) shut(false);
      cards = sentences.map((sentence) => makeCard(sentence));
      byId("sentences").replaceChildren(...cards.map((card) => card.element));
      byId("legend").hidden = !data.explains;
      return data.explains ? "Tap a token to see where it came from." : "";
    });
  });
  byId("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
  });
  byId("memory").addEventListener("toggle", () => byId("memory").open && attempt(async () => (await showMemory(), "")));
  byId("search").addEventListener("change", () => attempt(async () => (await showMemory(), "")));
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") shut(true); });
}

start();
