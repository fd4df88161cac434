"""The model (or ensemble) that fairseq's sequence generator sees: its probabilities mixed with retrieval.

fairseq's generators ask an `EnsembleModel` for log p(y_t | x, y_<t) and do all else themselves: beam, sampling and
diverse search, prefixes, length penalties, n-gram blocking. Mixing inside the ensemble leaves them as they are.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from fairseq.sequence_generator import EnsembleModelWithAlignment
from fairseq.sequence_scorer import SequenceScorer
from torch import Tensor

from fairseq_ccpr.decoding.interpolation import interpolate_, limit_shares, reward_
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory, PhraseStep
from fairseq_ccpr.decoding.side_stream import SideStream
from fairseq_ccpr.decoding.token_retriever import TokenRetriever
from fairseq_ccpr.models.key_layer import KeyCapture

Part = tuple[Tensor, Tensor, Tensor]  # values [H, k], log-probabilities [H, k], share [H]


@dataclass(frozen=True)
class TokenMemory:
    """A token datastore beside the decoder."""

    capture: KeyCapture  # reads the queries, from the one model the datastore belongs to
    retriever: TokenRetriever


class RetrievalEnsemble(EnsembleModelWithAlignment):
    """An ensemble whose distribution is interpolated with those of a token and a phrase datastore, or of one of them.

    p = (1 - Lambda) p_NMT + lambda_tok p_tok + lambda_phr p_phr, with Lambda the sum of both shares.

    Args:
        models: fairseq models; their mean is p_NMT.
        tokens: the token memory, where there is one.
        phrases: the phrase memory, where there is one.
        pad: id of the padding token.
        beam_size: hypotheses of a sentence, which are neighbours in the batch.
        share_max: Lambda_max, see `limit_shares`.
    """

    def __init__(
        self,
        models: list[Any],
        tokens: TokenMemory | None,
        phrases: PhraseMemory | None,
        pad: int,
        beam_size: int,
        share_max: float,
    ) -> None:
        super().__init__(models)
        self.tokens, self.phrases = tokens, phrases
        self.pad, self.beam_size, self.share_max = pad, beam_size, share_max
        self.side_stream = SideStream()

    def with_memories(self, tokens: TokenMemory | None, phrases: PhraseMemory | None) -> RetrievalEnsemble:
        """The same models with other memories."""
        models = list(self.models)
        return RetrievalEnsemble(models, tokens, phrases, self.pad, self.beam_size, self.share_max)

    def forward_encoder(self, net_input: dict[str, Tensor]) -> Any:
        """Encode the sources, and retrieve the phrases of their sentences.

        What another process searches for is asked before; else a GPU encodes while the host reads the sentences.
        """
        if self.phrases is None:
            return super().forward_encoder(net_input)
        sources = net_input["src_tokens"].cpu()  # before the GPU has anything else to do, which a copy would wait for
        answer = self.phrases.ask(sources)
        encoded = super().forward_encoder(net_input)
        self.phrases.take(answer, sources)
        return encoded

    def reorder_incremental_state(self, incremental_states: Any, new_order: Tensor) -> None:
        """Follow the beam, and the batch as its sentences end."""
        super().reorder_incremental_state(incremental_states, new_order)
        if self.phrases is not None:
            self.phrases.state.reorder(new_order)

    def forward_decoder(
        self, tokens: Tensor, encoder_outs: Any, incremental_states: Any, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor | None]:
        """One step: log p [H, V] and the attention.

        1. p_NMT from the models, as without retrieval;
        2. the token memory is asked with the queries, one a hypothesis, as soon as the model of the datastore knows them: a
           GPU searches while the models project to the vocabulary;
        3. the phrase memory, with the last token of each hypothesis;
        4. interpolate.
        """
        first = tokens.size(1) == 1
        answers: list[Part] = []
        memory = self.tokens
        with memory.capture.telling(lambda: answers.append(self._ask_tokens(first))) if memory else nullcontext():
            log_probs, attention = super().forward_decoder(tokens, encoder_outs, incremental_states, temperature)
        self.side_stream.join()
        of_tokens = answers[0] if memory else None
        log_probs = log_probs.float()
        of_phrases = None
        if self.phrases is not None:
            if first:
                self.phrases.begin(self.beam_size)
            else:
                self.phrases.state.advance(tokens[:, -1])
            of_phrases = self.phrases.step(log_probs, attention)
        return self.mix(log_probs, of_tokens, of_phrases), attention

    def _ask_tokens(self, first: bool) -> Part:
        assert self.tokens is not None
        queries = self.tokens.capture.read()[:, -1]  # [H, T, d] -> [H, d]
        with self.side_stream.taking(queries):
            if not first:
                return self.tokens.retriever(queries)
            # All hypotheses of a sentence are still alike: one search serves them.
            once = self.tokens.retriever(queries[:: self.beam_size])
            values, retrieved, share = (part.repeat_interleave(self.beam_size, dim=0) for part in once)
            return values, retrieved, share

    def mix(self, log_probs: Tensor, of_tokens: Part | None, of_phrases: PhraseStep | None) -> Tensor:
        """Interpolate log p_NMT [H, V] in place with what the memories say."""
        mixed = interpolate_(log_probs, *self.limited(of_tokens, of_phrases))
        if of_phrases is None or of_phrases.rewards is None:
            return mixed
        return reward_(mixed, of_phrases.values, of_phrases.rewards)

    def limited(self, of_tokens: Part | None, of_phrases: PhraseStep | None) -> list[Part]:
        """What the memories say, those that there are, with their shares limited."""
        parts = [] if of_tokens is None else [of_tokens]
        if of_phrases is None:
            return parts
        token_share = torch.zeros_like(of_phrases.share) if of_tokens is None else of_tokens[2]
        token_share, phrase_share = limit_shares(token_share, of_phrases.share, self.share_max)
        return [(*part[:2], token_share) for part in parts] + [(of_phrases.values, of_phrases.log_probs, phrase_share)]

    def force_decode(self, sample: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """The same distribution at every position of a given target: log p [B, T, V], and the models' mean attention."""
        log_probs, queries, attention = self.force_decode_models(sample)
        real = sample["target"].ne(self.pad)
        of_tokens = self.tokens.retriever(queries[real]) if self.tokens is not None else None
        of_phrases = self.force_decode_phrases(sample, log_probs, attention)
        log_probs[real] = self.mix(log_probs[real], of_tokens, of_phrases)
        return log_probs, attention

    def force_decode_phrases(
        self, sample: dict[str, Any], log_probs: Tensor, attention: Tensor | None
    ) -> PhraseStep | None:
        """What the phrase memory, where there is one, says at the N real tokens of given targets: [N, ...]."""
        if self.phrases is None:
            return None
        self.phrases.start(sample["net_input"]["src_tokens"])
        previous, real = sample["net_input"]["prev_output_tokens"], sample["target"].ne(self.pad)
        return self.phrases.force_decode(previous, log_probs, attention, real)

    def force_decode_models(self, sample: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
        """What retrieval starts from: log p_NMT fp32 [B, T, V], queries [B, T, d], mean attention [B, T, S].

        Without a token memory d is 0.
        """
        outputs = [model(**sample["net_input"]) for model in self.models]
        each = [m.get_normalized_probs(o, log_probs=True, sample=sample) for m, o in zip(self.models, outputs)]
        log_probs = torch.stack(each).float().logsumexp(dim=0) - math.log(len(each))
        attention = [o[1]["attn"][0] for o in outputs if o[1]["attn"][0] is not None]
        queries = self.tokens.capture.read() if self.tokens is not None else log_probs[:, :, :0]
        return log_probs, queries, torch.stack(attention).mean(dim=0) if attention else None

    def signature(self) -> str:
        """All that decides what retrieval does to a translation, in one line."""
        parts = [self.tokens.retriever.signature()] if self.tokens is not None else []
        if self.phrases is not None:
            parts += [self.phrases.signature(), f"Lambda<={self.share_max}"]
        return " ".join(parts)


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
