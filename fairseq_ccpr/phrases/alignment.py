"""Word alignment of sentence pairs: Pharaoh files, statistical aligners, and an encoder's states.

Links are int32 [A, 2], (source word, target word), counted from 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError, installing
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder
from fairseq_ccpr.text.subwords import Subwords, batches_of_like_length, collate
from fairseq_ccpr.timing import progress_bar

Spans = list[tuple[int, int]]
SYMMETRIZATIONS = (
    "grow-diag-final-and",
    "grow-diag-final",
    "grow-diag",
    "grow",
    "och",
    "intersection",
    "union",
)
MAX_ALIGNED_WORDS = 200  # of a sentence; sil-thot skips longer ones
_FREE_ITERATIONS = 0  # the model chooses the number itself, from the size of the text
# Each model starts from the previous one; these numbers of EM iterations are customary (GIZA++, fast_align).
_STAGES: dict[str, tuple[tuple[str, int], ...]] = {
    "ibm4": (
        ("Ibm1AlignmentModel", 5), ("HmmAlignmentModel", 5), ("Ibm3AlignmentModel", 3), ("Ibm4AlignmentModel", 3),
    ),
    "hmm": (("Ibm1AlignmentModel", 5), ("HmmAlignmentModel", 5)),
    "fast-align": (("FastAlignModel", 5),),
    "eflomal": (("EflomalAlignmentModel", _FREE_ITERATIONS),),
}  # fmt: skip
ENCODER = "encoder"
READY = "ready"  # in place of an aligner's name, where alignments are given


@dataclass(frozen=True)
class SentencePair:
    """A sentence pair with the character spans of its words."""

    source: str
    target: str
    source_words: Spans
    target_words: Spans
    links: np.ndarray | None = None  # if given

    def words(self) -> tuple[list[str], list[str]]:
        """Return the words of both sides in lower case, as aligners and frequencies count them."""
        both = (self.source, self.source_words), (self.target, self.target_words)
        source, target = ([text[start:end].lower() for start, end in words] for text, words in both)
        return source, target


@dataclass(frozen=True)
class AlignerOptions:
    """Options of all aligners; each reads the ones it needs."""

    symmetrization: str = "grow-diag-final-and"
    encoder: Path | None = None  # directory of a context encoder
    encoder_layer: int | None = None  # whose states are compared


class Aligner(ABC):
    """Finds the links between words of sentence pairs; `symmetrization` makes two directions one."""

    def __init__(self, symmetrization: str) -> None:
        self.symmetrization = symmetrization

    def describe(self) -> dict[str, Any]:
        """Return the settings that a manifest records besides the name."""
        return {"symmetrization": self.symmetrization}

    def fingerprints(self) -> dict[str, str]:
        """Return fingerprints of its inputs, besides its training text."""
        return {}

    @abstractmethod
    def train(self, pairs: Iterable[SentencePair], show: bool) -> None:
        """Learn from sentence pairs, of which only the text is known; show a progress bar if `show`."""

    @abstractmethod
    def align(self, pairs: list[SentencePair]) -> list[np.ndarray]:
        """Align sentence pairs: links [A, 2] of each."""


def parse_links(text: str, source_size: int, target_size: int, where: str) -> np.ndarray:
    """Parse the links of one line in Pharaoh format, which counts words from 0; `where` names it.

    >>> parse_links("0-1 1-0", 2, 2, "").tolist()
    [[0, 1], [1, 0]]
    """
    links = np.empty((len(words := text.split()), 2), np.int32)
    for row, word in enumerate(words):
        left, _, right = word.partition("-")
        if not (left.isdecimal() and right.isdecimal()):
            raise ConfigurationError(
                f"{where}: '{word}' is no link; write them as in '0-0 1-2', source "
                "word and target word counted from 0"
            )
        if int(left) >= source_size or int(right) >= target_size:
            raise ConfigurationError(
                f"{where}: the link {word} points beyond the sentence, which has {source_size} source and "
                f"{target_size} target words (words are what stands between spaces, counted from 0)"
            )
        links[row] = int(left), int(right)
    return links


class StatisticalAligner(Aligner):
    """One model in each direction: `ibm4`, `hmm`, `fast-align` or `eflomal`, of sil-thot."""

    def __init__(self, name: str, options: AlignerOptions) -> None:
        super().__init__(options.symmetrization)
        try:
            import thot.alignment
        except ImportError:
            raise ConfigurationError(
                f"word alignment needs sil-thot, which is not installed: {installing('align')}, or give "
                "ready alignments with --alignments"
            ) from None
        self.thot = thot.alignment
        self.name = name
        self._aligner: Any = None

    def train(self, pairs: Iterable[SentencePair], show: bool) -> None:
        """Learn from the pairs, keeping all their words in memory; the same pairs give the same model."""
        (first, _), *_ = _STAGES[self.name]
        direct, inverse = (getattr(self.thot, first)() for _ in range(2))
        for model in (direct, inverse) if self.name == "eflomal" else ():
            model.seed, model.deterministic = 1, True
        for pair in pairs:
            source, target = pair.words()
            direct.add_sentence_pair(source, target)
            inverse.add_sentence_pair(target, source)
        there = self._train_direction(direct, "source to target", show)
        back = self._train_direction(inverse, "target to source", show)
        self._aligner = self.thot.SymmetrizedAlignmentModel(there, back)

    def _train_direction(self, model: Any, direction: str, show: bool) -> Any:
        for number, (kind, iterations) in enumerate(_STAGES[self.name]):
            if number:
                model = getattr(self.thot, kind)(model)
            model.start_training()
            if iterations == _FREE_ITERATIONS:
                iterations = model.scheduled_iterations
            label = f"{kind.removesuffix('AlignmentModel').removesuffix('Model')}, {direction}"
            for _ in progress_bar(label, "iteration", range(iterations), quiet=not show):
                model.train()
            model.end_training()
        return model

    def align(self, pairs: list[SentencePair]) -> list[np.ndarray]:
        heuristic = self.symmetrization.replace("-", "_").upper()
        self._aligner.heuristic = getattr(self.thot.SymmetrizationHeuristic, heuristic)
        sources, targets = zip(*(pair.words() for pair in pairs))
        found = self._aligner.get_best_alignments(sources, targets)
        return [np.argwhere(matrix.to_numpy()).astype(np.int32) for _, matrix in found]


class ReadyAlignments(Aligner):
    """The links that the sentence pairs come with."""

    def __init__(self) -> None:
        super().__init__(READY)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"aligner": READY}

    def train(self, pairs: Iterable[SentencePair], show: bool) -> None:
        """Learn nothing."""

    def align(self, pairs: list[SentencePair]) -> list[np.ndarray]:
        return [pair.links for pair in pairs if pair.links is not None]


class EncoderAligner(Aligner):
    """Links words of which subwords have the nearest states, by cosine, less the mean of their sentence.

    There is no training, so one sentence pair is aligned as well as a million; words beyond the encoder's
    maximum length have no links.
    """

    def __init__(self, options: AlignerOptions) -> None:
        super().__init__("mutual-nearest")
        if options.encoder is None:
            raise ConfigurationError(
                "--aligner encoder needs --encoder DIR: make one with fairseq-ccpr convert"
            )
        device = choose_device(cpu=False)
        self.encoder = ContextEncoder.load(options.encoder).to(device)
        layers = self.encoder.layers  # of which the middle one aligns best as far as measured
        self.layer = layers // 2 if options.encoder_layer is None else options.encoder_layer
        if not 0 <= self.layer <= layers:
            raise ConfigurationError(
                f"--encoder-layer is {self.layer}, but {options.encoder} has "
                f"{layers} layers: give 0 to {layers}"
            )

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"encoder_layer": self.layer}

    def fingerprints(self) -> dict[str, str]:
        return {"encoder": self.encoder.fingerprint()}

    def train(self, pairs: Iterable[SentencePair], show: bool) -> None:
        """Learn nothing."""

    @torch.inference_mode()
    def align(self, pairs: list[SentencePair]) -> list[np.ndarray]:
        tokenizer, limit = self.encoder.tokenizer, self.encoder.max_positions
        encoded = [
            [tokenizer.encode(text).cut(limit) for text in (pair.source, pair.target)] for pair in pairs
        ]
        links: list[np.ndarray] = [np.empty((0, 2), np.int32)] * len(pairs)
        longer = [max(sides, key=lambda side: side.count) for sides in encoded]
        for batch in batches_of_like_length(list(range(len(pairs))), longer):
            sides = zip(*(encoded[number] for number in batch))
            states = [self._states(list(side)) for side in sides]
            for number, source, target in zip(batch, *states):
                spans = pairs[number].source_words, pairs[number].target_words
                links[number] = linked_words(source, target, *map(words_of_subwords, encoded[number], spans))
        return links

    def _states(self, batch: list[Subwords]) -> Tensor:
        tokens = collate(batch, self.encoder.tokenizer.pad).to(next(self.encoder.parameters()).device)
        return self.encoder.states(tokens, self.layer).float()


def words_of_subwords(subwords: Subwords, words: Spans) -> np.ndarray:
    """Mark the words that each subword has characters of, bool [n, W]; markers and spaces have none.

    A word has several subwords, and a subword may have parts of several words, as of two Chinese characters.
    """
    starts, ends = np.array(subwords.starts)[:, None], np.array(subwords.ends)[:, None]
    spans = np.array(words, dtype=np.int64).reshape(-1, 2)
    return (starts < spans[:, 1]) & (ends > spans[:, 0]) & (starts < ends)


def linked_words(
    source: Tensor, target: Tensor, source_words: np.ndarray, target_words: np.ndarray
) -> np.ndarray:
    """Link words that have mutually nearest subwords: int32 [A, 2], in ascending order.

    Args:
        source: states of subwords [at least n, H].
        target: [at least m, H].
        source_words: words of the n source subwords, bool [n, W].
        target_words: of the m target subwords, bool [m, V].
    """
    sides = source_words, target_words
    i, j = (torch.from_numpy(np.flatnonzero(side.any(axis=1))).to(source.device) for side in sides)
    if not len(i) or not len(j):
        return np.empty((0, 2), np.int32)
    similarity = _directions(source[i]) @ _directions(target[j]).T  # [n', m']
    forward, backward = similarity.argmax(dim=1), similarity.argmax(dim=0)
    mutual = backward[forward] == torch.arange(len(i), device=i.device)
    left, right = i[mutual].cpu().numpy(), j[forward[mutual]].cpu().numpy()
    shared = source_words[left].T.astype(np.int32) @ target_words[right].astype(np.int32)  # [W, V]
    return np.argwhere(shared).astype(np.int32)


def _directions(states: Tensor) -> Tensor:
    """Centre states [n, H] and normalise them: their common component says little about any of them."""
    return torch.nn.functional.normalize(states - states.mean(dim=0) if len(states) > 1 else states, dim=1)


# A new aligner is one file and one line here.
ALIGNERS: dict[str, Callable[[AlignerOptions], Aligner]] = {
    **{name: partial(StatisticalAligner, name) for name in _STAGES},
    ENCODER: EncoderAligner,
}
