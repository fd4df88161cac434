// A sentence as tokens that can be chosen; one of the page is open. It goes on in the same module.

const LONG_WORD = 20; // characters, of a token or, smaller, of what stands above it; a longer word may be broken anywhere
const open = { card: null, token: -1 };

function shut(back) {
  if (open.card === null) return;
  const button = open.card.buttons[open.token];
  button.setAttribute("aria-expanded", "false");
  button.removeAttribute("aria-controls");
  open.card.panel.remove();
  open.card = null;
  if (back) button.focus({ preventScroll: true });
  if (back) shut(false); // the focus has opened it again
}

function select(card, at) {
  if (open.card === card && open.token === at) return;
  const button = card.buttons[at];
  const before = button.getBoundingClientRect().top;
  shut(false);
  for (const other of card.buttons) other.tabIndex = -1;
  button.tabIndex = 0;
  button.setAttribute("aria-expanded", "true");
  button.setAttribute("aria-controls", `why-${card.sentence.number}`);
  card.panel = details(card.sentence, at, card);
  card.tokens.after(card.panel);
  open.card = card;
  open.token = at;
  // A panel that closed above must not move what is being read.
  window.scrollBy({ top: button.getBoundingClientRect().top - before, behavior: "instant" });
  history.replaceState(null, "", `#${card.sentence.number}.${at}`);
}

function onKey(event, card, at) {
  const last = card.buttons.length - 1;
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last, Enter: at, " ": at }[event.key];
  if (to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  const aim = Math.max(0, Math.min(last, to));
  card.buttons[aim].focus();
  select(card, aim);
}

function tokenButton(sentence, token, at, card) {
  const { symbol, favourite, shares } = token;
  const text = textOf(sentence, token);
  const part = largest(shares);
  const upTo = (...names) => ALL.reduce((sum, one) => sum + (names.includes(PARTS[one].by) ? shares[one] : 0), 0);
  const colours = ["by-model", "by-token", "by-phrase"];
  const label = `${symbol === END ? named(symbol) : text}, ${percent(shares[part])} ${PARTS[part].name}`
    + (favourite ? `; the model alone: ${named(favourite.symbol, favourite.text)}` : "");
  const gloss = favourite && text.length <= LONG_WORD ? seen(favourite.symbol, favourite.text) : null;
  return make("span", {
    class: `token ${PARTS[part].by}${symbol === END ? " end" : ""}`, role: "button", tabindex: at ? -1 : 0,
    "aria-label": label, "aria-expanded": "false", "--a": `${100 * upTo("by-model")}%`, "--b": `${100 * upTo("by-model", "by-token")}%`,
    "--c": `${100 * upTo(...colours)}%`,
    onfocus: () => select(card, at), onclick: () => select(card, at), onkeydown: (event) => onKey(event, card, at),
  }, gloss ? make("ruby", {}, seen(symbol, text), make("rt", { "data-gloss": gloss })) : seen(symbol, text));
}

// The tokens with the spaces between them; what stands without a space is not parted at the end of a line, if it is short.
function words(sentence, buttons) {
  const characters = [...sentence.translation], line = [];
  let at = 0, word = null, length = 0;
  sentence.tokens.forEach((token, index) => {
    const space = characters.slice(at, token.start).join("");
    if (word === null || space) {
      word = make("span", { class: "word" });
      length = 0;
      line.push(space, word);
    }
    word.append(buttons[index]);
    at = Math.max(at, token.end);
    const gloss = token.favourite === null ? "" : token.favourite.text;
    length += Math.max(buttons[index].textContent.length, 0.65 * gloss.length);
    if (length > LONG_WORD) word.className = "";
  });
  return line;
}

// The tokens of a card's sentence.
function tokenRow(card) {
  card.buttons = card.sentence.tokens.map((token, at) => tokenButton(card.sentence, token, at, card));
  return make("div", { ...language(data.target_language), class: "tokens", role: "group",
    "aria-label": "Translation with retrieval, token by token; the arrow keys move" }, ...words(card.sentence, card.buttons));
}

// Cards of the sentences of another explanation, whose texts come after those that are there.
function moreCards({ score_name, texts, sentences }) {
  const first = data.texts.length;
  data.score_name = score_name;
  data.texts.push(...texts);
  for (const { tokens, phrases } of sentences) {
    const found = tokens.flatMap(({ neighbours, text }) => [neighbours, text?.places ?? []]);
    for (const one of [...found, ...phrases.map(({ retrieved }) => retrieved)].flat()) one.sentence += first;
  }
  return sentences.map((sentence) => ({ sentence, panel: null }));
}
