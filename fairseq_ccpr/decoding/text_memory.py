"""The text memory: what a text of the target language would say, against what is general.

    p(v) ~ p_NMT(v | x, y<t) (p_text(v | y<t) / p_general(v | y<t)^beta)^alpha

over the model's likeliest tokens, whose mass stays what p_NMT gives them, before any memory votes. That is a
density ratio instead of shallow fusion: frequent words are not rewarded twice, by the model and by the
text (Herold et al. 2023 subtract the model's own expectation of the language for the same reason). Both
distributions are counts, see `datastore.text`. alpha is 0 where the text has not even the last subword, and
moves token by token where tuning trained it to.

Letters: H hypotheses, N tokens that are changed, F features.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fairseq_ccpr.datastore.text import Counts, TextDatastore
from fairseq_ccpr.decoding.gate import Gate
from fairseq_ccpr.decoding.learned_memory import LearnedEntries, LearnedMemory
from fairseq_ccpr.decoding.memory import Memory, MemoryBatch, Snapshot, Step, Variant
from fairseq_ccpr.decoding.mixture import SILENT
from fairseq_ccpr.decoding.options import TextSettings
from fairseq_ccpr.settings import signature
from fairseq_ccpr.storage.fingerprint import of_parameters, short
from fairseq_ccpr.timing import TEXT, phase

# More tokens, or rarer ones, move likelihood, since references have them, and no translation.
TOKENS, RANGE = 32, 6.0  # fewer than that are changed, which are less than so many nats below the likeliest
STEPS = 4  # of a nat, in which the range is made shorter where there are too many: ranking them takes longer
LAST = int(RANGE * STEPS)
FEATURES = (
    "highest p_NMT",
    "highest p_text",
    "highest ratio",
    "text has 2 tokens",
    "text has 3 tokens",
    "text has 4 tokens",
    "log count",
    "log types",
    "favourites agree",
    "prefix",
)
HIDDEN = 8
# What tuning compares.
ALPHAS = 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8
BETA = 1.0  # references are likelier with 0.5, but translations are better with 1
LESS, MORE, NONE = 0.5, 1.5, 0.0  # times alpha: likelihood wants more of it than translations do, or less
PRIOR = 2  # tokens of a prefix that are of neither text
UNSETTLED = 256  # sentences that are taken away again at each change
NOTHING = -2  # stands where there is no token; no context has it
PLACES = 64  # longer sentences that end as one that is looked for, at most
MOST_LOG_FACTOR = 4.0  # of alpha's change, either way


class Observed(NamedTuple):
    """What the model and both texts say of N tokens after H hypotheses, and what alpha is decided by."""

    rows: Tensor  # int64 [N], the hypothesis of each token
    tokens: Tensor  # int64 [N]
    model: Tensor  # fp32 [N], log p_NMT; -inf for tokens that are not changed
    text: Tensor  # fp32 [N], log p_text
    general: Tensor  # fp32 [N], log p_general
    found: Tensor  # bool [H], whether the text has the last subword
    features: Tensor  # fp32 [H, F]

    def fused(self, alpha: Tensor, beta: float | Tensor) -> Tensor:
        """Compute log p of the tokens, fp32 [N], with alpha fp32 [H]; it can be differentiated."""
        scores = self.model + (alpha * self.found).index_select(0, self.rows) * (
            self.text - beta * self.general
        )
        return scores + (self._mass(self.model) - self._mass(scores)).index_select(0, self.rows)

    def _mass(self, scores: Tensor) -> Tensor:
        """Sum up probabilities by hypothesis, log fp32 [H]."""
        if scores.is_cuda:  # as many for each: adding them at random places would round at random
            return scores.view(len(self.found), -1).logsumexp(1)
        known = scores.detach()  # the highest only keeps exp in its range
        highest = known.new_full((len(self.found),), -1e30).scatter_reduce(0, self.rows, known, "amax")
        total = torch.zeros_like(highest).index_add(0, self.rows, (scores - highest[self.rows]).exp())
        return total.clamp_min(1e-30).log() + highest

    @classmethod
    def joined(cls, parts: list[Observed]) -> Observed:
        begins = torch.tensor([0, *(len(part.found) for part in parts)]).cumsum(0)
        rows = torch.cat([part.rows + begin for part, begin in zip(parts, begins)])
        return cls(rows, *(torch.cat(column) for column in list(zip(*parts))[1:]))


class TextWeight(Gate):
    """How much alpha changes with its features: exp of a gate's output, 1 as it is made."""

    def __init__(self) -> None:
        super().__init__(FEATURES, 1, HIDDEN, MOST_LOG_FACTOR)

    def forward(self, features: Tensor) -> Tensor:
        """Compute the factor of alpha, fp32 [H]."""
        return super().forward(features).squeeze(1).exp()


class LearnedTargets:
    """The targets of learned pairs, counted alongside a text; what they supersede is taken away.

    Those that have moved into the datastore, and what was superseded before, are counted once, and not at
    each change.
    """

    def __init__(self, datastore: TextDatastore, counts: Counts, end: int) -> None:
        self.datastore, self.counts, self.end = datastore, counts, end
        self._last: tuple[LearnedEntries | None, Counts] = (None, counts)
        self._settled: tuple[set[bytes], set[bytes], Counts] = (set(), set(), counts)  # moved, superseded
        self._in_text: dict[bytes, bool] = {}

    def counted(self, entries: LearnedEntries) -> Counts:
        """Return the counts of the text with those of the pairs of a snapshot added."""
        before, counts = self._last
        if before is not entries:
            stored, values = entries.stored, entries.values.cpu().numpy()
            moved = _distinct(
                [] if stored is None else [stored[one.first_entry :][: one.tokens] for one in entries.moved]
            )
            removed = {
                name: one
                for name, one in _distinct(entries.superseded).items()
                if self._is_in_text(name, one)
            }
            known, gone, counts = self._settled
            if known != moved.keys() or not gone <= removed.keys() or len(removed) - len(gone) > UNSETTLED:
                known, gone = set(moved), set(removed)
                counts = self.counts.plus(list(moved.values()), self.end, removed.values())
                self._settled = known, gone, counts
            learned = _distinct(
                values[row : row + pair.tokens] for pair, row in zip(entries.pairs, entries.rows)
            )
            new = [target for name, target in learned.items() if name not in known]
            counts = counts.plus(
                new, self.end, [target for name, target in removed.items() if name not in gone]
            )
            self._last = entries, counts
        return counts

    def _is_in_text(self, name: bytes, target: np.ndarray) -> bool:
        if name not in self._in_text:
            sentences = (
                self.datastore.sentence(number) for number, _ in self.datastore.find(target.tolist(), PLACES)
            )
            self._in_text[name] = any(np.array_equal(sentence, target) for sentence in sentences)
        return self._in_text[name]


def _distinct(targets: Iterable[np.ndarray]) -> dict[bytes, np.ndarray]:
    return {target.tobytes(): np.asarray(target, np.int64) for target in targets}


@dataclass(frozen=True)
class TextMemory(Memory):
    """A text alongside the decoder.

    Args:
        datastore: its text part.
        counts: of it, on the models' device, with those of what was learned.
        settings: alpha and beta.
        weight: what tuning trained.
        special: int64, ids of tokens that are no text: padding, the beginning of a sentence, unknown tokens,
            tags.
        end: the token that ends sentences, and stands in front of the first.
        learned: pairs whose targets count as well, see `LearnedTargets`.
    """

    name = "text"
    acts_on = "model"
    part = "text"
    tuned = ("alpha", "beta")
    scale = "alpha"

    datastore: TextDatastore
    counts: Counts
    settings: TextSettings
    weight: TextWeight
    special: Tensor
    end: int
    learned: LearnedMemory | LearnedEntries | None = None
    targets: LearnedTargets | None = None  # which counts those of `learned`

    def begin(self, sources: Tensor, snapshot: Snapshot) -> TextBatch:
        return TextBatch(self.at(snapshot))

    def at(self, snapshot: Snapshot) -> TextMemory:
        if self.targets is None or snapshot.learned is None:
            return self
        counts = self.targets.counted(snapshot.learned)
        return replace(self, counts=counts, learned=None, targets=None)

    @property
    def judges(self) -> bool:
        """Whether it can tell sentences of other text, and is asked to."""
        asked = self.settings.alpha > 0 and self.settings.foreign < math.inf
        return asked and bool(self.datastore.section.general)

    def foreignness(self, translations: Sequence[Tensor]) -> Tensor:
        """Compute log p_general - log p_text of whole translations, int64 [L] each, in nats: fp32 [B]."""
        tokens = pad_sequence(list(translations), batch_first=True, padding_value=NOTHING)
        real, size = tokens != NOTHING, max(1, self.counts.order - 1)
        before = tokens.new_full((len(tokens), size), NOTHING)
        before[:, -1] = self.end
        contexts = torch.cat([before, tokens], 1).unfold(1, size, 1)[:, : tokens.size(1)][real]
        written = tokens[real]
        found = self.counts.look_up(contexts, torch.arange(len(written), device=written.device), written)
        odds = (found.general - found.text).masked_fill(torch.isin(written, self.special), 0.0)
        return odds.new_zeros(len(tokens)).index_add_(0, real.nonzero()[:, 0], odds)

    def observe(self, step: Step) -> Observed:
        """Look up what the text says of the likeliest tokens."""
        model, likeliest = step.model.log_probs, step.model.likeliest
        if model.is_cuda:  # as many for each hypothesis, so that nothing need be known of the device
            log_probs, tokens = model.topk(min(TOKENS, model.size(1)), dim=1)
            rows = torch.arange(len(model), device=model.device).repeat_interleave(tokens.size(1))
            log_probs, tokens = log_probs.flatten(), tokens.flatten()
        else:
            near = model.numpy() > (likeliest.best - RANGE).numpy()[:, None]  # in a quarter of torch's time
            places = torch.from_numpy(np.flatnonzero(near))  # in a fifth
            rows, tokens = places // model.size(1), places % model.size(1)
            log_probs = model.reshape(-1).index_select(0, places)
        # also of what is ruled out
        steps = ((likeliest.best[rows] - log_probs) * STEPS).clamp_max_(LAST).long()
        within = torch.zeros(len(model) * (LAST + 1), dtype=torch.int64, device=model.device)
        within = (
            within.index_add_(0, rows * (LAST + 1) + steps, torch.ones_like(rows))
            .view(len(model), -1)
            .cumsum(1)
        )
        many = within.view(-1).index_select(0, rows * (LAST + 1) + steps) >= TOKENS
        log_probs = log_probs.masked_fill(many | (steps == LAST), float("-inf"))
        if not model.is_cuda:
            some = (log_probs > float("-inf")).nonzero().squeeze(1)
            rows, tokens, log_probs = (one.index_select(0, some) for one in (rows, tokens, log_probs))
        log_probs = log_probs.masked_fill((tokens.unsqueeze(1) == self.special).any(1), float("-inf"))
        # Multilingual models have a language tag where sentences of the text have the end of one before.
        hypotheses = step.tokens.index_fill(1, step.tokens.new_zeros(1), self.end)
        found = self.counts.look_up(hypotheses, rows, tokens)
        text = found.text.masked_fill(log_probs == float("-inf"), float("-inf"))
        highest = [self._highest(rows, scores, len(model)) for scores in (text, text - found.general)]
        named = (text == highest[0][rows]) & (tokens == likeliest.favourite[rows])
        agree = self._highest(rows, named.float(), len(model)).clamp_min(0)
        lengths = [(found.length >= length).float() for length in (2, 3, 4)]
        counts = found.seen.clamp_min(1).float().log().unbind(1)
        written = step.tokens[:, 1:]
        prefix = self.counts.ratios[written].sum(1) / (written.size(1) + PRIOR)  # is it of the text at all?
        said = likeliest.best, *(one.clamp_min(-50) for one in highest)
        features = torch.stack([*said, *lengths, *counts, agree, prefix], 1)
        return Observed(rows, tokens, log_probs, found.text, found.general, found.length > 0, features)

    @staticmethod
    def _highest(rows: Tensor, scores: Tensor, size: int) -> Tensor:
        return scores.new_full((size,), float("-inf")).scatter_reduce(0, rows, scores, "amax")

    def signature(self) -> str:
        trained = (
            short(of_parameters(self.weight.state_dict().items())) if self.weight.output.weight.any() else ""
        )
        values = {
            "text": short(self.datastore.keys_fingerprint),
            "alpha": self.settings.alpha,
            "beta": self.settings.beta,
        } | ({"foreign": self.settings.foreign} if self.judges else {})
        return signature(values | ({"weight": trained} if trained else {}))

    def trained(self) -> dict[str, Tensor]:
        return self.weight.stored()

    def on(self, device: torch.device) -> TextMemory:
        """Return a memory that weighs what was observed on another device."""
        return replace(self, weight=copy.deepcopy(self.weight).to(device))

    def alternatives(self) -> list[Memory]:
        beta, weight = BETA if self.datastore.section.general else 0.0, TextWeight().requires_grad_(False)
        return [replace(self, settings=TextSettings(alpha, beta), weight=weight) for alpha in ALPHAS]

    def recorded(self, steps: Iterable[tuple[Step, Tensor]]) -> TextRecord:
        """Look up what the text says before each token of given targets; on the CPU."""
        parts = []
        for step, targets in steps:
            model = step.model.log_probs.gather(1, targets.unsqueeze(1)).squeeze(1).clamp_min(SILENT)
            found = Observed(*(part.cpu() for part in self.observe(step)))
            parts.append((found, targets.cpu(), model.cpu()))
        each, *others = zip(*parts)
        observed, (targets, model) = Observed.joined(list(each)), map(torch.cat, others)
        is_target = (observed.tokens == targets[observed.rows]) & (observed.model > float("-inf"))
        return TextRecord(observed, model, is_target.nonzero().squeeze(1))

    def trainable(self, records: Sequence[TextRecord]) -> tuple[TextMemory, TextWeight]:
        weight = TextWeight()
        weight.prepare(torch.cat([record.observed.features for record in records]))
        return replace(self, weight=weight), weight

    def variants(self, options: Any) -> list[Variant]:
        less, more, none = (partial(TextMemory.scaled, factor=factor) for factor in (LESS, MORE, NONE))
        return [Variant(less), Variant(more, otherwise=True), Variant(none, leaves_out=True)]


class TextRecord(NamedTuple):
    """What the model and the text say before N reference tokens."""

    observed: Observed  # H = N
    model: Tensor  # fp32 [N], log p_NMT of them
    named: Tensor  # int64, places of the references among the observed tokens

    def weight(self, memory: TextMemory) -> Tensor:
        """Compute alpha, fp32 [N]."""
        return memory.settings.alpha * memory.weight(self.observed.features) * self.observed.found

    def log_likelihood(self, memory: TextMemory) -> Tensor:
        """Compute log p of the references, fp32 [N]; it can be differentiated."""
        fused = self.observed.fused(self.weight(memory), memory.settings.beta).index_select(0, self.named)
        return self.model.index_copy(0, self.observed.rows[self.named], fused)


@dataclass
class TextBatch(MemoryBatch):
    """The text during a batch: hypotheses hold all that it looks at."""

    memory: TextMemory

    @phase(TEXT)
    def rescore(self, step: Step) -> Tensor | None:
        memory, log_probs = self.memory, step.model.log_probs
        if not memory.settings.alpha:
            return None
        observed = memory.observe(step)
        fused = observed.fused(memory.settings.alpha * memory.weight(observed.features), memory.settings.beta)
        unchanged = log_probs[observed.rows, observed.tokens]
        log_probs[observed.rows, observed.tokens] = torch.where(
            observed.model > float("-inf"), fused, unchanged
        )
        return log_probs
