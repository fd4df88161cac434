"""What each token of given targets owes to the model and to each memory, and the log of it (`--tokens-log`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fairseq.data.data_utils import collate_tokens
from torch import Tensor

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble, trust_step
from fairseq_ccpr.decoding.forced import ForcedText
from fairseq_ccpr.decoding.mixture import Vote
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.decoding.token_retriever import Neighbours
from fairseq_ccpr.decoding.trust import LearnedTrust
from fairseq_ccpr.errors import ConfigurationError

# What the log calls p_r and the weight of a memory; of any other, its name and with `_lambda`.
LOGGED = {TokenMemory.name: ("retrieval", "lambda"), PhraseMemory.name: ("phrases", "phrase_lambda")}


@dataclass
class Breakdown:
    """N tokens of a batch of translations, M memories."""

    text: ForcedText
    memories: tuple[str, ...]  # names of those that vote
    votes: list[Vote]  # of each, with the weight it has in the end
    mixed: Tensor  # fp32 [N], log p of the token
    shares: Tensor  # fp64 [N, 1 + M], what part of p the model gives, and each memory
    before: Tensor | None  # fp32 [N, M], the weights that the settings give, where there is trust
    names: tuple[str, ...] = ()  # of the F features; none where the kind of trust has no features
    features: Tensor | None = None  # fp32 [N, F]
    attributions: Tensor | None = None  # fp32 [N, M, F], see `Gate.attributions`
    # fp32 [N, A], what each candidate phrase gave to the token it proposed
    phrase_votes: Tensor | None = None
    neighbours: Neighbours | None = None  # [N, k], those that voted, best first


@torch.no_grad()
def break_down(
    ensemble: RetrievalEnsemble, sample: dict[str, Any], hypotheses: list[Tensor], dictionary: Any
) -> Breakdown:
    """Force-decode translations."""
    pad, eos = dictionary.pad(), dictionary.eos() if ensemble.end is None else ensemble.end
    target = collate_tokens(hypotheses, pad)
    previous = collate_tokens(hypotheses, pad, eos, move_eos_to_beginning=True)
    net_input = {**sample["net_input"], "prev_output_tokens": previous}
    text = ensemble.force_decode({**sample, "net_input": net_input, "target": target})
    assert text.whole is not None  # nothing has been dropped
    votes = ensemble.votes(text)
    decided = ensemble.decided(text, votes)
    mixed, said = text.mixed(decided), [(p.double(), w.double()) for p, w in text.said(decided)]
    if text.whole.after:
        whole = ensemble.mixed(text.whole, decided)[text.whole.real]
        mixed = whole.gather(1, text.targets.unsqueeze(1)).squeeze(1)
    shares = text.mixture.shares(text.log_probs.double(), said)
    made = Breakdown(text, tuple(memory.name for memory in ensemble.voting), decided, mixed, shares, None)
    if ensemble.trust is not None and votes:
        step = trust_step(text.likeliest, ensemble.mixture.limited(votes))
        made.before = step.weights
        if isinstance(ensemble.trust, LearnedTrust):
            gate = ensemble.trust.gate
            made.names, made.features = gate.names, ensemble.trust.inputs(step)
            made.attributions = gate.attributions(made.features)
    for memory in ensemble.voting:
        if isinstance(memory, PhraseMemory):
            made.phrase_votes = text.records[memory.name].votes(memory)
        elif isinstance(memory, TokenMemory):
            made.neighbours = text.records[memory.name].best(memory.settings).neighbours
    return made


class RetrievalLog:
    """Write a line for each token of the best hypotheses, which are force-decoded for it.

    A line has the `sentence`, the `position` and the `token`; log-probabilities of the token: `model`,
    `retrieval` (the token memory's, null where no neighbour names it), `phrases` (the phrase memory's, null
    likewise) and `mixed`; the weights of the memories, `lambda` and `phrase_lambda`; and the `neighbours`,
    best first, each with its `entry` in the datastore, its `token`, its `score` (similarity, or minus the
    squared distance, less what its sentence costs) and the `likeness` of its source sentence, where the
    datastore has the sentences.
    """

    def __init__(self, path: Path, dictionary: Any) -> None:
        self.dictionary = dictionary
        self.sentences = 0
        try:
            self.stream = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"--tokens-log {path} cannot be written ({error.strerror})") from None

    def write(
        self,
        used: Sequence[tuple[RetrievalEnsemble, set[int]]],
        sample: dict[str, Any],
        hypotheses: list[Tensor],
    ) -> None:
        """Write the lines of a batch, whose sentences each ensemble translated some of."""
        # fairseq-interactive gives its sentences no numbers.
        numbers = (
            sample["id"].tolist()
            if "id" in sample
            else range(self.sentences, self.sentences + len(hypotheses))
        )
        self.sentences += len(hypotheses)
        for ensemble, rows in used:
            if rows:
                self._write(break_down(ensemble, sample, hypotheses, self.dictionary), numbers, rows)
        self.stream.flush()

    def _write(self, breakdown: Breakdown, numbers: Sequence[int], rows: set[int]) -> None:
        text, votes = breakdown.text, dict(zip(breakdown.memories, breakdown.votes))
        columns = {
            "position": text.positions,
            "token": text.targets,
            "model": text.log_probs,
            "mixed": breakdown.mixed,
        }
        nothing = torch.full_like(text.log_probs, float("-inf"))
        silent = Vote(text.targets.unsqueeze(1), nothing.unsqueeze(1), torch.zeros_like(nothing))
        for name in {**LOGGED, **dict.fromkeys(votes)}:
            log_prob, weight = LOGGED.get(name, (name, f"{name}_lambda"))
            vote = votes.get(name, silent)
            columns |= {weight: vote.weight, log_prob: vote.log_prob(text.targets)}
        neighbours = self._neighbours(breakdown)
        for place, values in enumerate(zip(*(column.tolist() for column in columns.values()))):
            if (row := int(text.sentences[place])) not in rows:
                continue
            line = {name: None if value == float("-inf") else value for name, value in zip(columns, values)}
            line["token"], line["neighbours"] = self.dictionary.symbols[line["token"]], neighbours[place]
            self.stream.write(json.dumps({"sentence": numbers[row]} | line, ensure_ascii=False) + "\n")

    def _neighbours(self, breakdown: Breakdown) -> list[list[dict[str, Any]]]:
        if (found := breakdown.neighbours) is None:
            return [[] for _ in breakdown.mixed]
        parts = {name: part.tolist() for name, part in found._asdict().items() if part is not None}
        names = {"ids": "entry", "values": "token", "scores": "score"}
        logged = []
        for row in range(len(found.ids)):
            each = zip(*(part[row] for part in parts.values()))
            lines = [dict(zip([names.get(name, name) for name in parts], one)) for one in each]
            logged.append(
                [one | {"token": self.dictionary.symbols[one["token"]]} for one in lines if one["entry"] >= 0]
            )
        return logged
