"""fairseq's beam search over an ensemble that retrieves: one pass over the vocabulary for all of its questions."""

from __future__ import annotations

import math
from typing import Any

import torch
from fairseq.search import BeamSearch
from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment
from torch import Tensor

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.mixture import RUN, Distribution


class BeamGenerator(SequenceGenerator):
    """Generates what fairseq's generator does, but for rounding and the order of equal scores.

    Sampling, constraints, language models and other ensembles are left to fairseq.
    """

    def _generate(
        self,
        sample: dict[str, Any],
        prefix_tokens: Tensor | None = None,
        constraints: Tensor | None = None,
        bos_token: int | None = None,
    ) -> list[list[dict[str, Tensor]]]:
        model, net_input = self.model, sample["net_input"]
        ours = isinstance(model, RetrievalEnsemble) and "src_tokens" in net_input
        if (
            not ours
            or type(self.search) is not BeamSearch
            or constraints is not None
            or self.lm_model is not None
        ):
            found: list[list[dict[str, Tensor]]] = super()._generate(
                sample, prefix_tokens, constraints, bos_token
            )
            return found
        sources = net_input["src_tokens"]
        lengths = net_input.get("src_lengths")
        if lengths is None:
            lengths = (sources.ne(self.eos) & sources.ne(self.pad)).sum(dim=1)
        beam, device = self.beam_size, sources.device
        sentences, longest = sources.shape
        most = min(int(self.max_len_a * longest + self.max_len_b), self.max_len - 1)
        most = int(lengths.max()) if self.match_source_len else most
        assert self.min_len <= most, "min_len cannot be larger than max_len, please adjust these!"
        states: list[dict[str, Any]] = [{} for _ in model.models]
        encoded = model.forward_encoder(net_input)
        rows = torch.arange(sentences, device=device).repeat_interleave(beam)
        encoded = model.reorder_encoder_out(encoded, rows)
        tokens = torch.full((len(rows), most + 2), self.pad, device=device)
        tokens[:, 0] = self.eos if bos_token is None else bos_token
        scores = torch.zeros(len(rows), most + 1, device=device)
        attention: Tensor | None = None  # [most + 2, H, S]
        ignored = torch.zeros(sentences, beam, dtype=torch.bool, device=device)
        finalized: list[list[dict[str, Tensor]]] = [[] for _ in range(sentences)]
        finished = [False] * sentences
        ranks = torch.arange(2 * beam, device=device)
        for step in range(most + 1):  # one more for the end
            found_model, attended = model.step(tokens[:, : step + 1], encoded, states, self.temperature)
            if prefix_tokens is not None and step < min(prefix_tokens.size(1), most):
                allowed = self._allowed(found_model, step, most, forced=True).log_probs
                log_probs, tokens, scores = self._prefix_tokens(
                    step, allowed, scores, tokens, prefix_tokens, beam
                )
                found_model = Distribution(log_probs)
            else:
                found_model = self._allowed(found_model, step, most)
            if attended is not None:
                if attention is None:
                    attention = torch.empty(most + 2, *attended.shape, device=device)
                attention[step + 1] = attended
            if self.repeat_ngram_blocker is not None:
                blocked = self.repeat_ngram_blocker(tokens, found_model.log_probs, sentences, beam, step)
                found_model = Distribution(blocked)
            so_far = scores.view(sentences, beam, -1)[:, :, step - 1]
            if not step:  # all hypotheses are the same
                so_far = so_far.index_fill(1, ranks[1:beam], -math.inf)
            best, next_tokens, beams = best_continuations(found_model, so_far, 2 * beam)
            rows = beams + beam * torch.arange(sentences, device=device).unsqueeze(1)
            ends = next_tokens.eq(self.eos) & best.ne(-math.inf)
            ends[:, :beam] &= ~ignored
            ended = rows[:, :beam][ends[:, :beam]]
            done: list[int] = []
            if len(ended):
                in_fairseqs_order = attention.permute(1, 2, 0) if attention is not None else None
                done = self.finalize_hypos(
                    step,
                    ended,
                    best[:, :beam][ends[:, :beam]],
                    tokens,
                    scores,
                    finalized,
                    finished,
                    beam,
                    in_fairseqs_order,
                    lengths,
                    most,
                )
            if len(done) == sentences or step == most:
                break
            if done:
                left = torch.ones(sentences, dtype=torch.bool)
                left[done] = False
                going = left.nonzero().squeeze(1).to(device)
                best, next_tokens, rows, ends, ignored, lengths = (
                    one.index_select(0, going) for one in (best, next_tokens, rows, ends, ignored, lengths)
                )
                prefix_tokens = prefix_tokens.index_select(0, going) if prefix_tokens is not None else None
                sentences = len(going)
            # the best that have not ended, in their order
            ends[:, :beam] |= ignored
            order, chosen = (ranks + ends * len(ranks)).topk(beam, dim=1, largest=False)
            ignored = order >= len(ranks)
            kept = rows.gather(1, chosen).flatten()
            tokens, scores = tokens.index_select(0, kept), scores.index_select(0, kept)
            tokens[:, step + 1] = next_tokens.gather(1, chosen).flatten()
            scores[:, step] = best.gather(1, chosen).flatten()
            if attention is not None:
                heard = attention[: step + 2].index_select(1, kept)
                attention = attention[:, : len(kept)]
                attention[: step + 2] = heard
            model.reorder_incremental_state(states, kept)
            encoded = model.reorder_encoder_out(encoded, kept)
        return [sorted(each, key=lambda one: float(one["score"]), reverse=True) for each in finalized]

    def _allowed(self, model: Distribution, step: int, most: int, forced: bool = False) -> Distribution:
        """Rule out, in place, what may not be written at a step; little where a prefix is forced."""
        log_probs = model.log_probs
        log_probs[:, self.pad] = -math.inf
        if self.unk_penalty:
            log_probs[:, self.unk] -= self.unk_penalty
        if step >= most:
            log_probs[:, : self.eos] = log_probs[:, self.eos + 1 :] = -math.inf
            return Distribution(log_probs)
        if step < self.min_len and not forced:
            log_probs[:, self.eos] = -math.inf
        if self.token_indices_to_suppress is not None and not forced:
            log_probs[:, self.token_indices_to_suppress] = -math.inf
            return Distribution(log_probs)
        return model.again({self.pad, self.unk, self.eos})


class AlignedBeamGenerator(SequenceGeneratorWithAlignment, BeamGenerator):
    """The same with `--print-alignment`."""


def best_continuations(model: Distribution, so_far: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the best continuations of each sentence: log p, tokens and hypotheses, [B, count] each, best first.

    The best lie in the runs whose own best are best, and adding a hypothesis's score to all of a run leaves
    their order. So nothing as wide as the vocabulary is added up or sorted. What is no number counts as -inf.

    Args:
        so_far: fp32 [B, n], log p of the hypotheses; -inf for those that are not to be continued.
    """
    (sentences, beam), words = so_far.shape, model.log_probs.size(1)
    runs = model.peaks.view(sentences, beam, -1)
    count = min(count, beam * words - 1)
    most = min(count, beam * runs.size(2))
    best = _numbers(runs + so_far.unsqueeze(2)).flatten(1).topk(most, dim=1).indices
    beams, begins = best // runs.size(2), best % runs.size(2) * RUN
    inside = begins.unsqueeze(2) + torch.arange(RUN, device=so_far.device)
    tokens = inside.clamp_max(words - 1)
    places = (beams.unsqueeze(2) * words + tokens).flatten(1)
    likely = model.log_probs.view(sentences, -1).gather(1, places).view(inside.shape)
    likely = _numbers(likely + so_far.gather(1, beams).unsqueeze(2))
    if words % RUN:
        likely = likely.masked_fill(inside >= words, -math.inf)
    log_probs, chosen = likely.flatten(1).topk(count, dim=1)
    return log_probs, tokens.flatten(1).gather(1, chosen), beams.gather(1, chosen // RUN)


def _numbers(log_probs: Tensor) -> Tensor:
    return log_probs.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
