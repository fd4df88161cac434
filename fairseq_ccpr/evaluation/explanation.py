"""What supports each token of a translation: sentences, phrases and weights, as data and as a page.

Places in text are counted in characters, ends exclusive; sentences of the datastore are kept once, in
`Explanation.texts`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.datastore.learned import LearnedPair
from fairseq_ccpr.datastore.source_index import hash_source
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.breakdown import Breakdown
from fairseq_ccpr.decoding.learned_memory import LearnedEntries
from fairseq_ccpr.decoding.phrase_candidates import SentencePhrases
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.decoding.phrase_retriever import RetrievedPhrase
from fairseq_ccpr.decoding.text_memory import TextMemory
from fairseq_ccpr.evaluation.page import STYLE, fill
from fairseq_ccpr.evaluation.test_set import sentence_chrf
from fairseq_ccpr.inference.confidence import common_prefix
from fairseq_ccpr.storage.files import write_text
from fairseq_ccpr.text.decoder_subwords import UNKNOWN_SIGN

SENTENCES = 65536  # remembered as text
LONGEST = 4096  # tokens of a sentence that are shown
MOST_LIKELY = 5  # likeliest tokens of a memory that are kept
MOST_PLACES = 4  # of a token in the text
MOST_VOTES = 16  # phrases that proposed a token, likewise
MOST_FEATURES = 8  # that trust looked at, likewise
MOST_MATCHES = 5  # sentences like the source, likewise
MOST_DIFFERENCE = 200 * 200  # pairs of words that are compared: it takes the cube of a text's length
MOST_COMPARED = 200  # of these that are looked at, since some are the same
LEAST_LIKENESS = 0.3  # of these
NEARLY_SAME = 0.99  # likeness, at most, of sentences that have the same subwords in another order or number
DIGITS = 6  # significant, of a number that is kept
# In JSON these stand in strings alone, where the escapes mean the same. Left as they are, the first three
# could end the script element that holds the data, or begin a comment in it, and the others end a line.
ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}

Texts = dict[str, int]  # sentences, each with its number


def place(tokens: Tensor, position: int, text: str, to_text: Callable[[Tensor], str]) -> tuple[int, int]:
    """Return the characters of a sentence that one of its tokens stands for, without the space before it.

    They are what it adds to the text of the tokens before it: nothing, where it ends the sentence.
    """
    start, end = (common_prefix(to_text(tokens[:count]), text) for count in (position, position + 1))
    while start < end and text[start].isspace():
        start += 1
    return start, max(start, end)


@dataclass
class Match:
    """A sentence of the datastore that is like the source: what translation memories call a fuzzy match."""

    likeness: float  # 0 to 1; 1 where it is the same sentence
    source: str
    target: str
    learned: int = 0  # the id of the pair, where it was learned; 0: the datastore was built with it


class CorpusText:
    """The sentences that a token datastore was built from, read from its own values and source index, and those learned.

    Args:
        source_text: makes text of subwords of the source; only `matches` needs it.
    """

    def __init__(
        self,
        datastore: TokenDatastore,
        to_text: Callable[[Tensor], str],
        learned: LearnedEntries | None = None,
        source_text: Callable[[Tensor], str] | None = None,
    ) -> None:
        self.datastore, self.to_text, self.learned, self.source_text = (
            datastore,
            to_text,
            learned,
            source_text,
        )
        self._text_once = lru_cache(SENTENCES)(lambda first: to_text(self._tokens(first)))

    def place(self, entry: int) -> tuple[str, int, int]:
        """Return the sentence that an entry belongs to, of the datastore or learned, and its place there in characters."""
        if (row := entry - self.datastore.section.size) >= 0:
            assert self.learned is not None
            pair, position = self.learned.place(row)
            tokens = self.learned.values[row - position : row - position + pair.tokens].long().cpu()
            text = self.to_text(tokens)
        else:
            position = int(self.datastore.provenance[entry, 1])
            tokens, text = self._tokens(entry - position), self._text_once(entry - position)
        return text, *place(tokens, position, text, self.to_text)

    def learned_pair(self, entry: int) -> LearnedPair | None:
        """Return the pair that an entry was learned from; None for one that the datastore was built with."""
        if self.learned is None:
            return None
        row = entry - self.datastore.section.size
        return self.learned.place(row)[0] if row >= 0 else self.learned.moved_pair(entry)

    def likeness(self, source: np.ndarray, text: str) -> np.ndarray | None:
        """Compare a source, given as subwords, int [L], and as text, with the sentences of the datastore.

        Returns:
            fp32 [S'], numbered as in `LearnedEntries.sentences`: 1 for the same sentence, less for any other.
            None: its retriever does not learn.
        """
        if self.learned is None:
            return None
        sentences = self.learned.sentences
        index, ids = sentences.index, tuple(source.tolist())
        stored = index.find([hash_source(ids)]).get(hash_source(ids), np.empty(0, np.int64))
        same = np.setdiff1d(stored, sentences.gone).tolist()
        read = (pair.read_as.ids if pair.read_as is not None else None for pair in self.learned.pairs)
        same += [number for number, one in enumerate(read, index.described.sentences) if one == ids]
        if index.described.unknown in ids:  # which may stand for other characters
            same = [number for number in same if self._pair(number)[0] == text]
        likeness: np.ndarray = np.minimum(sentences.likeness([source]).sims[0], np.float32(NEARLY_SAME))
        likeness[same] = 1.0
        return likeness

    def matches(self, likeness: np.ndarray) -> list[Match]:
        """Return the sentences most like a source, of equal ones the newest first, and each pair once."""
        found: dict[tuple[str, str, int], Match] = {}
        alike = np.flatnonzero(likeness >= LEAST_LIKENESS)[::-1]
        order = np.argsort(-likeness[alike], kind="stable")[:MOST_COMPARED]
        for number in alike[order].tolist():
            pair = self._pair(number)
            found.setdefault(pair, Match(_short(float(likeness[number])), *pair))
            if len(found) == MOST_MATCHES:
                break
        return list(found.values())

    def _pair(self, number: int) -> tuple[str, str, int]:
        """Return source and target of a sentence, as `likeness` numbers them, and its id if it was learned, else 0."""
        assert self.learned is not None and self.source_text is not None
        index = self.learned.source_index
        if (place := number - index.described.sentences) >= 0:
            pair: LearnedPair | None = self.learned.pairs[place]
        else:
            first = int(index.sentences[number, 0])
            pair = self.learned.moved_pair(first)
        if pair is not None:
            return pair.source, pair.target, pair.id
        return (
            self.source_text(torch.from_numpy(index.source(number).astype(np.int64))),
            self._text_once(first),
            0,
        )

    def _tokens(self, first: int) -> Tensor:
        rows = slice(first, first + LONGEST)
        sentence, position = np.asarray(self.datastore.provenance[rows]).T
        same = (sentence == sentence[0]) & (position == np.arange(len(position)))
        length = len(same) if same.all() else int(same.argmin())
        return torch.from_numpy(np.asarray(self.datastore.values[rows][:length], dtype=np.int64))


@dataclass
class LikelyToken:
    """A token, and its probability by the model or a memory."""

    symbol: str
    text: str
    probability: float


@dataclass
class Neighbour:
    """An entry of the token datastore."""

    symbol: str
    score: float  # similarity, or minus the squared distance, less what its sentence costs
    sentence: int
    start: int
    end: int  # of the token; `start` where it is the end of the sentence
    learned: int = 0  # the id of the pair that it was learned from; 0: the datastore was built with it
    likeness: float | None = None  # of its sentence to the source, as of `Match`; None: not known


@dataclass
class PhraseVote:
    """A retrieved phrase that proposed the token."""

    query: int  # of `SentenceExplanation.phrases`
    retrieved: int  # of what was retrieved for that
    weight: float  # what it gave to the token, see `PhraseVotes`
    place: str  # of the token: "begins" the phrase, or "continues" it


@dataclass
class SeenFeature:
    """A feature that trust looked at."""

    name: str
    value: float
    moved: list[float]  # how far it moved the log-odds of each memory that there is


@dataclass
class TextPlace:
    """A place in the text memory where the token follows the same tokens."""

    symbol: str
    sentence: int
    start: int
    end: int  # of the token; `start` where it is the end of the sentence


@dataclass
class TextSupport:
    """What the text has after the words before the token."""

    context: str  # the last of them, as many as the text has the token after
    count: int  # how often it follows there
    places: list[TextPlace]


@dataclass
class TokenExplanation:
    """p = sum of weight times probability; lists are of the model and then of each memory that votes."""

    symbol: str
    start: int  # in the translation
    end: int  # `start` for the end of the sentence
    probability: float  # p
    probabilities: list[float]  # of this token, by each; 0 where a memory does not name it
    weights: list[float]  # 1 - Lambda, then lambda of each memory
    shares: list[float]  # of p, which sum to one
    favourite: LikelyToken | None  # what the model alone would have written here; None where it is this token
    says: list[list[LikelyToken]]  # of each memory, without the model
    neighbours: list[Neighbour] = field(default_factory=list)
    neighbours_found: int = 0
    votes: list[PhraseVote] = field(default_factory=list)
    votes_found: int = 0
    settings_weights: list[float] = field(default_factory=list)  # of each, before trust; empty without it
    trust_saw: list[SeenFeature] = field(default_factory=list)  # what moved the weights most
    # of the text memory; None where the text never has the token after the last one
    text: TextSupport | None = None


@dataclass
class ShownPhrase:
    """A phrase of the phrase datastore, with its place in a sentence."""

    score: float
    sentence: int
    start: int
    end: int
    usable: bool  # whether it can be written in the decoder's subwords
    learned: int = 0  # the id of the pair that it was learned from; 0: the datastore was built with it


@dataclass
class SourcePhrase:
    """A phrase of a source sentence, with what was retrieved for it."""

    text: str
    probability: float  # of being a phrase
    retrieved: list[ShownPhrase]


@dataclass
class SentenceExplanation:
    """A sentence, its translations, and an explanation of the one with retrieval."""

    number: int
    source: str
    reference: str | None
    plain: str  # fairseq's own translation
    differences: list[tuple[int, int]]  # places of `plain` that the translation does not have
    translation: str
    tokens: list[TokenExplanation]
    phrases: list[SourcePhrase]
    changed: float  # 100 - chrF of the translation against the plain one
    gained: float | None  # chrF against the reference, less that of the plain one
    # most alike first; None: there is no datastore that has its source sentences
    matches: list[Match] | None = None
    other_text: bool = False  # it was made without the text memory and phrases, see --text-foreign


@dataclass(repr=False)
class Explanation:
    """The contents of the page."""

    subset: str  # of a data folder; empty for sentences given as text
    source_language: str
    target_language: str
    sentences_in_subset: int
    signature: str
    memories: list[str]  # names of those that vote
    score_name: str  # of neighbours
    sentences: list[SentenceExplanation]
    texts: list[str]
    bleu: dict[str, float] | None = None  # of both systems; None without references
    bleu_signature: str = ""

    def __repr__(self) -> str:
        """Name what it is: the content is as long as the page."""
        return f"<Explanation, sentences: {len(self.sentences):,}>"

    def save(self, path: Path | str) -> None:
        """Write the page, one self-contained HTML file, under its final name only when it is complete."""
        write_text(Path(path), as_page(asdict(self)))


def joined(parts: list[Explanation]) -> Explanation:
    """Join explanations of the sentences of a text, which then own theirs no longer; texts are kept once."""
    texts: Texts = {}
    for part in parts:
        numbers = [texts.setdefault(text, len(texts)) for text in part.texts]
        for sentence in part.sentences:
            for neighbour in (n for token in sentence.tokens for n in token.neighbours):
                neighbour.sentence = numbers[neighbour.sentence]
            for phrase in (one for query in sentence.phrases for one in query.retrieved):
                phrase.sentence = numbers[phrase.sentence]
            for found in (one for token in sentence.tokens if token.text for one in token.text.places):
                found.sentence = numbers[found.sentence]
    sentences = [sentence for part in parts for sentence in part.sentences]
    return replace(parts[-1], sentences=sentences, sentences_in_subset=len(sentences), texts=list(texts))


@dataclass
class Explainer:
    """Make plain data of a breakdown."""

    dictionary: Any
    to_text: Callable[[Tensor], str]
    source_text: Callable[[Tensor], str]
    corpus: CorpusText | None
    texts: Texts
    most_neighbours: int
    text: TextMemory | None = None

    def _number(self, text: str) -> int:
        """Number a sentence of the datastore; equal sentences share a number."""
        return self.texts.setdefault(text, len(self.texts))

    def sentence(
        self,
        breakdown: Breakdown,
        row: int,
        number: int,
        source: str,
        reference: str | None,
        plain: str,
        to_text: Callable[[Tensor], str],
        likeness: np.ndarray | None = None,
    ) -> SentenceExplanation:
        """Explain the sentence at a place in a batch, whose translation was broken down; see `SentenceExplanation`.

        Args:
            to_text: writes the translation, or the beginning of it.
            likeness: of the datastore's sentences, see `CorpusText.likeness`.
        """
        rows = (breakdown.text.sentences == row).nonzero()[:, 0].tolist()
        written = breakdown.text.targets[rows].cpu()
        translation = to_text(written)
        phrases = breakdown.text.records.get(PhraseMemory.name)
        gained = None
        if reference is not None:
            gained = round(sentence_chrf(translation, reference) - sentence_chrf(plain, reference), 1)
        changed = 0.0 if plain == translation else round(100 - sentence_chrf(translation, plain), 1)
        places = [place(written, position, translation, to_text) for position in range(len(rows))]
        tokens = [
            self._token(breakdown, one, written, n, translation, places[n]) for n, one in enumerate(rows)
        ]
        for one, token in zip(rows, tokens):
            self._add_neighbours(token, breakdown, one, likeness)
        matches = self.corpus.matches(likeness) if self.corpus is not None and likeness is not None else None
        found = self._phrases(phrases.batch.phrases[row]) if phrases is not None else []
        replaced = differences(plain, translation)
        return SentenceExplanation(
            number, source, reference, plain, replaced, translation, tokens, found, changed, gained, matches
        )

    def _token(
        self,
        breakdown: Breakdown,
        row: int,
        written: Tensor,
        position: int,
        text: str,
        where: tuple[int, int],
    ) -> TokenExplanation:
        forced, votes = breakdown.text, breakdown.votes
        target = forced.targets[row : row + 1]
        weights = [float(vote.weight[row]) for vote in votes]
        weights = [1 - sum(weights), *weights]
        said = [vote.select(slice(row, row + 1)).log_prob(target) for vote in votes]
        logs = torch.cat([forced.log_probs[row : row + 1], *said]).double().cpu()
        token, favourite = int(target), int(forced.likeliest.favourite[row])
        explained = TokenExplanation(
            (text[slice(*where)] if token == self.dictionary.unk() else "") or self._symbol(token),
            *where,
            _short(float(breakdown.mixed[row].double().exp())),
            [_short(p) for p in logs.exp().tolist()],
            [_short(weight) for weight in weights],
            [_short(share) for share in breakdown.shares[row].tolist()],
            self._likely(favourite, float(forced.likeliest.best[row].exp())) if favourite != token else None,
            [
                self._most_likely(vote.values[row].tolist(), vote.log_probs[row].exp().tolist())
                for vote in votes
            ],
        )
        self._add_votes(explained, breakdown, row)
        self._add_trust(explained, breakdown, row)
        if self.text is not None:
            explained.text = self._support(self.text, written, position)
        return explained

    def _support(self, memory: TextMemory, written: Tensor, position: int) -> TextSupport | None:
        tokens = written.to(memory.special.device)
        counts = memory.counts.counted(tokens[None, :position], tokens[position : position + 1])
        length = max((k for k in range(1, len(counts)) if counts[k]), default=0)
        if not length:
            return None
        gram, places = written[position - length : position + 1].tolist(), []
        # beyond the last, in vain
        for number, at in memory.datastore.find(gram, min(MOST_PLACES, counts[length])):
            sentence = torch.from_numpy(memory.datastore.sentence(number).astype(np.int64))
            text = self.to_text(sentence)
            where = place(sentence, at, text, self.to_text)
            places.append(TextPlace(self._symbol(gram[-1]), self._number(text), *where))
        return TextSupport(self.to_text(written[position - length : position]), counts[length], places)

    def _add_trust(self, explained: TokenExplanation, breakdown: Breakdown, row: int) -> None:
        if breakdown.before is None:
            return
        before = breakdown.before[row].tolist()
        explained.settings_weights = [_short(weight) for weight in (1 - sum(before), *before)]
        if breakdown.features is None or breakdown.attributions is None:
            return
        moved = breakdown.attributions[row]  # [M, F]
        order = moved.abs().amax(dim=0).argsort(descending=True)[:MOST_FEATURES].tolist()
        seen, moves = breakdown.features[row].tolist(), moved.T.tolist()
        explained.trust_saw = [
            SeenFeature(breakdown.names[i], _short(seen[i]), [_short(x) for x in moves[i]]) for i in order
        ]

    def _add_neighbours(
        self, explained: TokenExplanation, breakdown: Breakdown, row: int, likeness: np.ndarray | None
    ) -> None:
        if (neighbours := breakdown.neighbours) is None or self.corpus is None:
            return
        found = neighbours.ids[row] >= 0
        parts = neighbours.ids, neighbours.scores, neighbours.values
        entries, scores, values = (part[row][found].tolist() for part in parts)
        explained.neighbours_found = len(entries)
        for entry, value, score in zip(entries[: self.most_neighbours], values, scores):
            text, start, end = self.corpus.place(entry)
            symbol, number = self._symbol(value), self._number(text)
            pair = self.corpus.learned_pair(entry)
            learned = pair.id if pair is not None else 0
            explained.neighbours.append(Neighbour(symbol, _short(score), number, start, end, learned))
        if likeness is not None and self.corpus.learned is not None:
            sentences = self.corpus.learned.sentences_of(neighbours.ids[row][found]).tolist()
            for one, sentence in zip(explained.neighbours, sentences):
                one.likeness = _short(float(likeness[sentence]))

    def _add_votes(self, explained: TokenExplanation, breakdown: Breakdown, row: int) -> None:
        record, gave = breakdown.text.records.get(PhraseMemory.name), breakdown.phrase_votes
        if record is None or gave is None:
            return
        votes = gave[row].masked_fill(record.proposals.values[row] != breakdown.text.targets[row], 0.0)
        order = votes.argsort(descending=True, stable=True)
        slots = order[votes[order] > 0].tolist()
        candidates = record.batch.phrases[int(breakdown.text.sentences[row])].candidates
        explained.votes_found = len(slots)
        for slot in slots[:MOST_VOTES]:
            state, weight = int(record.proposals.states[row, slot]), _short(float(votes[slot]))
            position = "continues" if state else "begins"
            vote = PhraseVote(int(candidates.queries[slot]), int(candidates.ranks[slot]), weight, position)
            explained.votes.append(vote)

    def _most_likely(self, tokens: list[int], probabilities: list[float]) -> list[LikelyToken]:
        """Return the likeliest of tokens that may come several times, each time with the token's whole probability."""
        likely = sorted(dict(zip(tokens, probabilities)).items(), key=lambda item: -item[1])
        return [self._likely(token, p) for token, p in likely[:MOST_LIKELY] if p > 0]

    def _likely(self, token: int, probability: float) -> LikelyToken:
        symbol = self._symbol(token)
        return LikelyToken(symbol, self.to_text(torch.tensor([token])) or symbol, _short(probability))

    def _symbol(self, token: int) -> str:
        symbol: str = self.dictionary.symbols[token] if token != self.dictionary.unk() else UNKNOWN_SIGN
        return symbol

    def _phrases(self, found: SentencePhrases) -> list[SourcePhrase]:
        usable = {*zip(found.candidates.queries.tolist(), found.candidates.ranks.tolist())}

        def shown(one: RetrievedPhrase, can_be_written: bool) -> ShownPhrase:
            sentence = self._number(one.sentence)
            return ShownPhrase(_short(one.score), sentence, one.start, one.end, can_be_written, one.learned)

        return [
            SourcePhrase(
                query.string, _short(query.probability),
                [shown(one, (number, rank) in usable) for rank, one in enumerate(query.retrieved)],
            )
            for number, query in enumerate(found.queries)
        ]  # fmt: skip


def differences(plain: str, translation: str) -> list[tuple[int, int]]:
    """Places of `plain` whose words, and the spaces between them, `translation` does not have there.

    >>> differences("open the files now", "open a file now")
    [(5, 14)]
    """
    words = list(re.finditer(r"\S+", plain))
    changed = [
        (first, end) for kind, first, end, *_ in _opcodes(plain, translation) if kind in ("replace", "delete")
    ]
    return [(words[first].start(), words[end - 1].end()) for first, end in changed]


def changes(before: str, after: str) -> list[tuple[str, str]]:
    """Tell by words what makes one text of another: what is the `same`, `deleted` and `inserted`.

    >>> changes("open the files now", "open a file now")
    [('same', 'open'), ('deleted', 'the files'), ('inserted', 'a file'), ('same', 'now')]
    """
    old, new = before.split(), after.split()
    found = []
    for kind, first, end, begin, stop in _opcodes(before, after):
        if kind == "equal":
            found.append(("same", " ".join(new[begin:stop])))
            continue
        each = ("deleted", old[first:end]), ("inserted", new[begin:stop])
        found += [(name, " ".join(words)) for name, words in each if words]
    return found


def _opcodes(before: str, after: str) -> Sequence[tuple[str, int, int, int, int]]:
    old, new = before.split(), after.split()
    if len(old) * len(new) > MOST_DIFFERENCE:
        return [("equal" if old == new else "replace", 0, len(old), 0, len(new))]
    return difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()


def _short(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


STYLES = STYLE.read_text(encoding="utf-8") + _read("explanation.css")
# displays tokens; other pages use it as well
TOKENS = _read("explanation_token.js") + _read("explanation_tokens.js")


def as_page(explanation: dict[str, Any]) -> str:
    """Return the page of an `Explanation`, given as a dictionary; its script makes elements of the data, and text of text."""
    script = TOKENS + _read("explanation.js")
    parts = {"/* style */": STYLES, "/* script */": script, "/* data */": as_json(explanation)}
    return fill(Path(__file__).with_name("explanation.html"), parts)


def as_json(explanation: dict[str, Any]) -> str:
    """JSON that may stand inside an HTML script element."""
    text = json.dumps(explanation, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(ESCAPES)
