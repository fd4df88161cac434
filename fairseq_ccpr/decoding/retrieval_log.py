"""`--knn-log`: what retrieval did to each token of a translation, as lines of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_ccpr.decoding.breakdown import Breakdown, break_down
from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.errors import ConfigurationError

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
