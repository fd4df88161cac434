"""Forced decoding: what the model and each memory say at the tokens of given targets.

Scoring, tuning, logging and explaining read one record of it, `ForcedText`. Letters: B sentences, T target positions, N
tokens, C tokens that a memory names, V target vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from fairseq.data.data_utils import collate_tokens
from torch import Tensor

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble, trust_step
from fairseq_ccpr.decoding.mixture import Columns, Distribution, ModelEvidence, Vote, interpolate_references
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.decoding.trust import LearnedTrust
from fairseq_ccpr.errors import ConfigurationError


@dataclass
class GivenText:
    """Given targets of B sentences: N tokens in all, at each of which a memory votes as it would in beam search."""

    previous: Tensor  # int64 [B, T], the decoder's input: y_<t, with the end of the sentence in front
    real: Tensor  # bool [B, T], the N tokens
    log_probs: Tensor  # fp32 [B, T, V], log p_NMT
    model: Distribution  # the same at the N tokens


class Record(Protocol):
    """What a memory saw at N tokens of given targets: enough to vote with any settings."""

    def vote(self, memory: Any, trusted: bool) -> Vote:
        """Vote as a memory does in beam search: the one that was asked, with other settings perhaps."""
        ...

    def select(self, rows: Tensor) -> Record:
        """Select some of the tokens, by number or by bool."""
        ...

    def cpu(self) -> Record:
        """Move to the CPU."""
        ...


class VoteRecord(NamedTuple):
    """The record of a memory whose votes no setting changes."""

    values: Tensor  # int64 [N, C]
    log_probs: Tensor  # fp32 [N, C]
    weight: Tensor  # fp32 [N]
    features: Tensor  # fp32 [N, F]

    def vote(self, memory: Any, trusted: bool) -> Vote:
        """Return what was voted."""
        return Vote(self.values, self.log_probs, self.weight, Columns(self.features) if trusted else None)

    def select(self, rows: Tensor) -> VoteRecord:
        """Select some of the tokens."""
        return VoteRecord(*(part[rows] for part in self))

    def cpu(self) -> VoteRecord:
        """Move to the CPU."""
        return VoteRecord(*(part.cpu() for part in self))


class Whole(NamedTuple):
    """The model's whole distributions."""

    real: Tensor  # bool [B, T], the N tokens: neither padding nor language tags
    log_probs: Tensor  # fp32 [B, T, V], log p_NMT
    attention: Tensor | None  # [B, T, S], the models' mean


@dataclass
class ForcedText:
    """N tokens of given targets, the ends of sentences too; sentence by sentence."""

    targets: Tensor  # int64 [N]
    sentences: Tensor  # int64 [N], their numbers
    positions: Tensor  # int64 [N], from 0
    log_probs: Tensor  # fp32 [N], log p_NMT of the targets
    likeliest: ModelEvidence  # of the model
    records: Mapping[str, Any]  # what each memory saw, a `Record`, by its name
    whole: Whole | None = None  # where it is scored

    @classmethod
    def collect(cls, text: GivenText, targets: Tensor, records: Mapping[str, Any], whole: Whole) -> ForcedText:
        """Collect what was said at N targets, int64 [N]."""
        sentences, positions = text.real.nonzero().unbind(dim=1)
        log_probs = text.model.log_probs.gather(1, targets.unsqueeze(1)).squeeze(1)
        return cls(targets, sentences, positions, log_probs, text.model.likeliest, records, whole)

    def kept(self, first: int) -> ForcedText:
        """Return what tuning keeps of it, on the CPU.

        Args:
            first: the number of its first sentence.
        """
        likeliest = ModelEvidence(*(part.cpu() for part in self.likeliest))
        records = {name: record.cpu() for name, record in self.records.items()}
        sentences = self.sentences.cpu() + first
        return ForcedText(
            self.targets.cpu(), sentences, self.positions.cpu(), self.log_probs.cpu(), likeliest, records
        )  # fmt: skip

    def select(self, rows: Tensor) -> ForcedText:
        """Select some of the tokens, by number or by bool."""
        likeliest = ModelEvidence(*(part[rows] for part in self.likeliest))
        records = {name: record.select(rows) for name, record in self.records.items()}
        return ForcedText(
            self.targets[rows], self.sentences[rows], self.positions[rows], self.log_probs[rows], likeliest, records
        )


@dataclass
class Breakdown:
    """N tokens of a batch of translations, M memories."""

    text: ForcedText
    memories: tuple[str, ...]  # names of those that vote
    votes: list[Vote]  # of each, with the weight it has in the end
    mixed: Tensor  # fp32 [N], log p of the token
    before: Tensor | None  # fp32 [N, M], the weights that the settings give, where there is trust
    names: tuple[str, ...] = ()  # of the F features; none where the kind of trust has no features
    features: Tensor | None = None  # fp32 [N, F]
    attributions: Tensor | None = None  # fp32 [N, M, F], see `LearnedTrust.attributions`
    phrase_votes: Tensor | None = None  # fp32 [N, A], what each candidate phrase gave to the token it proposed


@torch.no_grad()
def break_down(
    ensemble: RetrievalEnsemble, sample: dict[str, Any], hypotheses: list[Tensor], dictionary: Any
) -> Breakdown:
    """Force-decode translations.

    Args:
        ensemble: what decoded them.
        sample: a batch of fairseq.
        hypotheses: the tokens of each sentence's translation.
        dictionary: the target dictionary.
    """
    pad, eos = dictionary.pad(), dictionary.eos() if ensemble.end is None else ensemble.end
    target = collate_tokens(hypotheses, pad)
    previous = collate_tokens(hypotheses, pad, eos, move_eos_to_beginning=True)
    net_input = {**sample["net_input"], "prev_output_tokens": previous}
    text = ensemble.force_decode({"net_input": net_input, "target": target})
    assert text.whole is not None  # nothing has been dropped
    votes = ensemble.votes(text)
    decided = ensemble.decided(text, votes)
    mixed = interpolate_references(text.log_probs, [(vote.log_prob(text.targets), vote.weight) for vote in decided])
    made = Breakdown(text, tuple(memory.name for memory in ensemble.voting), decided, mixed, None)
    if ensemble.trust is not None:
        step = trust_step(text.likeliest, ensemble.limited(votes))
        made.before = step.weights
        if isinstance(ensemble.trust, LearnedTrust):
            made.names, made.features = ensemble.trust.names, ensemble.trust.inputs(step)
            made.attributions = ensemble.trust.attributions(made.features)
    for memory in ensemble.voting:
        if isinstance(memory, PhraseMemory):
            made.phrase_votes = text.records[memory.name].votes(memory)
    return made


# What the log calls p_r and the weight of a memory; of any other, its name and with `_lambda`.
LOGGED = {TokenMemory.name: ("retrieval", "lambda"), PhraseMemory.name: ("phrases", "phrase_lambda")}


class RetrievalLog:
    """Write a line for each token of the best hypotheses, which are force-decoded for it.

    A line has the `sentence`, the `position` and the `token`; log-probabilities of the token: `model`, `retrieval` (the
    token memory's, null where no neighbour names it), `phrases` (the phrase memory's, null likewise) and `mixed`; the weights
    of the memories, `lambda` and `phrase_lambda`; and the `neighbours`, nearest first, each with its `entry` in the
    datastore, its `token` and its `score` (similarity, or minus the squared distance).

    Args:
        path: a file that is overwritten.
        dictionary: the target dictionary.

    Raises:
        ConfigurationError: the file cannot be written.
    """

    def __init__(self, path: Path, dictionary: Any) -> None:
        self.dictionary = dictionary
        self.sentences = 0
        try:
            self.stream = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"--knn-log {path} cannot be written ({error.strerror})") from None

    def write(self, ensemble: RetrievalEnsemble, sample: dict[str, Any], hypotheses: list[Tensor]) -> None:
        """Log a batch.

        Args:
            ensemble: what decoded it.
            sample: a batch of fairseq.
            hypotheses: the tokens of each sentence's translation.
        """
        breakdown = break_down(ensemble, sample, hypotheses, self.dictionary)
        # fairseq-interactive gives its sentences no numbers.
        numbers = sample["id"].tolist() if "id" in sample else range(self.sentences, self.sentences + len(hypotheses))
        self.sentences += len(hypotheses)
        text, votes = breakdown.text, dict(zip(breakdown.memories, breakdown.votes))
        columns = {"position": text.positions, "token": text.targets, "model": text.log_probs, "mixed": breakdown.mixed}
        for name in {**LOGGED, **dict.fromkeys(votes)}:
            said, weight = LOGGED.get(name, (name, f"{name}_lambda"))
            vote = votes.get(name)
            columns[weight] = vote.weight if vote is not None else torch.zeros_like(text.log_probs)
            columns[said] = (
                vote.log_prob(text.targets) if vote is not None else torch.full_like(text.log_probs, float("-inf"))
            )
        neighbours = self._neighbours(breakdown)
        for row, values in enumerate(zip(*(column.tolist() for column in columns.values()))):
            line = {name: None if value == float("-inf") else value for name, value in zip(columns, values)}
            line |= {
                "token": self.dictionary.symbols[line["token"]],
                "neighbours": neighbours[row] if neighbours else [],
            }
            sentence = {"sentence": numbers[int(text.sentences[row])]}
            self.stream.write(json.dumps(sentence | line, ensure_ascii=False) + "\n")
        self.stream.flush()

    def _neighbours(self, breakdown: Breakdown) -> list[list[dict[str, Any]]]:
        record = breakdown.text.records.get(TokenMemory.name)
        if record is None:
            return []
        found = record.neighbours
        return [
            [
                {"entry": entry, "token": self.dictionary.symbols[value], "score": score}
                for entry, value, score in zip(*row)
                if entry >= 0
            ]
            for row in zip(found.ids.tolist(), found.values.tolist(), found.scores.tolist())
        ]
