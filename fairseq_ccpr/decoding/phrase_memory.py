"""The phrase memory beside the decoder: retrieval once a sentence, a distribution of the next token each step."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_ccpr.decoding.phrase_candidates import PhraseCandidates, SentencePhrases
from fairseq_ccpr.decoding.phrase_continuation import Outlook, PhraseState
from fairseq_ccpr.errors import ConfigurationError

logger = logging.getLogger(__name__)

CONSENT_GATE, ATTENTION_GATE = "consent", "attention"


@dataclass(frozen=True)
class PhraseSettings:
    """The `--phrase-*` options.

    Raises:
        ConfigurationError: a value out of its range.
    """

    k: int = 16
    lambda_: float = 0.8
    temperature: float = 0.05
    min_similarity: float = 0.3  # s0
    enter: float = 0.5  # eta
    gate: str = CONSENT_GATE
    coverage: bool = True
    reward: float = 0.0  # mu, which takes the place of lambda where it is not 0

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigurationError(f"--phrase-k is {self.k}: at least 1 phrase is needed")
        if not 0 <= self.lambda_ <= 1:
            raise ConfigurationError(f"--phrase-lambda is {self.lambda_}: a share between 0 and 1 is needed")
        if not 0 < self.temperature < float("inf"):
            raise ConfigurationError(f"--phrase-temperature is {self.temperature}: a number above 0 is needed")
        if not 0 <= self.min_similarity < 1:
            raise ConfigurationError(
                f"--phrase-min-similarity is {self.min_similarity}: a cosine from 0 up to, but not, 1 is needed"
            )
        if not 0 <= self.enter <= 1:
            raise ConfigurationError(f"--phrase-enter is {self.enter}: a number between 0 and 1 is needed")
        if not 0 <= self.reward < float("inf"):
            raise ConfigurationError(f"--phrase-reward is {self.reward}: a number of at least 0 is needed")


class PhraseStep(NamedTuple):
    """What the phrases say at one step, for H hypotheses."""

    values: Tensor  # int64 [H, A], tokens
    log_probs: Tensor  # fp32 [H, A], log p_phr of each, duplicates merged
    share: Tensor  # fp32 [H], lambda_phr* = lambda_p min(1, Z); 0 with rewards
    rewards: Tensor | None = None  # fp32 [H, A], mu M(v) of each, in the place of a share


class PhraseMemory:
    """Follows the hypotheses of a batch through the phrases of their sentences.

    Args:
        find: the phrases of source sentences, int64 [B, S], from what remembers its answers; `candidates` if not given.
        candidates: where they come from, and how tables are made of them.
        settings: how they count.
        device: of the translation model.
    """

    def __init__(
        self,
        candidates: PhraseCandidates,
        settings: PhraseSettings,
        device: torch.device,
        find: Callable[[Tensor], list[SentencePhrases]] | None = None,
    ) -> None:
        self.candidates, self.settings, self.device = candidates, settings, device
        self.find = find
        self.warned = False

    def start(self, src_tokens: Tensor) -> None:
        """Retrieve for the sentences of a batch, int64 [B, S]; `begin` follows."""
        self.take(self.ask(src_tokens), src_tokens)

    def ask(self, src_tokens: Tensor) -> Callable[[], list[SentencePhrases]]:
        """Begin to retrieve for the sentences of a batch, int64 [B, S], where another process searches; `take` follows."""
        if self.find is None and self.candidates.retriever.index.remote:
            return self.candidates.ask(src_tokens)
        return partial(self.find or self.candidates, src_tokens)

    def take(self, answer: Callable[[], list[SentencePhrases]], src_tokens: Tensor) -> None:
        """Wait for what was asked; `begin` follows."""
        with _without_collections():
            self.found = answer()
            table = self.candidates.table(self.found, src_tokens.size(1))
        if not self.warned and not table.lengths.any():
            logger.warning(
                "no phrase was retrieved for the first %d sentences: they are translated as without the phrase memory; "
                "lower --phrase-min-similarity, or see with retrieve_phrases.py what is found", len(self.found),
            )  # fmt: skip
        self.warned = True
        self.table = table.to(self.device)
        settings = self.settings
        self.weights = self.table.weights(settings.k, settings.temperature, settings.min_similarity)

    def begin(self, copies: int) -> None:
        """Nothing is written yet: `copies` hypotheses a sentence, one after another."""
        rows = torch.arange(len(self.table.lengths), device=self.device).repeat_interleave(copies)
        self.state = PhraseState(self.table, rows, self.settings.coverage)

    def step(self, log_probs: Tensor, attention: Tensor | None) -> PhraseStep:
        """Before each hypothesis writes its next token.

        Args:
            log_probs: fp32 [H, V], log p_NMT.
            attention: fp32 [H, S], which the gate by attention needs.

        Raises:
            ConfigurationError: the gate is attention, but the model tells none.
        """
        return self.weigh(self._outlook(log_probs, attention), self.state.rows)

    def force_outlook(
        self, previous: Tensor, log_probs: Tensor, attention: Tensor | None, real: Tensor
    ) -> tuple[Outlook, Tensor]:
        """The outlook at N tokens of given targets, and the sentences int64 [N] they are of.

        Args:
            previous: int64 [B, T], the decoder's input: y_<t, with the end of the sentence in front.
            log_probs: fp32 [B, T, V].
            attention: fp32 [B, T, S], or None.
            real: bool [B, T], which positions are wanted.
        """
        self.begin(1)
        steps = []
        for position in range(previous.size(1)):
            if position:
                self.state.advance(previous[:, position])
            at = attention[:, position] if attention is not None else None
            steps.append(self._outlook(log_probs[:, position], at))
        return Outlook(*(torch.stack(parts, dim=1)[real] for parts in zip(*steps))), real.nonzero()[:, 0]

    def force_decode(self, previous: Tensor, log_probs: Tensor, attention: Tensor | None, real: Tensor) -> PhraseStep:
        """What `step` says at N tokens of given targets; see `force_outlook`."""
        return self.weigh(*self.force_outlook(previous, log_probs, attention, real))

    def weigh(self, outlook: Outlook, sentences: Tensor) -> PhraseStep:
        """What the phrases say at N tokens, from their outlook there and the sentences int64 [N] they are of."""
        values, log_probs, mass = outlook.continuation(
            self.table, sentences, self.weights, self.settings.enter, self.settings.k
        )
        if self.settings.reward:
            rewards = self.settings.reward * mass.unsqueeze(1) * log_probs.exp()
            return PhraseStep(values, log_probs, torch.zeros_like(mass), rewards)
        return PhraseStep(values, log_probs, self.settings.lambda_ * mass.clamp_max(1.0))

    def votes(self, outlook: Outlook, sentences: Tensor) -> Tensor:
        """What each candidate phrase gave to the token it wanted, fp32 [N, A]; see `weigh` and `Outlook.votes`."""
        return outlook.votes(self.table, sentences, self.weights, self.settings.enter, self.settings.k)

    def _outlook(self, log_probs: Tensor, attention: Tensor | None) -> Outlook:
        by_attention = self.settings.gate == ATTENTION_GATE
        if by_attention and attention is None:
            raise ConfigurationError("--phrase-gate attention: the model gives no attention; use --phrase-gate consent")
        return self.state.outlook(log_probs, attention if by_attention else None)

    def with_settings(
        self, settings: PhraseSettings, find: Callable[[Tensor], list[SentencePhrases]] | None = None
    ) -> PhraseMemory:
        """The same memory with other settings."""
        other = copy.copy(self)
        other.settings, other.find = settings, find or self.find
        return other

    def signature(self) -> str:
        """All that decides what is retrieved and how it counts, in one line to be printed with results."""
        settings = self.settings
        return self.candidates.retriever.signature({
            "k": settings.k, "lambda*": settings.lambda_, "s0": settings.min_similarity, "T": settings.temperature,
            "enter": settings.enter, "gate": settings.gate, "coverage": "yes" if settings.coverage else "no",
            **({"reward": settings.reward} if settings.reward else {}),
        })  # fmt: skip


@contextmanager
def _without_collections() -> Iterator[None]:
    """Put off Python's garbage collections, which the subwords of thousands of sentences bring about, and which find nothing.

    Each of the full ones goes through all that is loaded, models and libraries too.
    """
    wanted = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if wanted:
            gc.enable()
