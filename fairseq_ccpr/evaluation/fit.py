"""Training on held-out references: four sentences of five are learned from, and the fifth says when to stop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.timing import progress_bar

ONE_HELD_OUT_IN = 5  # sentences: it is not trained on, but chooses when to stop
# Weight of what a token of another domain loses against the model, besides the likelihood of its text.
FOREIGN_HARM = 0.5


class Training(NamedTuple):
    """How something is trained, by AdamW."""

    what: str
    updates: int
    every: int  # updates, after which the sentences held out are scored, and the rate falls
    rate: float
    tokens: int = 0  # of each text in an update, where they are drawn
    weight_decay: float = 0.0
    falls: float = 1.0  # to so much of itself


class LearningText(Protocol):
    """N tokens of a text to train on."""

    @property
    def name(self) -> str: ...

    @property
    def sentences(self) -> Tensor:
        """int64 [N]."""

    def select(self, rows: Tensor) -> Self:
        """Select some of the tokens, bool [N]."""

    def draw(self, count: int, generator: torch.Generator) -> Self:
        """Draw some of the tokens for an update."""


T = TypeVar("T", bound=LearningText)


def split(texts: Sequence[T], what: str) -> tuple[list[T], list[T]]:
    """Part the tokens of each text by sentence: to train on, and held out.

    Raises:
        ConfigurationError: a text has too few sentences.
    """
    held_out = [text.sentences % ONE_HELD_OUT_IN == 0 for text in texts]
    for text, rows in zip(texts, held_out):
        if rows.all() or not rows.any():
            raise ConfigurationError(
                f"{text.name} has too few sentences to learn {what} from: give at least {ONE_HELD_OUT_IN + 1} pairs"
            )
    trained = [text.select(~rows) for text, rows in zip(texts, held_out)]
    return trained, [text.select(rows) for text, rows in zip(texts, held_out)]


def fit(
    module: nn.Module, loss: Callable[[T], Tensor], parts: tuple[list[T], list[T]], training: Training
) -> None:
    """Train by the mean loss of texts; keeps the state that is best on what is held out, perhaps the start.

    Tokens are drawn by the seed that PyTorch was given last, such as that of `tune --seed`.

    Args:
        parts: see `split`. All texts count alike.
    """
    trained, held_out = parts
    generator = torch.Generator().manual_seed(torch.initial_seed())
    optimizer = torch.optim.AdamW(module.parameters(), training.rate, weight_decay=training.weight_decay)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, training.every, training.falls)

    def mean(texts: Sequence[T]) -> Tensor:
        return torch.stack([loss(text) for text in texts]).mean()

    best, least = copy.deepcopy(module.state_dict()), float("inf")
    with torch.enable_grad():
        for update in progress_bar(training.what, "update", range(training.updates + 1)):
            if update % training.every == 0:
                with torch.no_grad():
                    measured = float(mean(held_out))
                if measured < least:
                    best, least = copy.deepcopy(module.state_dict()), measured
            some = [text.draw(training.tokens, generator) for text in trained]
            optimizer.zero_grad()
            mean(some).backward()
            optimizer.step()
            schedule.step()
    module.load_state_dict(best)
    module.requires_grad_(False)


def lost(likelihood: Tensor, without: Tensor, harm: float) -> Tensor:
    """Weigh what N tokens lose against a system, log p fp32 [N] each, with their mean -log p."""
    return harm * (without - likelihood).clamp_min(0).mean() - likelihood.mean()
