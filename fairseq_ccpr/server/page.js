// The page of the server: a text, its translation to edit and copy, corrections, and what was learned.

const PIECE = 2000; // characters that are translated together, about: then it is said how far it is
const DOUBTFUL = 0.3; // the confidence in a word below which it is underlined
const KEY = "fairseq-ccpr-key", WORK = "fairseq-ccpr-work"; // in the session's storage
// Sentences have `before`, what stands between them and the one before; `source`; `text`, their translation as it is shown;
// `translation`, that of the translator; `words`, those of it with the confidence in each; `learned`, the pair that counts
// for them, or null; `changed`, by what was learned.
const work = { sentences: [], after: "", rest: "", length: 0 }; // and what is to be translated yet
const running = byId("translation"), card = byId("sentence");
let current = null, listed = 100, deleted = []; // the sentence at the cursor; how many pairs are shown; those that can come back

const tidy = (text) => text.replace(/[^\S\u00a0\u2007\u202f]+/g, " ").trim(); // as the server makes one line of what it learns
const wanted = (sentence) => sentence.learned?.target ?? sentence.translation;
const edited = (sentence) => tidy(sentence.text) !== tidy(wanted(sentence));
const counted = (number, one) => `${number.toLocaleString("en")} ${one}${number === 1 ? "" : "s"}`;
const button = (name, onclick, first = false) => make("button", { type: "button", class: `button${first ? " first" : ""}`, onclick }, name);
const entered = (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey);
const on = (element, names, job) => names.split(" ").forEach((name) => element.addEventListener(name, job));

// ---- the server

// `memory` is the one that a pair came from, whose ids are its own; left out, it is that of the field.
async function send(method, path, body = null, signal = null, memory = byId("name").value) {
  const json = body !== null && !(body instanceof Blob);
  if (data.several) path += `${path.includes("?") ? "&" : "?"}memory=${encodeURIComponent(memory)}`;
  const headers = { ...(json && { "Content-Type": "application/json" }), ...(data.key && { Authorization: `Bearer ${byId("key").value}` }) };
  const response = await fetch(path, { method, headers, signal, body: json ? JSON.stringify(body) : body }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The server does not answer.");
  });
  const fault = response.ok ? null : await response.json().catch(() => ({ error: `The server answers with ${response.status}.` }));
  if (fault) throw new Error(fault.error);
  if (data.key) sessionStorage.setItem(KEY, byId("key").value);
  return response;
}
const ask = async (...asked) => (await send(...asked)).json();

// Do what may take long, may fail and can be stopped; what was being done in the same lane is stopped for it.
async function attempt(lane, job) {
  const place = byId(lane), [status, stop] = place.children, task = new AbortController();
  const say = (text, fault = false, done = false) => {
    if (place.task !== task) return;
    status.textContent = text;
    place.classList.toggle("fault", fault);
    stop.hidden = done;
  };
  place.task?.abort();
  place.task = task;
  stop.onclick = () => task.abort();
  say("…");
  const stopped = (error) => error.name === "AbortError";
  await job(task.signal, say).then((text) => say(text, false, true),
    (error) => say(stopped(error) ? "Stopped." : error.message, !stopped(error), true));
}

// Items in groups of about PIECE characters, or of as many as the server takes.
function grouped(items, length) {
  const groups = [], most = Math.min(PIECE, data.most_characters);
  let size = most;
  for (const item of items) {
    size += length(item);
    if (size > most) { groups.push([]); size = length(item); }
    groups.at(-1).push(item);
  }
  return groups;
}

// ---- the text and its translation

// Ask again for what is shown, where something was learned or forgotten since, and then for the rest of the text.
async function translate(signal, say, done = "") {
  if (byId("memory").open) await list();
  for (const sentence of work.sentences) sentence.changed = false;
  for (const some of grouped(work.sentences, ({ source }) => source.length + 1)) {
    say(`${done} Translating again …`);
    const { sentences } = await ask("POST", "sentences", { q: some.map(({ source }) => source).join("\n"), confidence: true }, signal);
    const now = new Map(sentences.map((sentence) => [sentence.source, sentence]));
    for (const sentence of some) {
      const mine = edited(sentence), { translation, words, learned } = now.get(sentence.source) ?? sentence;
      Object.assign(sentence, { translation, words, learned });
      if (mine || !edited(sentence)) continue; // what someone wrote stays
      put(sentence, wanted(sentence));
      sentence.changed = true;
    }
    mark();
  }
  while (work.rest) {
    const [lines] = grouped(work.rest.match(/[^\n]*\n|[^\n]+/g), (line) => line.length);
    let piece = lines.join("").slice(0, data.most_characters).replace(/[\ud800-\udbff]$/, "");
    say(`${done} Translating … ${Math.round(100 - (100 * work.rest.length) / work.length)}%`);
    let { sentences, after } = await ask("POST", "sentences", { q: piece, confidence: true }, signal);
    if (piece.length < lines.join("").length && sentences.length > 1) { // the last may go on, so the next piece has it
      const { before, source } = sentences.pop();
      piece = piece.slice(0, piece.lastIndexOf(source));
      after = before;
    }
    if (sentences.length) sentences[0].before = work.after + sentences[0].before;
    work.after = sentences.length ? after : work.after + after;
    work.sentences.push(...sentences.map((one) => ({ ...one, text: wanted(one), changed: false })));
    work.rest = work.rest.slice(piece.length);
    const length = running.value.length;
    running.setRangeText(shown().slice(length), length, length, "preserve");
    mark();
  }
  const changed = work.sentences.filter((sentence) => sentence.changed).length;
  const said = [done, changed ? `${counted(changed, "translation")} changed.` : ""].filter(Boolean).join(" ");
  return said || `${counted(work.sentences.length, "sentence")}.${data.learns ? " Click one to correct it." : ""}`;
}

const shown = () => work.sentences.map(({ before, text }) => before + text).join("") + work.after;

function put(sentence, text) {
  const before = work.sentences.slice(0, work.sentences.indexOf(sentence));
  const start = before.reduce((at, one) => at + one.before.length + one.text.length, sentence.before.length);
  running.setRangeText(text, start, start + sentence.text.length, "preserve");
  sentence.text = text;
}

// Give what was typed to the sentence that it touches; a change that goes over several of them is the first one's.
function typed() {
  const before = shown(), now = running.value;
  let same = 0, start = 0, at = 0;
  while (same < now.length - running.selectionEnd && same < before.length && now.at(-1 - same) === before.at(-1 - same)) same += 1;
  while (start < Math.min(now.length, before.length) - same && now[start] === before[start]) start += 1;
  const end = before.length - same, parts = [...work.sentences.flatMap((one) => [[one, "before"], [one, "text"]]), [work, "after"]];
  const touched = parts.map(([owner, name]) => ({ owner, name, from: at, to: (at += owner[name].length) }))
    .filter(({ from, to }) => to >= start && from <= end);
  const taker = touched.find(({ name }) => name === "text") ?? touched[0];
  for (const part of touched) {
    const { owner, name, from } = part, text = owner[name], added = part === taker ? now.slice(start, now.length - same) : "";
    owner[name] = text.slice(0, Math.max(0, start - from)) + added + text.slice(Math.max(0, end - from));
  }
  mark();
}

function mark() {
  const state = (one) => (edited(one) ? "edited" : one.learned ? "remembered" : one.changed ? "changed" : "");
  byId("marks").replaceChildren(...work.sentences.flatMap((one) => [one.before,
    make("span", { class: `${state(one)}${one === current ? " current" : ""}` }, ...doubted(one))]), work.after, "\u200b");
  byId("legend").hidden = !work.sentences.some(state) && !byId("marks").querySelector(".doubtful");
  byId("copy").textContent = "Copy";
  byId("copy").disabled = running.readOnly = !work.sentences.length;
  showSentence();
}

// The text of a sentence as the translator wrote it, in parts: doubtful words are elements.
function doubted({ text, translation, words = [] }) {
  const parts = [];
  let at = 0, rest = 0;
  for (const [word, confidence] of text === translation ? words : []) {
    at = text.indexOf(word, at) + word.length;
    if (confidence === null || confidence >= DOUBTFUL) continue;
    parts.push(text.slice(rest, at - word.length), make("u", { class: "doubtful" }, word));
    rest = at;
  }
  return [...parts, text.slice(rest)];
}

// ---- the sentence at the cursor

function choose() {
  let at = 0, found = null;
  for (const one of work.sentences) {
    at += one.before.length;
    if (found === null || at <= running.selectionStart) found = one;
    at += one.text.length;
  }
  if (found === current) return;
  shut(false);
  current = found;
  card.replaceChildren();
  mark();
}

function showSentence() {
  card.hidden = current === null;
  if (card.hidden) return;
  const row = (name, code, text) => make("div", { class: "row" }, make("dt", {}, name), make("dd", language(code), text));
  const { source, text, translation, learned } = current, other = tidy(text) !== tidy(translation);
  const why = card.querySelector(".why") ?? make("div", { class: "why" });
  card.replaceChildren(
    make("dl", {}, row("Source", data.source_language, source),
      other ? row("Machine translation", data.target_language, translation) : null),
    make("p", { class: "actions" },
      ...(data.learns && (edited(current) || !learned) ? [button("Remember", remember, true)] : []),
      ...(edited(current) ? [button("Discard", () => { put(current, wanted(current)); mark(); })] : []),
      ...(learned ? [button("Undo", undo), make("span", { class: "badge remembered" }, "remembered")] : []),
      ...(why.hasChildNodes() ? [button("Hide tokens", () => { shut(false); why.replaceChildren(); showSentence(); })]
        : data.explains ? [button("Where from?", explain)] : [])),
    why);
}

function remember() {
  const sentence = current, { source, text } = sentence;
  if (sentence.learned && !edited(sentence)) return;
  attempt("translating", async (signal, say) => {
    const { id, memory, replaced } = await ask("POST", "learn", { q: source, s: text });
    sentence.learned = { id, memory, target: tidy(text) };
    mark();
    return translate(signal, say, replaced ? `Remembered, in place of ${quoted(replaced.target)}.` : "Remembered.");
  });
}

function undo() {
  const sentence = current;
  attempt("translating", async (signal, say) => {
    const { id, memory } = sentence.learned, { restored } = await ask("DELETE", `memory/${id}`, null, null, memory);
    const free = !edited(sentence);
    sentence.learned = restored[0] ?? null;
    if (free) put(sentence, wanted(sentence));
    mark();
    return translate(signal, say, "Undone.");
  });
}

async function explain() {
  const why = card.querySelector(".why");
  why.replaceChildren("…");
  showSentence();
  try {
    const cards = moreCards(await ask("POST", "explain", { q: current.source }));
    for (const one of cards) one.tokens = tokenRow(one);
    const colours = ALL.map((part) => make("li", {}, make("i", { class: `swatch ${PARTS[part].by}` }), PARTS[part].name));
    why.replaceChildren(make("ul", { class: "key small", "aria-label": "Colours" }, ...colours),
      ...cards.flatMap(({ tokens, sentence }) => [tokens, matchList(sentence, true)]).filter(Boolean));
  } catch (error) {
    why.replaceChildren(error.message);
  }
}

// ---- what was learned

async function list() {
  const query = byId("search").value, memory = byId("name").value;
  const { pairs, found } = await ask("GET", `memory?limit=${listed}&q=${encodeURIComponent(query)}`);
  if (query !== byId("search").value || memory !== byId("name").value) return; // it has changed meanwhile
  byId("found").textContent = `${pairs.length < found ? `the newest ${pairs.length} of ` : ""}${counted(found, "pair")}`;
  byId("more").hidden = pairs.length === found;
  const rows = new Map([...byId("pairs").children].map((row) => [row.pair, row])); // which may be about to be edited
  const all = [...pairs, ...deleted].sort((one, other) => other.id - one.id);
  byId("pairs").replaceChildren(...all.map((pair) => rows.get(JSON.stringify(pair)) ?? pairRow(pair, all)));
}

function pairRow(pair, all) {
  const { id, source, target, memory, replaced_by: by } = pair, last = all.find((one) => one.id === by); // which counts
  const learn = (text) => ask("POST", "learn", { q: source, s: text }, null, memory);
  const change = (name, done, job, first = false) => button(name, () => attempt("learning", async () => {
    await job();
    attempt("translating", translate); // which lists pairs as well
    return done;
  }), first);
  const row = make("li", { class: pair.deleted ? "deleted" : by ? "replaced" : "" });
  const text = make("span", language(data.target_language), target, ...(by ? [" ", make("span", { class: "badge" }, "replaced")] : []));
  const show = (shown, ...buttons) => row.replaceChildren(make("span", language(data.source_language), source), shown,
    make("p", { class: "actions" }, ...buttons.filter(Boolean)));
  const start = () => show(text, ...(pair.deleted ? [by && !last ? null : change("Undo", "It is back.", restore)] : [
    by ? change("Bring back", "It counts again.", () => learn(target)) : button("Edit", edit),
    change("Delete", "Deleted.", async () => {
      await ask("DELETE", `memory/${id}`, null, null, memory);
      deleted.push({ ...pair, deleted: true });
    })]));
  const edit = () => {
    const box = make("textarea", { ...language(data.target_language), "aria-label": `Translation of ${quoted(source)}` });
    const save = change("Save", "Saved.", () => learn(box.value), true);
    box.value = target;
    on(box, "keydown", (event) => (entered(event) ? save.click() : event.key === "Escape" && start()));
    show(box, save, button("Cancel", start));
    box.focus();
  };
  const restore = async () => {
    deleted = deleted.filter((one) => one.id !== id);
    for (const one of [pair, last].filter(Boolean)) await learn(one.target);
  };
  row.pair = JSON.stringify(pair);
  start();
  return row;
}

// Learn from files, one after the other; the server answers with a line for every few pairs.
function take(chosen) {
  const files = [...chosen];
  byId("files").value = ""; // so that the same may be chosen again
  byId("memory").open = true;
  attempt("importing", async (signal, say) => {
    const told = [];
    try {
      for (const file of files) told.push(await learnFile(file, signal, say));
      return told.join(" ");
    } catch (error) {
      throw error.name === "AbortError" ? error : new Error([...told, error.message].join(" "));
    } finally {
      attempt("translating", translate);
    }
  });
}

async function learnFile(file, signal, say) {
  const { body } = await send("POST", `memory?name=${encodeURIComponent(file.name)}`, file, signal);
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let last = {}, rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    if (lines.length) last = JSON.parse(lines.at(-1));
    say(`${file.name}: ${counted(last.pairs ?? 0, "pair")} …`);
  }
  const { learned = 0, replaced, again, skipped = {}, error } = last;
  const told = [`${file.name}: learned ${counted(learned, "pair")}`, replaced && `${replaced} in place of earlier ones`,
    again && `${again} known already`, ...Object.entries(skipped).map(([reason, count]) => `left out ${count}: ${reason}`), error];
  if (error) throw new Error(told.filter(Boolean).join("; "));
  return `${told.filter(Boolean).join("; ")}.`;
}

async function save() {
  const response = await send("GET", `memory.tmx?q=${encodeURIComponent(byId("search").value)}`);
  make("a", { href: URL.createObjectURL(await response.blob()), download: "memory.tmx" }).click();
}

// ---- the page

function start() {
  const { source, target } = data.names, relist = () => attempt("learning", list);
  document.title = byId("title").textContent = `${source} → ${target}`;
  [byId("text").labels[0].textContent, running.labels[0].textContent] = [source, target];
  [byId("text").lang, running.lang] = [data.source_language, data.target_language];
  [byId("key-label").hidden, byId("name-label").hidden] = [!data.key, !data.several];
  byId("key").value = sessionStorage.getItem(KEY) || "";
  byId("memory").hidden = !data.learns;
  on(byId("ask"), "submit", (event) => {
    event.preventDefault();
    const text = byId("text").value;
    Object.assign(work, { sentences: [], after: "", rest: text, length: text.length });
    running.value = "";
    choose();
    mark();
    attempt("translating", translate);
  });
  on(byId("translating").lastElementChild, "click", () => { work.rest = ""; });
  on(byId("text"), "keydown", (event) => entered(event) && byId("ask").requestSubmit());
  on(running, "input", typed);
  on(running, "input focus click keyup", choose);
  on(running, "keydown", (event) => entered(event) && current && data.learns && remember());
  on(byId("copy"), "click", () => {
    running.select();
    document.execCommand("copy"); // navigator.clipboard needs TLS or localhost
    byId("copy").textContent = "Copied";
  });
  on(byId("memory"), "toggle", () => byId("memory").open && relist());
  on(byId("search"), "input", () => relist(deleted = []));
  on(byId("name"), "change", () => {
    deleted = [];
    if (work.sentences.length) attempt("translating", translate); // which lists pairs as well
    else if (byId("memory").open) relist();
  });
  on(byId("more"), "click", () => relist(listed += 100));
  on(byId("import"), "click", () => byId("files").click());
  on(byId("files"), "change", () => take(byId("files").files));
  on(byId("export"), "click", () => attempt("learning", save));
  on(document, "dragover drop dragleave", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    document.body.classList.toggle("dropping", event.type === "dragover");
    if (event.type === "drop" && data.learns) take(event.dataTransfer.files);
  });
  on(document, "keydown", (event) => event.key === "Escape" && shut(true));
  // A reload, or a phone that needs the memory, leaves the work as it is.
  const keep = () => sessionStorage.setItem(WORK, JSON.stringify({ text: byId("text").value, name: byId("name").value, work }));
  on(window, "pagehide", keep);
  on(document, "visibilitychange", keep);
  const kept = JSON.parse(sessionStorage.getItem(WORK));
  if (kept === null) return;
  Object.assign(work, kept.work);
  [byId("text").value, byId("name").value] = [kept.text, kept.name ?? ""];
  running.value = shown();
  mark();
  attempt("translating", translate);
}

start();
