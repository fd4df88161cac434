// The data, what shows text and numbers, and the details of one token. `explanation.js` goes on in the same module.

const data = JSON.parse(document.getElementById("data").textContent);
// The model, and each memory: its colour, and its index in formulas.
const KNOWN = { tokens: { by: "by-token", index: "tok" }, phrases: { by: "by-phrase", index: "phr" } };
const PARTS = [{ name: "model", by: "by-model" },
  ...data.memories.map((name) => ({ name, by: "by-other", index: name, ...KNOWN[name] }))];
const ALL = [...PARTS.keys()];
const has = (name) => data.memories.includes(name);
const of = (name, list) => list[data.memories.indexOf(name)];
const END = "</s>";

// Elements are made one by one and text is only ever text: nothing in the data can become markup.
function make(tag, settings = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(settings)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}
const byId = (name) => document.getElementById(name);
const language = (code) => ({ lang: code, dir: "auto" });

function percent(number) {
  if (number > 0 && number < 0.001) return "<0.1%";
  if (number < 1 && number > 0.999) return ">99.9%";
  return `${(100 * number).toFixed(number > 0 && number < 0.0995 ? 1 : 0)}%`;
}
const score = (number) => (data.score_name === "similarity" ? number.toFixed(2) : Math.abs(number).toPrecision(3));
const quoted = (text) => `“${text}”`;
// Places count characters as Python does; JavaScript counts some of them twice.
const cut = (text, start, end) => [...text].slice(start, end).join("");

// A sentence with a mark in it; where the mark has no text of its own, what stands for it.
function marked({ sentence, start, end, symbol }, by, context = Infinity) {
  const characters = [...data.texts[sentence]];
  const from = Math.max(0, start - context), to = Math.min(characters.length, end + context);
  let before = characters.slice(from, start).join(""), after = characters.slice(end, to).join("");
  if (from > 0) before = `… ${before.replace(/^\S{0,20}\s/, "")}`; // no half words, where words are short
  if (to < characters.length) after = `${after.replace(/\s\S{0,20}$/, "")} …`;
  const inside = characters.slice(start, end).join("") || seen(symbol, symbol);
  return make("span", language(data.target_language), before, make("mark", { class: by }, inside), after);
}

const learnedTag = ({ learned: id }) => (id ? make("span", { class: "muted" }, ` · learned: ${id}`) : null);

// The sentences of the datastore most like the source, as translation memories list fuzzy matches.
function matchList({ matches }) {
  const line = (text) => make("p", { class: "small muted" }, text);
  if (!has("tokens")) return null;
  if (!matches) return line("The datastore lacks its source sentences: build it again to see those most like this one.");
  if (!matches.length) return line("No sentence of the datastore is much like this one.");
  const item = (one) => make("li", {}, make("b", {}, `${percent(one.likeness)} like: `),
    make("span", language(data.source_language), one.source), " → ",
    make("span", language(data.target_language), one.target), learnedTag(one));
  return make("details", { class: "phrases" },
    make("summary", {}, `Sentences of the datastore most like this one: ${matches.map((one) => percent(one.likeness)).join(", ")}`),
    make("ul", { class: "found" }, ...matches.map(item)));
}

function bar(shares) {
  const label = ALL.map((part) => `${PARTS[part].name} ${percent(shares[part])}`).join(", ");
  const pieces = ALL.filter((part) => shares[part] > 0);
  return make("div", { class: "bar", role: "img", "aria-label": label, title: label },
    ...pieces.map((part) => make("i", { class: PARTS[part].by, "--share": shares[part] })));
}

function meanShares(tokens) {
  return ALL.map((part) => tokens.reduce((sum, token) => sum + token.shares[part], 0) / tokens.length);
}
const largest = (shares) => shares.indexOf(Math.max(...shares));

// A token as it is seen, and as it is named in a sentence.
const seen = (symbol, text) => (symbol === END ? "■" : text);
const named = (symbol, text) => (symbol === END ? "the end of the sentence" : quoted(text));
// The text of a token, or its symbol where it has none of its own.
const textOf = (sentence, token) => cut(sentence.translation, token.start, token.end) || token.symbol;

function details(sentence, at, card) {
  const token = sentence.tokens[at];
  const text = textOf(sentence, token);
  const step = (label, to, symbol) => make("button", {
    type: "button", "aria-label": label, title: label, disabled: to < 0 || to >= sentence.tokens.length,
    onclick: () => {
      select(card, to);
      const buttons = [...card.panel.querySelectorAll("button:enabled")];
      (buttons.find((button) => button.title === label) || buttons[0]).focus();
    },
  }, symbol);
  const close = make("button", { type: "button", "aria-label": "Close", title: "Close", onclick: () => shut(true) }, "✕");
  return make("section", { class: "panel", id: `why-${sentence.number}`, "aria-label": `Why ${named(token.symbol, text)}` },
    make("header", {},
      make("h3", {}, make("span", language(data.target_language), seen(token.symbol, text)), " ",
        make("code", { class: "muted" }, token.symbol)),
      make("nav", { "aria-label": "Tokens" }, step("Previous token", at - 1, "←"), step("Next token", at + 1, "→"), close)),
    alone(token, text),
    make("div", { class: "columns" }, ...columns(sentence, token)));
}

function columns(sentence, token) {
  const phrases = has("phrases") ? votes(sentence, token) : null;
  const others = data.memories.flatMap((name, at) => (name in KNOWN ? [] : [make("section", {}, make("h4", {}, name),
    said(token.says[at], token, "by-other", "Nothing was found."))]));
  others.push(textSupport(token));
  if (!has("tokens")) return [make("div", {}, sum(token), trust(token), ...others), phrases];
  return [make("div", {}, sum(token), trust(token), phrases, ...others), neighbours(token)];
}

// Sentences of the text memory in which the same words are before the token.
function textSupport(token) {
  if (!token.text) return null;
  const { context, count, places } = token.text;
  const times = count === 1 ? "once" : `${count} times`;
  return make("section", {}, make("h4", {}, "Text"),
    make("p", { class: "small muted" }, `After ${quoted(context)} the text has this token ${times}:`),
    make("ul", { class: "found" }, ...places.map((one) => make("li", {}, marked(one, "by-other", 80)))));
}

// What learned trust made of the weights that the settings give, and which features moved it most.
function trust(token) {
  if (!token.settings_weights.length) return null;
  const memories = ALL.slice(1);
  const signed = (number) => `${number < 0 ? "−" : "+"}${Math.abs(number).toFixed(2)}`;
  const weights = ALL.map((part) => make("tr", {},
    make("th", { scope: "row" }, make("i", { class: `swatch ${PARTS[part].by}` }), PARTS[part].name),
    ...[token.settings_weights[part], token.weights[part]].map((number) => make("td", {}, percent(number)))));
  const seenFeatures = token.trust_saw.map((feature) => make("tr", {},
    make("th", { scope: "row" }, feature.name), make("td", {}, feature.value.toPrecision(3)),
    ...feature.moved.map((number) => make("td", {}, signed(number)))));
  const head = (...names) => make("thead", {}, make("tr", {}, make("td"), ...names.map((name) => make("th", { scope: "col" }, name))));
  return make("details", {}, make("summary", {}, "What trust saw and decided"),
    make("table", {}, head("weight by settings", "by trust"), make("tbody", {}, ...weights)),
    seenFeatures.length ? make("table", {},
      head("value", ...memories.map((part) => `moves ${PARTS[part].name}`)), make("tbody", {}, ...seenFeatures)) : null);
}

function alone(token, text) {
  const whole = `Probability ${percent(token.probability)}. After the same words, the model alone would have written `;
  if (token.favourite === null) return make("p", {}, whole, "this too.");
  const { symbol, text: favourite, probability } = token.favourite;
  return make("p", {}, whole, make("b", {}, named(symbol, favourite)),
    ` (${percent(probability)}); it gave ${named(token.symbol, text)} ${percent(token.probabilities[0])}.`);
}

function sum(token) {
  const lambda = (index) => make("span", { class: "muted" }, "λ*", make("sub", {}, index));
  const row = (part) => make("tr", {},
    make("th", { scope: "row" }, make("i", { class: `swatch ${PARTS[part].by}` }), PARTS[part].name,
      part ? " " : null, part ? lambda(PARTS[part].index) : null),
    ...[token.weights[part], token.probabilities[part], token.weights[part] * token.probabilities[part], token.shares[part]]
      .map((number) => make("td", {}, percent(number))));
  const head = ["", "weight", "× says", "= gives", "share"];
  return make("section", {},
    make("h4", {}, "Where its probability comes from"), bar(token.shares),
    make("table", {},
      make("thead", {}, make("tr", {},
        ...head.map((name) => (name ? make("th", { scope: "col" }, name) : make("td"))))),
      make("tbody", {}, ...ALL.map(row),
        make("tr", {}, make("th", { scope: "row" }, "together"), make("td", {}, "100%"), make("td"),
          make("td", {}, percent(token.probability)), make("td", {}, "100%")))));
}

function said(list, token, by, nothing) {
  if (!list.length) return make("p", { class: "muted small" }, nothing);
  return make("ul", { class: "said", "aria-label": "Likeliest tokens" }, ...list.map((one) => make("li",
    { class: by + (one.symbol === token.symbol ? " same" : "") },
    make("span", language(data.target_language), seen(one.symbol, one.text)), ` ${percent(one.probability)}`)));
}

// A list whose first items are shown, and the rest when asked for.
function shortened(items, count) {
  if (items.length <= count + 1) return [make("ul", { class: "found" }, ...items)];
  return [make("ul", { class: "found" }, ...items.slice(0, count)),
    make("details", {}, make("summary", { class: "small" }, `${items.length - count} more`),
      make("ul", { class: "found" }, ...items.slice(count)))];
}

function neighbours(token) {
  const item = (one) => make("li", {},
    make("span", { class: "score" }, score(one.score)),
    marked(one, one.symbol === token.symbol ? "by-token" : "by-model"),
    one.likeness === null ? null : make("span", { class: "muted" }, ` · ${percent(one.likeness)} like`), learnedTag(one));
  const count = token.neighbours.length, all = token.neighbours_found;
  return make("section", {},
    make("h4", {}, "Token datastore"),
    said(of("tokens", token.says), token, "by-token", "Nothing was found."),
    make("p", { class: "small muted" },
      `${count < all ? `The ${count} nearest of ${all}` : all} neighbours, by ${data.score_name}:`),
    ...shortened(token.neighbours.map(item), 6));
}

const PLACES = { begins: "begins here", continues: "continues here" };

function votes(sentence, token) {
  const item = (vote) => {
    const query = sentence.phrases[vote.query], found = query.retrieved[vote.retrieved];
    return make("li", {},
      make("div", {}, make("span", { class: "score" }, found.score.toFixed(2)),
        make("b", language(data.target_language), cut(data.texts[found.sentence], found.start, found.end)), " for ",
        make("span", language(data.source_language), quoted(query.text)),
        make("span", { class: "muted" }, ` · ${PLACES[vote.place]}`), learnedTag(found)),
      make("div", { class: "small" }, marked(found, "by-phrase")));
  };
  const some = token.votes_found === 1 ? "1 phrase" : `${token.votes_found} phrases`;
  return make("section", {},
    make("h4", {}, "Phrase datastore"),
    said(of("phrases", token.says), token, "by-phrase", "No retrieved phrase begins or continues here."),
    of("phrases", token.says).length ? make("p", { class: "small muted" },
      token.votes.length
        ? `${some} wanted this token next; those that gave it most, with their similarity to the source phrase:`
        : "No retrieved phrase wanted this token.") : null,
    ...shortened(token.votes.map(item), 4));
}
