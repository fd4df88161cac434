"""The model (or ensemble) that fairseq's sequence generator sees: its probabilities mixed with retrieval.

fairseq's generators ask an `EnsembleModel` for log p(y_t | x, y_<t) and do all else themselves: beam, sampling and
diverse search, prefixes, length penalties, n-gram blocking. Mixing inside the ensemble leaves them as they are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from fairseq.sequence_generator import EnsembleModelWithAlignment
from fairseq.sequence_scorer import SequenceScorer
from torch import Tensor

from fairseq_ccpr.decoding.interpolation import interpolate_
from fairseq_ccpr.decoding.token_retriever import TokenRetriever
from fairseq_ccpr.models.key_layer import KeyCapture


class RetrievalEnsemble(EnsembleModelWithAlignment):
    """An ensemble whose distribution is interpolated with that of a token datastore.

    Args:
        models: fairseq models; their mean is p_NMT.
        capture: reads the queries, from the one model the datastore belongs to.
        retriever: the token datastore.
        pad: id of the padding token.
        beam_size: hypotheses of a sentence, which are neighbours in the batch.
    """

    def __init__(
        self, models: list[Any], capture: KeyCapture, retriever: TokenRetriever, pad: int, beam_size: int
    ) -> None:
        super().__init__(models)
        self.capture, self.retriever, self.pad, self.beam_size = capture, retriever, pad, beam_size

    def forward_decoder(
        self, tokens: Tensor, encoder_outs: Any, incremental_states: Any, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor | None]:
        """One step: log p [H, V] and the attention.

        1. p_NMT from the models, as without retrieval;
        2. the queries they left behind, one a hypothesis;
        3. retrieve, and interpolate.
        """
        log_probs, attention = super().forward_decoder(tokens, encoder_outs, incremental_states, temperature)
        queries = self.capture.read()[:, -1]  # [H, T, d] -> [H, d]
        if tokens.size(1) == 1:
            # All hypotheses of a sentence are still alike: one search serves them.
            once = self.retriever(queries[:: self.beam_size])
            values, retrieved, share = (part.repeat_interleave(self.beam_size, dim=0) for part in once)
        else:
            values, retrieved, share = self.retriever(queries)
        return interpolate_(log_probs.float(), values, retrieved, share), attention

    def force_decode(self, sample: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """The same distribution at every position of a given target: log p [B, T, V], and the models' mean attention."""
        log_probs, queries, attention = self.force_decode_models(sample)
        real = sample["target"].ne(self.pad)
        log_probs[real] = interpolate_(log_probs[real], *self.retriever(queries[real]))
        return log_probs, attention

    def force_decode_models(self, sample: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
        """What retrieval starts from: log p_NMT fp32 [B, T, V], the queries [B, T, d], and the mean attention."""
        outputs = [model(**sample["net_input"]) for model in self.models]
        each = [m.get_normalized_probs(o, log_probs=True, sample=sample) for m, o in zip(self.models, outputs)]
        log_probs = torch.stack(each).float().logsumexp(dim=0) - math.log(len(each))
        attention = [o[1]["attn"][0] for o in outputs if o[1]["attn"][0] is not None]
        return log_probs, self.capture.read(), torch.stack(attention).mean(dim=0) if attention else None

    def signature(self) -> str:
        """All that decides what retrieval does to a translation, in one line."""
        return self.retriever.signature()


class _ScoredModel:
    """A `RetrievalEnsemble` in the shape of the single model that fairseq's scorer works with."""

    def __init__(self, ensemble: RetrievalEnsemble, sample: dict[str, Any]) -> None:
        self.ensemble, self.sample = ensemble, sample

    def eval(self) -> None:
        self.ensemble.eval()

    def __call__(self, **net_input: Tensor) -> tuple[Tensor, dict[str, Any]]:
        log_probs, attention = self.ensemble.force_decode(self.sample)
        return log_probs, {"attn": [attention]} if attention is not None else {}

    def get_normalized_probs(self, output: tuple[Tensor, Any], log_probs: bool, sample: dict[str, Any]) -> Tensor:
        return output[0]


class RetrievalScorer(SequenceScorer):
    """fairseq's `--score-reference`, with retrieval."""

    def __init__(self, ensemble: RetrievalEnsemble, tgt_dict: Any, **kwargs: Any) -> None:
        super().__init__(tgt_dict, **kwargs)
        self.model = ensemble

    @torch.no_grad()
    def generate(self, models: list[Any], sample: dict[str, Any], **kwargs: Any) -> list[list[dict[str, Any]]]:
        """Score the targets of a batch; see `SequenceScorer.generate`."""
        return super().generate([_ScoredModel(self.model, sample)], sample)
