"""Training trust and the votes of phrases on held-out references, with other text that must not lose."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble, trust_step
from fairseq_ccpr.decoding.mixture import ALMOST_ALL, SILENT, Mixture
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.decoding.phrase_votes import PhraseVotes
from fairseq_ccpr.decoding.trust import Trust
from fairseq_ccpr.device import one_thread
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.grids import Alongside, HeldOut, Worth
from fairseq_ccpr.evaluation.test_set import batches
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.data_bin import check_data_bin, has_subset
from fairseq_ccpr.timing import progress_bar

SUBSET = "valid"

logger = logging.getLogger(__name__)
HELD_OUT = 5  # one sentence in so many is not trained on, but chooses when to stop
WITHOUT, WITH = "without trust", "with trust"
# Of the votes.
VOTE_UPDATES, VOTE_TOKENS = 240, 512  # tokens of one batch of each text in an update
# the learning rate falls by this factor after so many updates
VOTE_RATE, VOTE_DECAY, VOTE_EVERY = 0.05, 0.6, 60
# Weight of what a token loses against the system without phrases. References are kinder than the hypotheses
# of beam search, after which a phrase's continuation is right less often.
VOTE_HARM = 1.0
# Of trust.
UPDATES, BATCH = 400, 8192  # tokens of each text in an update
LEARNING_RATE, WEIGHT_DECAY = 5e-3, 3e-3
EVERY = 20  # updates, after which the sentences held out are scored
HARM = 0.5  # weight of the loss of tokens of other domains, besides the likelihood of their text


@dataclass(frozen=True)
class OtherText:
    """A subset of another DATA_BIN."""

    data_bin: Path
    subset: str

    @classmethod
    def parse(cls, word: str) -> OtherText:
        """Read DATA_BIN or DATA_BIN:SUBSET."""
        folder, colon, subset = word.rpartition(":")
        if colon and "/" not in subset and not Path(word).exists():
            return cls(Path(folder), subset)
        return cls(Path(word), SUBSET)

    @property
    def place(self) -> tuple[Path, str]:
        """An identifier of the text that does not depend on the name of its folder."""
        return self.data_bin.resolve(), self.subset

    @property
    def name(self) -> str:
        """Its name in tables."""
        return f"{self.data_bin}:{self.subset}"

    def samples(self, system: System) -> list[Any]:
        """Read its batches."""
        task = self.check(system)
        task.load_dataset(self.subset)
        cfg = copy.deepcopy(system.cfg)
        cfg.dataset.gen_subset = self.subset
        return list(batches(cfg, task, system.models))

    def check(self, system: System) -> Any:
        """Return the task over its folder, once it is seen to be readable: before any long work begins."""
        task = system.task.with_data(self.data_bin)
        check_data_bin(self.data_bin, task.cfg.source_lang, task.cfg.target_lang)
        sides = (task.cfg.source_lang, task.source_dictionary), (task.cfg.target_lang, task.target_dictionary)
        for language, expected in sides:
            found = task.load_dictionary(str(self.data_bin / f"dict.{language}.txt"))
            if found.symbols != expected.symbols:
                digests = (
                    fingerprint.short(fingerprint.of_strings(one.symbols)) for one in (found, expected)
                )
                raise ConfigurationError(
                    f"--also {self.data_bin} has another dictionary for {language} than the model ({', '.join(digests)}): "
                    "prepare it with the model's"
                )
        if not has_subset(task, self.subset):
            raise ConfigurationError(
                f"--also {self.data_bin} has no subset {self.subset}: name another, {self.data_bin}:SUBSET"
            )
        return task


def other_texts(words: list[str], home: OtherText) -> list[OtherText]:
    """Read the texts that `--also` names, each once; skip the held-out text, which is not of another domain."""
    texts = {home.place: home}
    for text in map(OtherText.parse, words):
        if text.place in texts:
            logger.warning("--also %s is named twice, or is what is tuned on: it counts once", text.name)
        texts.setdefault(text.place, text)
    return list(texts.values())[1:]


@one_thread()
def train_votes(memory: PhraseMemory, texts: Sequence[Sequence[Alongside]], seed: int = 1) -> PhraseVotes:
    """Train by Adam from where a memory's votes are; returns the best on sentences held out, which may be the start.

    The loss of a text is its mean -log p, and what its tokens lose against the system without phrases. All
    texts count alike.
    """
    votes = copy.deepcopy(memory.votes).requires_grad_(True)
    memory = replace(memory, votes=votes)
    generator = torch.Generator().manual_seed(seed)
    trained, held_out = zip(*(_split(batches) for batches in texts))
    if not all((*trained, *held_out)):  # of so few sentences nothing can be learned
        return votes.requires_grad_(False)
    optimizer = torch.optim.Adam(votes.parameters(), lr=VOTE_RATE)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, VOTE_EVERY, VOTE_DECAY)

    def loss(texts: Sequence[Sequence[Alongside]]) -> Tensor:
        return torch.stack([_vote_loss(memory, batches) for batches in texts]).mean()

    def draw() -> list[list[Alongside]]:
        some = []
        for text in trained:
            batch = text[int(torch.randint(len(text), (), generator=generator))]
            some.append(
                [batch.select(torch.randint(len(batch.text.targets), (VOTE_TOKENS,), generator=generator))]
            )
        return some

    bar = progress_bar("votes", "update", range(VOTE_UPDATES + 1))
    keep_best(votes, bar, VOTE_EVERY, loss, held_out, draw, optimizer, schedule)
    return votes.requires_grad_(False)


def keep_best(
    module: nn.Module,
    updates: Iterable[int],
    every: int,
    loss: Callable[[Any], Tensor],
    held_out: Any,
    draw: Callable[[], Any],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.StepLR | None = None,
) -> None:
    """Train by the loss of what is drawn, and keep the state with the lowest loss of what is held out."""
    best, best_loss = copy.deepcopy(module.state_dict()), float("inf")
    with torch.enable_grad():
        for update in updates:
            if update % every == 0:
                with torch.no_grad():
                    measured = float(loss(held_out))
                if measured < best_loss:
                    best, best_loss = copy.deepcopy(module.state_dict()), measured
            some = draw()
            optimizer.zero_grad()
            loss(some).backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
    module.load_state_dict(best)


def _split(batches: Sequence[Alongside]) -> tuple[list[Alongside], list[Alongside]]:
    held_out = [batch.text.sentences % HELD_OUT == 0 for batch in batches]
    trained = [batch.select(~rows) for batch, rows in zip(batches, held_out) if not rows.all()]
    return trained, [batch.select(rows) for batch, rows in zip(batches, held_out) if rows.any()]


def _vote_loss(memory: PhraseMemory, batches: Sequence[Alongside]) -> Tensor:
    found, without = [], []
    for batch in batches:
        vote = batch.text.records[memory.name].vote(memory, False)
        said = vote.log_prob(batch.text.targets)
        found.append(batch.log_likelihood(said, vote.weight))
        without.append(
            batch.log_likelihood(torch.full_like(said, float("-inf")), torch.zeros_like(vote.weight))
        )
    likelihood = torch.cat(found)
    return VOTE_HARM * (torch.cat(without) - likelihood).clamp_min(0).mean() - likelihood.mean()


class Rows(NamedTuple):
    """Some reference tokens of a text as training trust needs them, [n, ...]."""

    inputs: Tensor  # fp32 [n, I], see `Trust.inputs`
    weights: Tensor  # fp32 [n, M], f
    model: Tensor  # fp32 [n], log p_NMT of the reference token
    retrieved: Tensor  # fp32 [n, M], log p of it by each memory
    # bool [n, C], what of the first memory's names it; [n, 0] where nothing spreads over that
    matches: Tensor

    def select(self, rows: Tensor) -> Rows:
        """Select some of the tokens."""
        return Rows(*(part[rows] for part in self))


@dataclass
class TrainingText:
    """A text to train trust on."""

    name: str
    foreign: bool  # of another domain: it must not lose
    rows: Rows
    sentences: Tensor  # int64 [n]

    @classmethod
    def weigh(cls, trust: Trust, text: HeldOut, foreign: bool, ensemble: RetrievalEnsemble) -> TrainingText:
        """Weigh a text as `ensemble` does without trust, and collect what this kind of trust looks at."""
        shared = text.having([memory.name for memory in ensemble.voting])
        collected = []
        for one in shared.texts:
            votes = ensemble.mixture.limited(
                [one.records[memory.name].vote(memory, True) for memory in ensemble.voting]
            )
            step = trust_step(one.likeliest, votes)
            retrieved = torch.stack([vote.log_prob(one.targets) for vote in votes], dim=1)
            matches = torch.zeros(len(one.targets), 0).bool()
            if trust.SPREADS:
                matches = (votes[0].values == one.targets.unsqueeze(1)) & (votes[0].log_probs > float("-inf"))
            collected.append(Rows(trust.inputs(step), step.weights, one.log_probs, retrieved, matches))
        return cls(
            text.name, foreign, Rows(*(torch.cat(column) for column in zip(*collected))), shared.sentences
        )

    def split(self) -> tuple[Rows, Rows]:
        """Part the tokens by sentence: to train on, and held out."""
        held_out = self.sentences % HELD_OUT == 0
        return self.rows.select(~held_out), self.rows.select(held_out)


def log_likelihood(trust: Trust | None, rows: Rows) -> Tensor:
    """Compute log p of n reference tokens, fp32 [n]; with trust of None as the settings have it."""
    if trust is None:
        return _mixture(rows.model, rows.weights, rows.retrieved)
    weights, spread = trust.decide(rows.inputs, rows.weights)
    if spread is None:
        return _mixture(rows.model, weights, rows.retrieved)
    named = (spread * rows.matches).sum(dim=1).clamp_min(1e-30).log()
    return _mixture(rows.model, weights, torch.cat([named.unsqueeze(1), rows.retrieved[:, 1:]], dim=1))


def _mixture(model: Tensor, weights: Tensor, retrieved: Tensor) -> Tensor:
    # log 0 has no gradient that is a number.
    votes = [
        (said.clamp_min(SILENT), weight.clamp(1e-12, ALMOST_ALL))
        for said, weight in zip(retrieved.T, weights.T)
    ]
    return Mixture().of_targets(model, votes)


@one_thread()
def train_trust(trust: Trust, texts: list[TrainingText], seed: int = 1) -> Trust:
    """Train by AdamW; returns the state that was best on sentences held out, which may be the start.

    The loss of a text is its mean -log p; of one of another domain also what it loses against the model
    alone. All texts count alike.

    Args:
        trust: where to start; it is changed.
        texts: the first is of the datastore's own domain.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = [text.split() for text in texts]
    for text, both in zip(texts, parts):
        if not all(len(rows.model) for rows in both):
            raise ConfigurationError(
                f"{text.name} has too few sentences to learn trust from: give at least {HELD_OUT + 1} pairs"
            )
    trained, held_out = zip(*parts)
    trust.prepare(torch.cat([rows.inputs for rows in trained]))
    optimizer = torch.optim.AdamW(trust.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    def draw() -> list[Rows]:
        return [
            rows.select(torch.randint(len(rows.model), (BATCH,), generator=generator)) for rows in trained
        ]

    def loss(parts: Sequence[Rows]) -> Tensor:
        losses = []
        for text, rows in zip(texts, parts):
            likelihood = log_likelihood(trust, rows)
            losses.append(-likelihood.mean())
            if text.foreign:
                losses[-1] = losses[-1] + HARM * (rows.model - likelihood).clamp_min(0).mean()
        return torch.stack(losses).mean()

    bar = progress_bar(f"trust ({trust.KIND})", "update", range(UPDATES + 1))
    keep_best(trust, bar, EVERY, loss, held_out, draw, optimizer)
    return trust


@torch.no_grad()
def worths(trust: Trust, text: TrainingText) -> dict[str, Worth]:
    """Measure the settings' own weights, and trust, on all tokens of a text."""
    rows = text.rows
    measured = {}
    for name, one in ((WITHOUT, None), (WITH, trust)):
        weights = trust.decide(rows.inputs, rows.weights).weights if one is not None else rows.weights
        by_memory = dict(zip(trust.memories, weights.unbind(dim=1)))
        measured[name] = Worth.measure(rows.model, log_likelihood(one, rows), by_memory)
    return measured
