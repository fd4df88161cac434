// The page: its sentences, searching and sorting.

function changes(sentence) {
  const characters = [...sentence.plain], parts = [];
  let at = 0;
  for (const [start, end] of sentence.differences) {
    parts.push(characters.slice(at, start).join(""), make("del", {}, characters.slice(start, end).join("")));
    at = end;
  }
  return [...parts, characters.slice(at).join("")];
}

function phraseList(sentence) {
  const item = (found) => make("li", {},
    make("span", { class: "score" }, found.score.toFixed(2)),
    marked(found, "by-phrase", 60),
    learnedTag(found),
    found.usable ? null
      : make("span", { class: "muted" }, " · not used: its subwords are those of a better one, or cannot be cut out"));
  const list = make("ul");
  const whole = make("details", { class: "phrases" },
    make("summary", {}, `Source phrases and what was retrieved for them (${sentence.phrases.length})`), list);
  whole.addEventListener("toggle", () => {
    if (!list.childElementCount) list.append(...sentence.phrases.map((phrase) => make("li", {},
      make("b", language(data.source_language), phrase.text),
      make("span", { class: "muted small" }, ` ${percent(phrase.probability)} sure to be a phrase`),
      ...(phrase.retrieved.length ? shortened(phrase.retrieved.map(item), 4)
        : [make("p", { class: "muted small" }, "Nothing was retrieved.")]))));
  });
  return whole;
}

function makeCard(sentence, order) {
  const card = { sentence, order, buttons: [], panel: null };
  const row = (name, settings, ...text) => make("div", { class: `row ${settings.class || ""}` },
    make("dt", {}, name), make("dd", settings, ...text));
  const target = language(data.target_language);
  const points = Math.round(sentence.gained);
  const gain = sentence.gained === null ? "" : ` · chrF ${points < 0 ? "−" : "+"}${Math.abs(points)}`;
  const other = sentence.other_text ? " · of other text: without text memory and phrases" : "";
  card.tokens = make("dl", {}, row("With retrieval", { class: "translation" }, tokenRow(card)));
  card.element = make("article", { class: "card", "aria-label": `Sentence ${sentence.number}` },
    make("header", {}, make("h2", {}, `Sentence ${sentence.number}`),
      make("span", { class: "small muted" }, (sentence.changed ? `changed ${sentence.changed.toFixed(0)}%${gain}` : "unchanged") + other),
      bar(meanShares(sentence.tokens))),
    make("dl", {}, row("Source", language(data.source_language), sentence.source)),
    card.tokens,
    make("dl", {},
      row("Model alone", target, ...changes(sentence)),
      sentence.reference === null ? null : row("Reference", target, sentence.reference)),
    matchList(sentence),
    has("phrases") ? phraseList(sentence) : null);
  card.text = [sentence.number, sentence.source, sentence.reference || "", sentence.plain, sentence.translation,
    ...sentence.phrases.flatMap((phrase) => [phrase.text,
      ...phrase.retrieved.map((found) => cut(data.texts[found.sentence], found.start, found.end))]),
    ...(sentence.matches ?? []).flatMap(({ source, target }) => [source, target]),
  ].join("\n").toLowerCase();
  return card;
}

const ORDERS = [
  { name: "in order", key: (card) => card.order, there: true },
  { name: "changed most", key: (card) => -card.sentence.changed, there: true },
  { name: "gained most (chrF)", key: (card) => -card.sentence.gained, there: data.bleu !== null },
  { name: "lost most (chrF)", key: (card) => card.sentence.gained, there: data.bleu !== null },
].filter((order) => order.there);

// ---- the page

function head(cards) {
  const count = data.sentences.length.toLocaleString("en");
  byId("about").append(`${count} of ${data.sentences_in_subset.toLocaleString("en")} sentences${data.subset && ` of ${data.subset}`}, `
    + `${data.source_language} → ${data.target_language}: where each token of their translations came from.`);
  const figure = (name, number) => make("p", {}, make("b", {}, number), make("span", { class: "muted small" }, name));
  const changed = data.sentences.filter((sentence) => sentence.changed > 0).length;
  byId("scores").append(make("div", { class: "figures" },
    data.bleu ? figure("BLEU, model alone", data.bleu.base.toFixed(1)) : null,
    data.bleu ? figure("BLEU, with retrieval", data.bleu.retrieval.toFixed(1)) : null,
    figure("sentences changed", changed.toLocaleString("en"))));
  if (data.bleu) byId("scores").append(make("p", { class: "muted small" },
    `Over the ${count} sentences of this page only: no score of a test set.`));
  const all = meanShares(data.sentences.flatMap((sentence) => sentence.tokens));
  byId("legend").append(bar(all),
    make("ul", { class: "key" }, ...ALL.map((part) => make("li", {},
      make("i", { class: `swatch ${PARTS[part].by}` }), `${PARTS[part].name} ${percent(all[part])}`))),
    make("p", { class: "small muted" }, "A token has the colour of what gave most of its probability; the bar under it shows all parts. "
      + "The small word above it is what the model alone would have written after the same words. "
      + "Tap a token, or walk with the arrow keys, to see why it was written."));
  byId("fine-print").append(
    make("p", { class: "small" }, "A token’s probability is the sum of weight times probability of the model and of each datastore: "
      + `p = (1 − Λ) p_model${PARTS.slice(1).map(({ index }) => ` + λ*${index} p_${index}`).join("")}, `
      + `with Λ = ${PARTS.slice(1).map(({ index }) => `λ*${index}`).join(" + ")}. Parts are of p.`),
    make("p", { class: "small" }, "Retrieval ", make("code", {}, data.signature)),
    data.bleu ? make("p", { class: "small" }, "BLEU ", make("code", {}, data.bleu_signature)) : "",
    make("p", { class: "small" }, "“Changed” is 100 less the chrF of the translation against that of the model alone"
      + (data.bleu ? ", “chrF +/−” what it gained or lost against the reference." : ".")));
  byId("sort").append(...ORDERS.map((order, index) => make("option", { value: index }, order.name)));
  byId("search").addEventListener("input", () => filter(cards));
  byId("sort").addEventListener("change", () => sort(cards));
  byId("glosses").addEventListener("change", (event) => {
    byId("sentences").classList.toggle("no-glosses", !event.target.checked);
  });
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") shut(true); });
}

function filter(cards) {
  const wanted = byId("search").value.trim().toLowerCase();
  for (const card of cards) card.element.hidden = !card.text.includes(wanted);
  const shown = cards.filter((card) => !card.element.hidden).length;
  byId("status").textContent = wanted ? `${shown} of ${cards.length} sentences have ${quoted(wanted)}` : "";
}

function sort(cards) {
  const { key } = ORDERS[byId("sort").value];
  cards.sort((one, two) => key(one) - key(two) || one.order - two.order);
  byId("sentences").append(...cards.map((card) => card.element));
}

function openFromAddress(cards) {
  const [number, at] = location.hash.slice(1).split(".");
  const card = cards.find((one) => String(one.sentence.number) === number);
  if (!card) return;
  card.element.scrollIntoView({ behavior: "instant" });
  if (card.buttons[at]) select(card, Number(at));
}

const cards = data.sentences.map(makeCard);
head(cards);
sort(cards);
openFromAddress(cards);
