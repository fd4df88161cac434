"""What retrieval did to each token of a translation, as lines of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from fairseq.data.data_utils import collate_tokens
from torch import Tensor

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.errors import ConfigurationError


class RetrievalLog:
    """Writes a line for each token of the best hypotheses, whose neighbours are looked up once more.

    A line has the `sentence`, the `position` and the `token`; `lambda`, the share retrieval had; log-probabilities of the
    token: `model`, `retrieval` (null where no neighbour names it) and `mixed`; and the `neighbours`, nearest first, each with
    its `entry` in the datastore, its `token` and its `score` (similarity, or minus the squared distance).

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

    @torch.no_grad()
    def write(self, ensemble: RetrievalEnsemble, sample: dict[str, Any], hypotheses: list[Tensor]) -> None:
        """Log a batch.

        Args:
            ensemble: what decoded it.
            sample: a batch of fairseq.
            hypotheses: the tokens of each sentence's translation.
        """
        pad, eos = self.dictionary.pad(), self.dictionary.eos()
        target = collate_tokens(hypotheses, pad)
        previous = collate_tokens(hypotheses, pad, eos, move_eos_to_beginning=True)
        forced = {"net_input": {**sample["net_input"], "prev_output_tokens": previous}, "target": target}
        log_probs, queries, _ = ensemble.force_decode_models(forced)
        real = target.ne(pad)
        found = ensemble.retriever.look_up(queries[real])
        tokens = target[real].unsqueeze(1)
        retrieved = found.log_probs.masked_fill(found.values != tokens, float("-inf")).amax(dim=1)
        of_model = log_probs.gather(2, target.unsqueeze(2)).squeeze(2)[real]
        mixed = torch.logaddexp(torch.log1p(-found.share) + of_model, found.share.log() + retrieved)
        sentences, positions = (part.tolist() for part in real.nonzero().unbind(dim=1))
        columns = [tokens.squeeze(1), found.share, of_model, retrieved, mixed, found.ids, found.values, found.scores]
        # fairseq-interactive gives its sentences no numbers.
        numbers = sample["id"].tolist() if "id" in sample else range(self.sentences, self.sentences + len(hypotheses))
        self.sentences += len(hypotheses)
        for row, position, *rest in zip(sentences, positions, *(column.tolist() for column in columns)):
            self.stream.write(json.dumps(self._line(numbers[row], position, *rest), ensure_ascii=False) + "\n")
        self.stream.flush()

    def _line(
        self, sentence: int, position: int, token: int, share: float, model: float, retrieved: float, mixed: float,
        ids: list[int], values: list[int], scores: list[float],
    ) -> dict[str, Any]:  # fmt: skip
        symbols = self.dictionary.symbols
        neighbours = [
            {"entry": i, "token": symbols[value], "score": score}
            for i, value, score in zip(ids, values, scores)
            if i >= 0
        ]
        return {
            "sentence": sentence, "position": position, "token": symbols[token], "lambda": share, "model": model,
            "retrieval": retrieved if retrieved > float("-inf") else None, "mixed": mixed, "neighbours": neighbours,
        }  # fmt: skip
