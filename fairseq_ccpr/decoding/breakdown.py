"""Force-decode finished translations, and break each token's probability down: the model, and each memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from fairseq.data.data_utils import collate_tokens
from torch import Tensor

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble, trust_step
from fairseq_ccpr.decoding.forced import ForcedText
from fairseq_ccpr.decoding.mixture import Vote, interpolate_references
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.decoding.trust import LearnedTrust


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
