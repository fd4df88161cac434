"""Retrieved sentences as a token memory of the source sentence alone, of text of the target language.

    fairseq-ccpr tune DATA_BIN --user-dir scripts/recipes/retrieved_sentences --task translation_retrieved_sentences \
      --datastore DATASTORE --path model.pt ...

The sentences of the phrase datastore that share most with a source, by what its phrases retrieve, are force-decoded under
that source. Their decoder states are the keys, and their tokens the values, of a small datastore that each step searches. It
votes only for tokens that the model itself finds possible. docs/results/monolingual.md has what it gains and costs.

Letters: B sentences, M entries of a sentence, H hypotheses, N tokens, d width of the decoder, k neighbours.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Self

import numpy as np
import torch
from fairseq.tasks import register_task
from torch import Tensor

from fairseq_ccpr import (
    Memory,
    ModelView,
    Neighbours,
    TokenMemory,
    TokenRetrievalSettings,
    TranslationRetrievalConfig,
    TranslationRetrievalTask,
    Vote,
)
from fairseq_ccpr.decoding.forced import GivenText
from fairseq_ccpr.decoding.phrase_candidates import PhraseCandidates
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.decoding.token_memory import TOKEN_FEATURES, Course, TokenBatch, TokenRecord
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.key_layer import KeyCapture

ROWS = 64  # sentences that are force-decoded at a time
TIE = 0.01  # what the squared distances of a sentence's tokens grow by with its rank: first tokens all have the same state


class SharedRetrieval:
    """A phrase retriever whose answer for the latest batch serves the phrases and the sentences."""

    def __init__(self, retriever: Any) -> None:
        self._retriever = retriever
        self._latest: tuple[Any, Callable[[], Any]] = (None, lambda: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._retriever, name)

    def start(self, sentences: list[str], learned: Any = None, encoded: Any = None) -> Callable[[], Any]:
        """Start retrieval, unless it was started for these sentences already."""
        if self._latest[0] != (sentences, learned):
            self._latest = (sentences, learned), cache(self._retriever.start(sentences, learned, encoded))
        return self._latest[1]


class Ranking:
    """Rank sentences of the phrase datastore by the phrases of a source that they have.

    A sentence scores the sum, over the phrases of the source, of the best similarity times log S / n, with n of the S
    sentences having the phrase that was retrieved.

    Args:
        count: sentences that are kept of each source.
        most: subwords that the decoder takes.
    """

    def __init__(self, candidates: PhraseCandidates, count: int, most: int) -> None:
        self.candidates, self.count, self.most = candidates, count, most
        datastore = candidates.retriever.datastore
        hashes = datastore.string_hashes(np.arange(datastore.section.size))
        _, strings, counts = np.unique(hashes, return_inverse=True, return_counts=True)
        self.rarity = np.log(datastore.section.sentences / counts.clip(max=datastore.section.sentences - 1))[strings]
        self.ids = cache(self._ids)

    def start(self, sources: Tensor) -> Callable[[], list[list[Tensor]]]:
        """Start retrieval for sources, int64 [B, S]; returns a function that waits for the ids of target sentences."""
        texts = [self.candidates.subwords.recover(self.candidates.source_dictionary, row) for row in sources.cpu()]
        answer = self.candidates.retriever.start(texts)

        def wait() -> list[list[Tensor]]:
            spans, _, entries, scores = answer()
            queries, places = (entries >= 0).nonzero()
            found = entries[queries, places]
            sentences = np.array(self.candidates.retriever.datastore.spans[found, 0], np.int64)
            values = scores[queries, places] * self.rarity[found]
            order = np.lexsort((-values, sentences, queries))
            first = np.ones(len(order), bool)
            first[1:] = (np.diff(queries[order]) != 0) | (np.diff(sentences[order]) != 0)
            best = order[first]  # entry of each phrase in each sentence
            pairs = np.stack([spans[queries[best], 0], sentences[best]], 1)
            distinct, numbers = np.unique(pairs, axis=0, return_inverse=True)
            totals = np.bincount(numbers.ravel(), values[best], len(distinct))
            ranked = distinct[np.lexsort((-totals, distinct[:, 0]))]
            each = np.split(ranked[:, 1], np.searchsorted(ranked[:, 0], np.arange(1, len(texts))))
            return [[self.ids(number) for number in one[: self.count].tolist()] for one in each]

        return wait

    def _ids(self, number: int) -> Tensor:
        subwords = self.candidates.subwords
        return torch.tensor(subwords.split(self.candidates.retriever.datastore.sentence(number)).ids[: self.most])


@dataclass(frozen=True)
class ConsentingMemory(TokenMemory):
    """A token memory that votes for no token further than `consent` nats below the model's likeliest."""

    consent: float = 4.0

    def vote(
        self, neighbours: Neighbours, model: ModelView, course: Course | None, trusted: bool, retrieved: Tensor | None = None
    ) -> Vote:  # fmt: skip
        """Vote without the neighbours that the model rules out."""
        far = model.neighbours < (model.best - self.consent).unsqueeze(1)
        ids, scores, values = neighbours
        kept = Neighbours(ids.masked_fill(far, -1), scores.masked_fill(far, float("-inf")), values)
        return super().vote(kept, model, course, trusted)


class SentenceMemory(Memory):
    """The retrieved sentences alongside the decoder."""

    name, features, bounded = "sentences", TOKEN_FEATURES, False

    def __init__(self, tokens: ConsentingMemory, ranking: Ranking, models: list[Any], pad: int, end: int) -> None:
        self.tokens, self.ranking, self.model, self.pad, self.end = tokens, ranking, models[0], pad, end
        self.settings, self.vote = tokens.settings, tokens.vote

    def begin(self, sources: Tensor) -> "SentenceBatch":
        """Begin a batch, int64 [B, S]."""
        batch = SentenceBatch(self.tokens, self.tokens.retriever, len(sources))
        batch.build = partial(self.lay_out, batch, sources, self.ranking.start(sources))
        return batch

    @torch.no_grad()
    def lay_out(self, batch: "SentenceBatch", sources: Tensor, wait: Callable[[], list[list[Tensor]]]) -> None:
        """Force-decode the sentences under their sources: keys [B, M, d], values [B, M]; what is padding is not there."""
        texts = wait()
        encoder, decoder, device = self.model.encoder, self.model.decoder, sources.device
        lengths = sources.ne(self.pad).sum(1)
        encoded = encoder.forward_torchscript({"src_tokens": sources, "src_lengths": lengths})
        longest = max((len(ids) for each in texts for ids in each), default=1)
        most = max(map(len, texts), default=0) or 1
        targets = torch.full((len(texts), most, longest), self.pad, device=device)
        for row, each in enumerate(texts):
            for column, ids in enumerate(each):
                targets[row, column, : len(ids)] = ids.to(device)
        flat = targets.flatten(0, 1)
        previous = torch.nn.functional.pad(flat[:, :-1], (1, 0), value=self.end)
        owners = torch.arange(len(texts), device=device).repeat_interleave(most)
        states = [
            decoder(
                previous[at : at + ROWS], encoder_out=encoder.reorder_encoder_out(encoded, owners[at : at + ROWS]),
                features_only=True,
            )[0]
            for at in range(0, len(flat), ROWS)
        ]  # fmt: skip
        batch.keys = torch.cat(states).float().view(len(texts), most * longest, -1)
        batch.values = targets.flatten(1)
        batch.there = batch.values.ne(self.pad) & batch.values.ne(self.tokens.unknown)
        batch.ranks = torch.arange(most, device=device).repeat_interleave(longest)
        batch.rows = torch.arange(len(texts), device=device)

    def on(self, device: torch.device) -> "SentenceMemory":
        """Return a memory that computes votes of records on another device: they are all that it needs."""
        return self

    def signature(self) -> str:
        """Name what decides the votes."""
        settings = self.settings
        return f"sentences:{self.ranking.count}|k:{settings.k}|T:{settings.temperature}|consent:{self.tokens.consent}"


@dataclass
class SentenceBatch(TokenBatch):
    """The entries of a batch of sentences, in which each hypothesis searches those of its own source."""

    build: Callable[[], None] = field(init=False)
    keys: Tensor = field(init=False)  # fp32 [B, M, d]
    values: Tensor = field(init=False)  # int64 [B, M]
    there: Tensor = field(init=False)  # bool [B, M]
    ranks: Tensor = field(init=False)  # int64 [M], of the sentence of each entry
    rows: Tensor = field(init=False)  # int64 [H], the sentence of each hypothesis, ascending

    def encoded(self, models: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Force-decode what was retrieved."""
        self.build()

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Find the k nearest entries of the sources of queries [N, d], exactly: minus squared distances."""
        copies = len(self.rows) // len(queries)  # at the first step one hypothesis stands for all of its sentence
        rows = self.rows[::copies]
        place = torch.arange(len(rows), device=rows.device) - torch.searchsorted(rows, rows)
        padded = queries.new_zeros(len(self.keys), int(place.max()) + 1, queries.size(1), dtype=torch.float32)
        padded[rows, place] = queries.float()
        distances = torch.cdist(padded, self.keys, compute_mode="use_mm_for_euclid_dist").square()
        distances = (distances + TIE * self.ranks).masked_fill(~self.there.unsqueeze(1), float("inf"))[rows, place]
        nearest, ids = distances.topk(min(k, distances.size(1)), largest=False)
        missing = nearest == float("inf")
        return Neighbours(ids.masked_fill(missing, -1), -nearest, self.values[rows].gather(1, ids))

    def reorder(self, order: Tensor) -> Self:
        """Follow the beam; sentences that have ended are left."""
        other = copy.copy(self)
        other.rows = self.rows.index_select(0, order)
        if self._sums is not None:
            other._sums = self._sums.index_select(0, order)
        return other

    def force(self, text: GivenText) -> TokenRecord:
        """Search at all tokens of given targets."""
        self.rows = text.real.nonzero()[:, 0]
        return super().force(text)


class NoDatastore:
    """Stands where a token memory has a retriever: the entries are made for each batch."""

    def describe(self) -> dict[str, object]:
        """Name nothing: the memory's own signature does."""
        return {}


@dataclass
class RetrievedSentencesConfig(TranslationRetrievalConfig):
    """Options of the task below."""

    sentences_count: int = field(default=32, metadata={"help": "sentences that are force-decoded for each source"})
    sentences_k: int = field(default=32, metadata={"help": "neighbours among their tokens"})
    sentences_temperature: float = field(default=50.0, metadata={"help": "temperature of the neighbours' distribution"})
    sentences_lambda: float = field(default=0.5, metadata={"help": "interpolation weight, which trust moves"})
    sentences_consent: float = field(
        default=4.0, metadata={"help": "nats below the model's likeliest token at which a token gets no vote"}
    )


@register_task("translation_retrieved_sentences", dataclass=RetrievedSentencesConfig)
class RetrievedSentencesTask(TranslationRetrievalTask):
    """`translation_retrieval` with that memory beside the phrases."""

    def build_memories(self, models: list[Any]) -> list[Memory]:
        """Build the memories of the datastore, and the one of the sentences."""
        cfg, memories = self.cfg, super().build_memories(models)
        phrases = next((one for one in memories if isinstance(one, PhraseMemory)), None)
        if phrases is None:
            raise ConfigurationError("the task translation_retrieved_sentences needs a datastore with phrases")
        candidates: Any = phrases.candidates
        candidates.retriever = SharedRetrieval(candidates.retriever)
        ranking = Ranking(candidates, cfg.sentences_count, models[0].decoder.max_positions() - 1)
        settings = TokenRetrievalSettings(cfg.sentences_k, cfg.sentences_lambda, cfg.sentences_temperature)
        dictionary, capture = self.target_dictionary, KeyCapture(models[0], "decoder_output")
        nothing: Any = NoDatastore()
        tokens = ConsentingMemory(capture, nothing, settings, dictionary.unk(), consent=cfg.sentences_consent)
        pad, end = dictionary.pad(), self.tags.end_of(dictionary)
        return [*memories, SentenceMemory(tokens, ranking, models, pad, end)]
