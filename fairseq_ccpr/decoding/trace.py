"""What the model and its memories each said of the tokens of finished translations, looked up once more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from fairseq.data.data_utils import collate_tokens
from torch import Tensor

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.phrase_candidates import SentencePhrases
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory, PhraseStep
from fairseq_ccpr.decoding.token_retriever import Neighbours


@dataclass
class PhraseOpinion:
    """What the phrase memory said at N tokens; the A candidates are those of the token's sentence, in their order."""

    step: PhraseStep  # [N, A]
    votes: Tensor  # fp32 [N, A], what each candidate gave to the token it wanted next, `step.values`
    begun: Tensor  # bool [N, A], it was going on; or else it would have begun there


@dataclass
class Trace:
    """N tokens of a batch of translations, the ends of sentences too; sentence by sentence."""

    sentences: Tensor  # int64 [N], place in the batch
    positions: Tensor  # int64 [N], from 0
    tokens: Tensor  # int64 [N]
    model: Tensor  # fp32 [N], log p_NMT of the token
    favourites: Tensor  # int64 [N], what the model alone would have written after the same prefix
    favoured: Tensor  # fp32 [N], log p_NMT of that
    mixed: Tensor  # fp32 [N], log p of the token
    token_share: Tensor  # fp32 [N], lambda_tok*, 0 without a token memory
    token_memory: Tensor  # fp32 [N], log p_tok of the token; -inf where no neighbour names it
    neighbours: Neighbours | None
    phrase_share: Tensor  # fp32 [N], lambda_phr*
    phrase_memory: Tensor  # fp32 [N], log p_phr of the token
    phrases: list[SentencePhrases]  # of each sentence of the batch; none without a phrase memory
    phrase_opinion: PhraseOpinion | None


@torch.no_grad()
def trace(ensemble: RetrievalEnsemble, sample: dict[str, Any], hypotheses: list[Tensor], dictionary: Any) -> Trace:
    """Force-decode translations.

    Args:
        ensemble: what decoded them.
        sample: a batch of fairseq.
        hypotheses: the tokens of each sentence's translation.
        dictionary: the target dictionary.
    """
    pad, eos = dictionary.pad(), dictionary.eos()
    target = collate_tokens(hypotheses, pad)
    previous = collate_tokens(hypotheses, pad, eos, move_eos_to_beginning=True)
    forced = {"net_input": {**sample["net_input"], "prev_output_tokens": previous}, "target": target}
    log_probs, queries, attention = ensemble.force_decode_models(forced)
    real = target.ne(pad)
    tokens = target[real]
    neighbours = ensemble.tokens.retriever.look_up(queries[real]) if ensemble.tokens is not None else None
    of_tokens = (neighbours.values, neighbours.log_probs, neighbours.share) if neighbours is not None else None
    opinion = None
    if ensemble.phrases is not None:
        opinion = _opinion(ensemble.phrases, forced, log_probs, attention, real)
    of_phrases = opinion.step if opinion is not None else None
    parts = ensemble.limited(of_tokens, of_phrases)
    of_model = log_probs[real]
    said = [(share, _of_token(values, retrieved, tokens)) for values, retrieved, share in parts]
    nothing = (torch.zeros_like(of_model[:, 0]), torch.full_like(of_model[:, 0], float("-inf")))
    token_share, token_memory = said[0] if neighbours is not None else nothing
    phrase_share, phrase_memory = said[-1] if of_phrases is not None else nothing
    favoured, favourites = of_model.max(dim=1)
    model = of_model.gather(1, tokens.unsqueeze(1)).squeeze(1)
    mixed = ensemble.mix(of_model, of_tokens, of_phrases).gather(1, tokens.unsqueeze(1)).squeeze(1)
    sentences, positions = real.nonzero().unbind(dim=1)
    return Trace(
        sentences, positions, tokens, model, favourites, favoured, mixed, token_share, token_memory, neighbours,
        phrase_share, phrase_memory, ensemble.phrases.found if ensemble.phrases is not None else [], opinion,
    )  # fmt: skip


def _opinion(
    memory: PhraseMemory, forced: dict[str, Any], log_probs: Tensor, attention: Tensor | None, real: Tensor
) -> PhraseOpinion:
    memory.start(forced["net_input"]["src_tokens"])
    previous = forced["net_input"]["prev_output_tokens"]
    outlook, sentences = memory.force_outlook(previous, log_probs, attention, real)
    return PhraseOpinion(memory.weigh(outlook, sentences), memory.votes(outlook, sentences), outlook.begun)


def _of_token(values: Tensor, retrieved: Tensor, tokens: Tensor) -> Tensor:
    """log p_r of one token a row, fp32 [N], from the sparse distribution [N, k]."""
    return retrieved.masked_fill(values != tokens.unsqueeze(1), float("-inf")).amax(dim=1)
