"""Force-decode finished translations, and break each token's probability down: model, token memory, phrase memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from fairseq.data.data_utils import collate_tokens
from torch import Tensor

from fairseq_ccpr.decoding.ensemble import Forced, RetrievalEnsemble, step_of
from fairseq_ccpr.decoding.interpolation import Vote
from fairseq_ccpr.decoding.memory import Neighbours
from fairseq_ccpr.decoding.phrase_candidates import SentencePhrases
from fairseq_ccpr.decoding.trust import LearnedTrust
from fairseq_ccpr.decoding.trust_features import ModelEvidence


@dataclass
class PhraseBreakdown:
    """What the phrase memory said at N tokens; the A candidates are those of the token's sentence, in their order."""

    vote: Vote  # [N, A]
    votes: Tensor  # fp32 [N, A], what each candidate gave to the token it proposed, `vote.values`
    states: Tensor  # int64 [N, A], how far each was, of `STATES`


@dataclass
class TrustBreakdown:
    """What trust saw and decided at N tokens."""

    before: Tensor  # fp32 [N, M], the weights that the settings give
    names: tuple[str, ...]  # of the F features; none where the kind of trust has no features
    features: Tensor  # fp32 [N, F]
    attributions: Tensor  # fp32 [N, M, F], see `LearnedTrust.attributions`


@dataclass
class Breakdown:
    """N tokens of a batch of translations, the ends of sentences too; sentence by sentence."""

    sentences: Tensor  # int64 [N], place in the batch
    positions: Tensor  # int64 [N], from 0
    tokens: Tensor  # int64 [N]
    model: Tensor  # fp32 [N], log p_NMT of the token
    argmax: Tensor  # int64 [N], what the model alone would have written after the same prefix
    argmax_model: Tensor  # fp32 [N], log p_NMT of that
    mixed: Tensor  # fp32 [N], log p of the token
    token_weight: Tensor  # fp32 [N], lambda_tok*, 0 without a token memory
    token_memory: Tensor  # fp32 [N], log p_tok of the token; -inf where no neighbour names it
    neighbours: Neighbours | None
    token_vote: Vote | None  # [N, k]
    phrase_weight: Tensor  # fp32 [N], lambda_phr*
    phrase_memory: Tensor  # fp32 [N], log p_phr of the token
    phrases: list[SentencePhrases]  # of each sentence of the batch; empty without a phrase memory
    phrase_breakdown: PhraseBreakdown | None
    trust: TrustBreakdown | None


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
    forced = ensemble.force_decode(
        {"net_input": {**sample["net_input"], "prev_output_tokens": previous}, "target": target}
    )
    tokens, of_model = target[forced.real], forced.log_probs[forced.real]
    each = [(vote.weight, vote.of_token(tokens)) for vote in forced.votes]
    silent = (torch.zeros_like(of_model[:, 0]), torch.full_like(of_model[:, 0], float("-inf")))
    token_weight, token_memory = each[0] if forced.token_vote is not None else silent
    phrase_weight, phrase_memory = each[-1] if forced.phrase_vote is not None else silent
    argmax_model, argmax = of_model.max(dim=1)
    model = of_model.gather(1, tokens.unsqueeze(1)).squeeze(1)
    trust = _of_trust(ensemble, forced, ModelEvidence(argmax_model, argmax))
    mixed = ensemble.mix(of_model, forced.votes).gather(1, tokens.unsqueeze(1)).squeeze(1)
    phrases = None
    if forced.phrases is not None and forced.proposals is not None and forced.phrase_vote is not None:
        votes = forced.phrases.votes(*forced.proposals)
        phrases = PhraseBreakdown(forced.phrase_vote, votes, forced.proposals[0].states)
    sentences, positions = forced.real.nonzero().unbind(dim=1)
    return Breakdown(
        sentences, positions, tokens, model, argmax, argmax_model, mixed, token_weight, token_memory, forced.neighbours,
        forced.token_vote, phrase_weight, phrase_memory, forced.phrases.phrases if forced.phrases is not None else [],
        phrases, trust,
    )  # fmt: skip


def _of_trust(ensemble: RetrievalEnsemble, forced: Forced, model: ModelEvidence) -> TrustBreakdown | None:
    if ensemble.trust is None:
        return None
    step = step_of(
        model, forced.token_vote, forced.phrase_vote, ensemble.limited(forced.token_vote, forced.phrase_vote)
    )
    if not isinstance(ensemble.trust, LearnedTrust):
        nothing = step.weights.new_zeros(len(step.weights), 0)
        return TrustBreakdown(step.weights, (), nothing, nothing.unsqueeze(1).expand(-1, step.weights.size(1), -1))
    features = ensemble.trust.inputs(step)
    return TrustBreakdown(step.weights, ensemble.trust.names, features, ensemble.trust.attributions(features))
