// The page of the server: a text, its sentences beside their translations, which are corrected, and what was learned.

const PIECE = 2000; // characters that are translated together, about: then it is said how far it is
const DOUBTFUL = 0.3; // the confidence in a word below which it is underlined
const OFFERED = { alternatives: 3, matches: 3 }; // of a sentence, at most
const KEY = "fairseq-ccpr-key", WORK = "fairseq-ccpr-work"; // in the session's storage
// Sentences have `before`, what stands between them and the one before; `source`; `continues`, whether they go on with
// one that was too long; `text`, their translation as it is shown; `translation`, that of the translator, and its
// `alternatives`; `words`, those of it with the confidence in each; `matches`, what is like them in the memory;
// `learned`, the pair that counts for them, or null; `changed`, by what was learned.
const work = { sentences: [], after: "", rest: "", length: 0, continues: false }; // and what is to be translated yet
const rows = new Map(); // what shows the sentences: the item of the list, the box to edit, what is behind its text, a fault
const card = byId("sentence"), [tools, others, alike, why] = card.children;
let current = null, composing = null; // the sentence at the cursor; the one that an input method writes in
let mine = new Map(); // translations that were edited before the text was translated anew, see `occurrences`
let learning = Promise.resolve(); // ends after what is learned and forgotten, which is one after the other
let listed = 100, deleted = []; // how many pairs are shown; those that can come back

const tidy = (text) => text.replace(/[^\S\u00a0\u2007\u202f]+/g, " ").trim(); // as the server makes one line of what it learns
const wanted = (sentence) => sentence.learned?.target ?? sentence.translation;
const edited = (sentence) => tidy(sentence.text) !== tidy(wanted(sentence));
const counted = (number, one) => `${number.toLocaleString("en")} ${one}${number === 1 ? "" : "s"}`;
const button = (name, onclick, first = false) => make("button", { type: "button", class: `button${first ? " first" : ""}`, onclick }, name);
const entered = (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && !event.repeat && !composed(event);
const composed = (event) => event.isComposing || event.keyCode === 229; // an input method has the key: Safari says it so
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
    if (stop) stop.hidden = done;
  };
  place.task?.abort();
  place.task = task;
  if (stop) stop.onclick = () => task.abort();
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

// Ask again for what is shown, where something was learned or forgotten since, beginning after a sentence, and then for
// the rest of the text.
async function translate(signal, say, done = "", last = null) {
  await learning;
  const listing = byId("memory").open && list().catch((error) => error.message);
  const at = work.sentences.indexOf(last) + 1;
  for (const sentence of work.sentences) sentence.changed = false;
  for (const some of grouped([...work.sentences.slice(at), ...work.sentences.slice(0, at)], ({ source }) => source.length + 1)) {
    say(`${done} Translating again …`);
    update(some, await sentencesOf(some.map(({ source }) => source).join("\n"), signal));
  }
  while (work.rest) await translateMore(signal, say, done);
  const count = (kind) => work.sentences.filter(kind).length;
  const changed = count((one) => one.changed), divided = count((one, n, all) => one.continues && !all[n - 1]?.continues);
  const said = [done, changed ? `${counted(changed, "translation")} changed.` : "", await listing].filter(Boolean);
  if (!said.length) said.push(`${counted(work.sentences.length, "sentence")}.${data.learns ? " Ctrl + Enter confirms one." : ""}`);
  if (!done && divided) said.push(`${divided} ${divided === 1 ? "was" : "were"} longer than the model takes, and divided.`);
  return said.join(" ");
}

const sentencesOf = (q, signal) => ask("POST", "sentences", { q, confidence: true, ...OFFERED }, signal);

// Show what sentences are translated as now, unless someone has written something else.
function update(some, { sentences }) {
  const now = new Map(sentences.map((sentence) => [sentence.source, sentence]));
  for (const sentence of some) {
    const kept = edited(sentence) || sentence === composing;
    const { translation, alternatives, words, matches, learned } = now.get(sentence.source) ?? sentence;
    Object.assign(sentence, { translation, alternatives, words, matches, learned });
    sentence.changed = !kept && edited(sentence);
    if (sentence.changed) put(sentence, wanted(sentence));
    paint(sentence);
  }
}

async function translateMore(signal, say, done) {
  const [lines] = grouped(work.rest.match(/[^\n]*\n|[^\n]+/g), (line) => line.length);
  let piece = lines.join("").slice(0, data.most_characters).replace(/[\ud800-\udbff]$/, "");
  say(`${done} Translating … ${Math.round(100 - (100 * work.rest.length) / work.length)}%`);
  let going = false, { sentences, after } = await sentencesOf(piece, signal);
  if (piece.length < lines.join("").length && sentences.length > 1) { // the last may go on, so the next piece has it
    const { before, source, continues } = sentences.pop();
    piece = piece.slice(0, piece.lastIndexOf(source));
    [after, going] = [before, continues];
  }
  if (sentences.length) {
    sentences[0].before = work.after + sentences[0].before;
    sentences[0].continues ||= work.continues;
  }
  work.after = sentences.length ? after : work.after + after;
  work.continues = going;
  work.sentences.push(...sentences.map((one) => ({ ...one, changed: false })));
  for (const [name, one] of occurrences(work.sentences)) one.text ??= mine.get(name) ?? wanted(one);
  work.rest = work.rest.slice(piece.length);
  draw();
}

// Sentences with their names: their sources, and which of equal ones they are.
function occurrences(sentences) {
  const seen = new Map();
  return sentences.map((one) => {
    seen.set(one.source, (seen.get(one.source) ?? 0) + 1);
    return [`${seen.get(one.source)} ${one.source}`, one];
  });
}

const shown = () => work.sentences.map(({ before, text }) => before + text).join("") + work.after;

// Make rows of the sentences that have none, and of no others.
function draw() {
  const all = work.sentences, there = new Set(all);
  for (const [sentence, { item }] of rows) if (!there.has(sentence)) rows.delete(sentence), item.remove();
  const added = all.filter((one) => !rows.has(one));
  byId("rows").append(...added.map(row));
  added.forEach(paint);
  byId("copy").disabled = !all.length;
}

function row(sentence) {
  const box = make("textarea", { ...language(data.target_language), rows: 1 });
  const [behind, fault] = [make("div", { ...language(data.target_language), "aria-hidden": "true" }), make("p", { class: "fault small", role: "alert" })];
  const item = make("li", {}, make("p", language(data.source_language), sentence.source), make("div", { class: "box" }, behind, box), fault);
  box.value = sentence.text;
  item.classList.toggle("apart", /\n\s*\n|\u2029/.test(sentence.before));
  on(box, "focus", () => choose(sentence));
  on(box, "compositionstart compositionend", ({ type }) => { composing = type === "compositionstart" ? sentence : null; });
  on(box, "input", () => {
    sentence.text = box.value;
    fault.textContent = "";
    paint(sentence);
  });
  on(box, "keydown", (event) => {
    if (composed(event)) return;
    const step = event.altKey ? { ArrowDown: 1, ArrowUp: -1 }[event.key] : undefined;
    if (!step && !entered(event)) return;
    event.preventDefault();
    if (step) go(sentence, step); else confirm(sentence);
  });
  rows.set(sentence, { item, box, behind, fault });
  return item;
}

// Put a text into a row, in place of what is there, with the cursor where it was.
function put(sentence, text) {
  const { box } = rows.get(sentence);
  box.setRangeText(text, 0, box.value.length, "preserve");
  sentence.text = text;
  paint(sentence);
}

function paint(sentence) {
  const { item, box, behind } = rows.get(sentence);
  const state = edited(sentence) ? "edited" : sentence.learned ? "remembered" : sentence.changed ? "changed" : "";
  for (const one of ["edited", "remembered", "changed"]) item.classList.toggle(one, one === state);
  box.setAttribute("aria-label", `Translation${state && `, ${state}`}: ${sentence.source}`);
  behind.replaceChildren(...doubted(sentence), "\u200b");
  byId("copy").textContent = "Copy";
  if (sentence === current) show();
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

function go(sentence, step) {
  const other = rows.get(work.sentences[work.sentences.indexOf(sentence) + step]);
  other?.box.focus();
  other?.item.scrollIntoView({ block: "nearest" });
}

function choose(sentence) {
  if (sentence === current) return;
  const place = () => rows.get(sentence)?.item.getBoundingClientRect().top ?? 0, at = place();
  shut(false);
  if (current) rows.get(current)?.item.removeAttribute("aria-current");
  current = sentence;
  why.replaceChildren();
  card.hidden = current === null;
  if (card.hidden) return byId("rows").after(card);
  const { item } = rows.get(current);
  item.setAttribute("aria-current", "true");
  item.append(card);
  show();
  window.scrollBy({ top: place() - at, behavior: "instant" }); // the card that was above must not move what is pressed
}

function show() {
  const { text, translation, alternatives = [], learned, matches = [] } = current;
  const there = () => card.contains(document.activeElement), inside = there();
  renew(tools,
    ...(data.learns && (edited(current) || !learned) ? [button("Confirm", () => confirm(current), true)] : []),
    ...(edited(current) ? [button("Discard", () => put(current, wanted(current)))] : []),
    ...(learned ? [button("Undo", undo), make("span", { class: "badge remembered" }, "remembered")] : []),
    ...(why.hasChildNodes() ? [button("Hide tokens", () => { shut(false); why.replaceChildren(); show(); })]
      : data.explains ? [button("Where from?", explain)] : []));
  const different = [...new Set([translation, ...alternatives])].filter((one) => tidy(one) !== tidy(text));
  renew(others, ...titled("Alternatives", different.map((one) => [choice(one)])));
  renew(alike, ...titled("In the memory (struck out: only there; underlined: only here)",
    matches.map((one) => [make("span", language(data.source_language),
      make("b", {}, percent(one.likeness)), " ", ...one.changes.flatMap(difference)), choice(one.target)])));
  if (inside && !there()) rows.get(current).box.focus();
}

// Parts that are the same stay, with the focus and a click that has begun: what they do is for the current sentence.
function renew(group, ...parts) {
  const made = make("div", {}, ...parts);
  if (made.innerHTML !== group.innerHTML) group.replaceChildren(...made.childNodes);
}

const titled = (title, items) => (items.length
  ? [make("h2", {}, title), make("ul", { "aria-label": title }, ...items.map((one) => make("li", {}, ...one)))] : []);
const difference = ([kind, words]) => [make({ same: "span", deleted: "del", inserted: "ins" }[kind], {}, words), " "];
const choice = (text) => make("button", { ...language(data.target_language), type: "button", class: "choice", onclick: () => take(text) }, text);

// Put a text into the box of the sentence as if it was typed, so that it can be undone there.
function take(text) {
  const { box } = rows.get(current);
  box.focus();
  box.select();
  if (!document.execCommand("insertText", false, text)) put(current, text);
}

// Learn or forget something after what was asked for before.
function inTurn(job) {
  const changing = learning.then(job);
  learning = changing.catch(() => {});
  return changing;
}

// The same of a sentence, with which a fault stays, and translate again.
function change(sentence, job, last = null) {
  const { fault } = rows.get(sentence);
  fault.textContent = "";
  const changing = inTurn(job).catch((error) => {
    fault.textContent = error.message;
    return "Not done: see below the sentence.";
  });
  attempt("translating", async (signal, say) => {
    const done = await changing;
    if (rows.has(sentence)) paint(sentence);
    return translate(signal, say, done, last);
  });
}

// Learn a sentence as it is now, and go on to the next.
function confirm(sentence) {
  const { source, text } = sentence, place = byId("name").value;
  go(sentence, 1);
  if (!data.learns || (sentence.learned && !edited(sentence))) return;
  change(sentence, async () => {
    if (sentence.learned?.target === tidy(text)) return "Remembered."; // it was asked for twice
    const { id, memory, replaced } = await ask("POST", "learn", { q: source, s: text }, null, place);
    sentence.learned = { id, memory, target: tidy(text) };
    return replaced ? `Remembered, in place of ${quoted(replaced.target)}.` : "Remembered.";
  }, sentence);
}

function undo() {
  const sentence = current, { id, memory } = sentence.learned;
  change(sentence, async () => {
    if (sentence.learned?.id !== id) return "Undone."; // it was asked for twice
    const { restored } = await ask("DELETE", `memory/${id}`, null, null, memory), free = !edited(sentence);
    sentence.learned = restored[0] ?? null;
    if (free && rows.has(sentence)) put(sentence, wanted(sentence));
    return "Undone.";
  });
}

async function explain() {
  const waiting = make("p", {}, "…"), { source } = current;
  why.replaceChildren(waiting);
  show();
  const shown = await ask("POST", "explain", { q: source }).then((explanation) => {
    const cards = moreCards(explanation);
    for (const one of cards) one.tokens = tokenRow(one);
    const colours = ALL.map((part) => make("li", {}, make("i", { class: `swatch ${PARTS[part].by}` }), PARTS[part].name));
    return [make("ul", { class: "key small", "aria-label": "Colours" }, ...colours), ...cards.map(({ tokens }) => tokens)];
  }, (error) => [error.message]);
  if (waiting.isConnected) why.replaceChildren(...shown);
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
  const { id, source, target, memory, replaced_by: by, deleted: gone } = pair, last = all.find((one) => one.id === by); // which counts
  const learn = (text) => ask("POST", "learn", { q: source, s: text }, null, memory);
  const change = (name, done, job) => button(name, () => attempt("learning", async () => {
    await inTurn(job);
    attempt("translating", translate); // which lists pairs as well
    return done;
  }));
  const box = make("span", { ...language(data.target_language), ...(!gone && !by && {
    contenteditable: "plaintext-only", role: "textbox", "aria-label": `Translation of ${quoted(source)}` }) }, target);
  const keep = change("Save", "Saved.", () => learn(box.innerText));
  on(box, "input", () => { keep.hidden = tidy(box.innerText) === target; });
  on(box, "keydown", (event) => entered(event) && keep.click());
  keep.hidden = true;
  const restore = change("Undo", "It is back.", async () => {
    deleted = deleted.filter((one) => one.id !== id);
    for (const one of [pair, last].filter(Boolean)) await learn(one.target);
  });
  const drop = change("Delete", "Deleted.", async () => {
    await ask("DELETE", `memory/${id}`, null, null, memory);
    deleted.push({ ...pair, deleted: true });
  });
  const buttons = gone ? [by && !last ? null : restore] : [by ? change("Bring back", "It counts again.", () => learn(target)) : keep, drop];
  const when = pair.time && new Date(1000 * pair.time).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
  const signed = [by && "replaced", when, pair.author].filter(Boolean).join(" · ");
  const row = make("li", { class: gone ? "deleted" : by ? "replaced" : "" }, make("span", language(data.source_language), source), box,
    make("p", { class: "small muted" }, signed), make("p", { class: "actions" }, ...buttons));
  row.pair = JSON.stringify(pair);
  return row;
}

// Learn from files, one after the other; the server answers with a line for every few pairs.
function importFiles(chosen) {
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
  byId("text").labels[0].textContent = source;
  byId("text").lang = data.source_language;
  [byId("key-label").hidden, byId("name-label").hidden] = [!data.key, !data.several];
  byId("key").value = sessionStorage.getItem(KEY) || "";
  byId("memory").hidden = !data.learns;
  on(byId("ask"), "submit", (event) => {
    event.preventDefault();
    const text = byId("text").value;
    for (const [name, one] of occurrences(work.sentences)) edited(one) ? mine.set(name, one.text) : mine.delete(name);
    choose(null);
    Object.assign(work, { sentences: [], after: "", rest: text, length: text.length, continues: false });
    draw();
    attempt("translating", translate);
  });
  on(byId("translating").lastElementChild, "click", () => { work.rest = ""; });
  on(byId("text"), "keydown", (event) => entered(event) && byId("ask").requestSubmit());
  on(byId("copy"), "click", () => {
    const box = make("textarea", { class: "skip" });
    box.value = shown();
    document.body.append(box);
    box.select();
    document.execCommand("copy"); // navigator.clipboard needs TLS or localhost
    box.remove();
    byId("copy").focus();
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
  on(byId("files"), "change", () => importFiles(byId("files").files));
  on(byId("export"), "click", () => attempt("learning", save));
  on(document, "dragover drop dragleave", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    document.body.classList.toggle("dropping", event.type === "dragover");
    if (event.type === "drop" && data.learns) importFiles(event.dataTransfer.files);
  });
  on(document, "keydown", (event) => event.key === "Escape" && shut(true));
  // A reload, or a phone that needs the memory, leaves the work as it is.
  const again = ["alternatives", "words", "matches"]; // come again when it is translated again
  const keep = () => sessionStorage.setItem(WORK, JSON.stringify({ text: byId("text").value, name: byId("name").value, work, mine: [...mine] },
    (name, value) => (again.includes(name) ? undefined : value)));
  on(window, "pagehide", keep);
  on(document, "visibilitychange", keep);
  const kept = JSON.parse(sessionStorage.getItem(WORK));
  if (kept === null) return;
  Object.assign(work, kept.work);
  [byId("text").value, byId("name").value] = [kept.text, kept.name ?? ""];
  mine = new Map(kept.mine);
  draw();
  attempt("translating", translate);
}

start();
