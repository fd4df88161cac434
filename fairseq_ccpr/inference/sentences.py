"""Sentences as text: their tokens, their batches, their translations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fairseq import utils
from torch import Tensor

from fairseq_ccpr.text.pairs import one_line

if TYPE_CHECKING:
    from fairseq_ccpr.inference.system import System


@dataclass(frozen=True)
class Translation:
    """A translation of one sentence.

    Attributes:
        source: the sentence as it was given.
        text: the best translation.
        score: its log-probability with retrieval, by fairseq's length normalisation (`--lenpen`, `--unnormalized`).
        tokens: its subwords, without the end of the sentence.
        token_scores: log p of each subword, and of the end of the sentence.
        alternatives: the next best translations, where `nbest` asks for more than one.
        fault: why there is no translation; empty where there is one.
    """

    source: str
    text: str
    score: float
    tokens: tuple[str, ...] = ()
    token_scores: tuple[float, ...] = ()
    alternatives: tuple[Translation, ...] = ()
    fault: str = ""

    @classmethod
    def of(cls, source: str, hypotheses: list[dict[str, Any]], system: System) -> Translation:
        """Make a translation of fairseq's hypotheses, the best first."""
        dictionary = system.task.target_dictionary
        best, *others = hypotheses
        tags = system.task.tags.ids(dictionary)
        scored = [
            pair for pair in zip(best["tokens"].tolist(), best["positional_scores"].tolist()) if pair[0] not in tags
        ]
        return cls(
            source,
            system.to_text(dictionary, best["tokens"]),
            float(best["score"]),
            tuple(dictionary.symbols[i] for i, _ in scored if i != dictionary.eos()),
            tuple(score for _, score in scored),
            tuple(cls.of(source, [other], system) for other in others),
        )

    @classmethod
    def of_nothing(cls, source: str, length: int, most: int) -> Translation:
        """Make the empty translation of an empty sentence, or of one that is too long."""
        fault = f"{length:,} tokens, and the model takes {most:,}: divide it" if length > most else ""
        return cls(source, "", 0.0, fault=fault)


def encode(sentence: str, task: Any) -> Tensor:
    """Return the tokens of a source sentence, the end of the sentence included."""
    return encode_with(sentence, (task.tokenizer, task.bpe), task.source_dictionary)


def encode_with(sentence: str, steps: tuple[Any, ...], dictionary: Any) -> Tensor:
    """Return the tokens of a sentence that fairseq's tokenizer and subwords divide, those that there are."""
    sentence = one_line(sentence)
    for step in steps:
        sentence = step.encode(sentence) if step is not None else sentence
    tokens: Tensor = dictionary.encode_line(sentence, add_if_not_exist=False).long()
    return tokens


def length_limit(task: Any, models: list[Any]) -> int:
    """Return the most tokens that a source sentence may have."""
    limits = utils.resolve_max_positions(task.max_positions(), *[model.max_positions() for model in models])
    return int(limits[0]) - task.tags.added


def batches_of(
    tokens: list[Tensor], cfg: Any, task: Any, targets: list[Tensor] | None = None
) -> Iterator[dict[str, Any]]:
    """Make fairseq's batches of sentences, similar lengths together, longest first.

    Args:
        tokens: of each sentence; a batch has their numbers as `id`.
        cfg: says how large batches are (`--max-tokens`, `--batch-size`).
        targets: tokens of their translations, where they are given.
    """
    dataset = task.inference_dataset(tokens) if targets is None else task.pair_dataset(tokens, targets)
    order = dataset.ordered_indices()
    sizes = [dataset.src_sizes, *([dataset.tgt_sizes] if targets is not None else [])]
    most = cfg.dataset.max_tokens and max(cfg.dataset.max_tokens, *(int(each.max(initial=1)) for each in sizes))
    for batch in reversed(dataset.batch_by_size(order, most, cfg.dataset.batch_size)):
        yield dataset.collater([dataset[number] for number in batch])
