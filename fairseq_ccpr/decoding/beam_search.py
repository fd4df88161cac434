"""fairseq's beam search over an ensemble that retrieves: one pass over the vocabulary for all of its questions."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from fairseq.search import BeamSearch
from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment
from torch import Tensor

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.mixture import RUN, Distribution
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.decoding.text_memory import TextMemory
from fairseq_ccpr.errors import ConfigurationError

OF_TEXT = TextMemory, PhraseMemory  # memories that the target language's text alone makes
OTHER_TEXT = "other_text"  # in a hypothesis: it was made without them


class Beams:
    """The hypotheses of a batch while they grow: H = B n of B sentences.

    Attributes:
        tokens: int64 [H, L + 2], after what they begin with.
        scores: fp32 [H, L + 1], log p up to each token.
        attention: fp32 [L + 2, H, S]; None before the first step, and of models without.
        ignored: bool [B, n], what has ended and only fills its place.
        lengths: of the sources, int64 [B].
    """

    def __init__(self, first: int, padding: int, most: int, beam: int, lengths: Tensor) -> None:
        device, self.beam, self.most = lengths.device, beam, most
        self.tokens = torch.full((len(lengths) * beam, most + 2), padding, device=device)
        self.tokens[:, 0] = first
        self.scores = torch.zeros(len(self.tokens), most + 1, device=device)
        self.attention: Tensor | None = None
        self.ignored = torch.zeros(len(lengths), beam, dtype=torch.bool, device=device)
        self.lengths = lengths
        self.ranks = torch.arange(2 * beam, device=device)

    def hear(self, step: int, attention: Tensor | None) -> None:
        """Keep the attention of a step, fp32 [H, S]."""
        if attention is not None:
            if self.attention is None:
                self.attention = attention.new_empty(self.most + 2, *attention.shape)
            self.attention[step + 1] = attention

    def so_far(self, step: int) -> Tensor:
        """Return log p of the hypotheses, fp32 [B, n]; of equal ones, as there are at first, only the first counts."""
        scores = self.scores.view(-1, self.beam, self.most + 1)[:, :, step - 1]
        return scores if step else scores.index_fill(1, self.ranks[1 : self.beam], -math.inf)

    def keep(
        self, step: int, going: Tensor | None, best: Tensor, tokens: Tensor, ends: Tensor, rows: Tensor
    ) -> Tensor:
        """Go on with the best continuations that have not ended, in their order; returns what they continue, int64 [H'].

        Args:
            going: int64 [B'], the sentences that have not ended; None: none has.
            best: fp32 [B, 2 n], log p of the continuations, whose last `tokens` and `rows` are, int64 [B, 2 n].
            ends: bool [B, 2 n], which of them end a hypothesis.
        """
        ends[:, : self.beam] |= self.ignored
        if going is not None:
            best, tokens, ends, rows = (one.index_select(0, going) for one in (best, tokens, ends, rows))
            self.lengths = self.lengths.index_select(0, going)
        order, chosen = (self.ranks + ends * len(self.ranks)).topk(self.beam, dim=1, largest=False)
        self.ignored = order >= len(self.ranks)
        kept = rows.gather(1, chosen).flatten()
        self.tokens, self.scores = self.tokens.index_select(0, kept), self.scores.index_select(0, kept)
        self.tokens[:, step + 1] = tokens.gather(1, chosen).flatten()
        self.scores[:, step] = best.gather(1, chosen).flatten()
        if self.attention is not None:
            heard = self.attention[: step + 2].index_select(1, kept)
            self.attention = self.attention[:, : len(kept)]
            self.attention[: step + 2] = heard
        return kept


class WithoutText(NamedTuple):
    """Translates sentences of other text again, without the text memory and phrases.

    A translation is of other text if general text makes it likelier than the text by more than
    `--text-foreign` nats: a translation tells that better than its beginning, the model's own, or the source.
    Of several datastores, all that have a text must say so.
    """

    judges: list[tuple[RetrievalEnsemble, TextMemory]]  # the ensembles that have one
    generator: SequenceGenerator  # without them

    @classmethod
    def beside(cls, generator: SequenceGenerator) -> WithoutText | None:
        """Make it for a generator; None where its ensemble cannot tell other text."""
        members: Sequence[RetrievalEnsemble] = getattr(generator.model, "members", (generator.model,))
        texts = [(one, text) for one in members if (text := one.find(TextMemory)) is not None and text.judges]
        if not texts:
            return None
        other = copy.copy(generator)
        vars(other)["_modules"] = dict(vars(generator)["_modules"])
        other.model = generator.model.silencing(OF_TEXT, [one for one, _ in texts])
        other.without_text = None
        return cls(texts, other)

    def again(self, found: list[list[dict[str, Any]]], sample: dict[str, Any], *given: Any) -> None:
        """Put other translations in the places of those that are of other text, marked as `OTHER_TEXT`."""
        forced, device = self.generator.model.forced, sample["net_input"]["src_tokens"].device
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        best = [each[0]["tokens"][forced:] if each else nothing for each in found]
        other = torch.ones(len(found), dtype=torch.bool, device=device)
        for ensemble, text in self.judges:
            other &= text.at(ensemble.snapshot()).foreignness(best) > text.settings.foreign
        if not len(rows := other.nonzero().squeeze(1)):
            return
        some = {name: _rows_of(x, rows, len(found)) for name, x in sample["net_input"].items()}
        others = self.generator._generate(
            {"net_input": some}, *(_rows_of(one, rows, len(found)) for one in given)
        )
        for row, each in zip(rows.tolist(), others):
            found[row] = [{**one, OTHER_TEXT: True} for one in each]


def translated_by(
    generator: SequenceGenerator, found: list[list[dict[str, Any]]]
) -> list[tuple[RetrievalEnsemble, set[int]]]:
    """Return which ensembles made the translations of a batch, and which of its sentences."""
    others = {row for row, each in enumerate(found) if each and OTHER_TEXT in each[0]}
    made = [(generator.model, {*range(len(found))} - others)]
    return [*made, (generator.without_text.generator.model, others)] if others else made


def _rows_of(given: Any, rows: Tensor, sentences: int) -> Any:
    """Take some sentences of what a batch has for each; anything else stays."""
    if isinstance(given, Tensor) and len(given) == sentences:
        return given.index_select(0, rows)
    return [given[row] for row in rows.tolist()] if isinstance(given, Sequence) else given


class BeamGenerator(SequenceGenerator):
    """Generates what fairseq's generator does, but for rounding and the order of equal scores.

    Sampling, constraints, language models and other ensembles are left to fairseq.
    """

    without_text: WithoutText | None = None

    def _generate(
        self,
        sample: dict[str, Any],
        prefix_tokens: Tensor | None = None,
        constraints: Tensor | None = None,
        bos_token: int | None = None,
    ) -> list[list[dict[str, Tensor]]]:
        found = self._search(sample, prefix_tokens, constraints, bos_token)
        if self.without_text is not None:
            self.without_text.again(found, sample, prefix_tokens, constraints, bos_token)
        return found

    def _search(
        self,
        sample: dict[str, Any],
        prefix_tokens: Tensor | None,
        constraints: Tensor | None,
        bos_token: int | None,
    ) -> list[list[dict[str, Tensor]]]:
        net_input, found = sample["net_input"], []
        ours = isinstance(self.model, RetrievalEnsemble) and "src_tokens" in net_input
        plain = type(self.search) is BeamSearch and constraints is None and self.lm_model is None
        if not (ours and plain):
            found = super()._generate(sample, prefix_tokens, constraints, bos_token)
            return found
        sources, lengths = net_input["src_tokens"], net_input.get("src_lengths")
        if lengths is None:
            lengths = (sources.ne(self.eos) & sources.ne(self.pad)).sum(dim=1)
        most = min(int(self.max_len_a * sources.size(1) + self.max_len_b), self.max_len - 1)
        most = int(lengths.max()) if self.match_source_len else most
        assert self.min_len <= most, "min_len cannot be larger than max_len, please adjust these!"
        first = self.eos if bos_token is None else bos_token
        beams = Beams(first, self.pad, most, self.beam_size, lengths)
        found = self._grow(beams, net_input, prefix_tokens)
        if not all(found):
            raise ConfigurationError(
                "no translation of a sentence ends: the model's output is not a number (try --precision fp32), "
                "or a memory rules out the end of the sentence"
            )
        return [sorted(each, key=lambda one: float(one["score"]), reverse=True) for each in found]

    def _grow(
        self, beams: Beams, net_input: dict[str, Any], prefix: Tensor | None
    ) -> list[list[dict[str, Tensor]]]:
        """Search; returns the hypotheses of each sentence as they ended."""
        model, beam, most, sentences = self.model, beams.beam, beams.most, len(beams.lengths)
        states: list[dict[str, Any]] = [{} for _ in model.models]
        rows = torch.arange(sentences, device=beams.tokens.device).repeat_interleave(beam)
        encoded = model.reorder_encoder_out(model.forward_encoder(net_input), rows)
        found: list[list[dict[str, Tensor]]] = [[] for _ in range(sentences)]
        finished = [False] * sentences
        for step in range(most + 1):  # one more for the end
            said, attention = model.step(beams.tokens[:, : step + 1], encoded, states, self.temperature)
            beams.hear(step, attention)
            said = self._allowed(said, beams, step, prefix)
            best, tokens, parents = best_continuations(said, beams.so_far(step), 2 * beam)
            rows = parents + beam * torch.arange(len(parents), device=parents.device).unsqueeze(1)
            ends = tokens.eq(self.eos) & best.ne(-math.inf)
            ended = ends[:, :beam] & ~beams.ignored
            done: list[int] = []
            if ended.any():
                places, scores = rows[:, :beam][ended], best[:, :beam][ended]
                heard = beams.attention.permute(1, 2, 0) if beams.attention is not None else None
                done = self.finalize_hypos(
                    step,
                    places,
                    scores,
                    beams.tokens,
                    beams.scores,
                    found,
                    finished,
                    beam,
                    heard,
                    beams.lengths,
                    most,
                )
            if len(done) == len(best) or step == most:
                break
            going = None
            if done:
                left = torch.ones(len(best), dtype=torch.bool)
                left[done] = False
                going = left.nonzero().squeeze(1).to(rows.device)
                prefix = prefix.index_select(0, going) if prefix is not None else None
            kept = beams.keep(step, going, best, tokens, ends, rows)
            model.reorder_incremental_state(states, kept)
            encoded = model.reorder_encoder_out(encoded, kept)
        return found

    def _allowed(self, model: Distribution, beams: Beams, step: int, prefix: Tensor | None) -> Distribution:
        """Rule out, in place, what may not be written at a step, and where there is a prefix, all but that."""
        log_probs, prefixed = model.log_probs, prefix is not None and step < min(prefix.size(1), beams.most)
        log_probs[:, self.pad] = -math.inf
        if self.unk_penalty:
            log_probs[:, self.unk] -= self.unk_penalty
        if step >= beams.most:
            log_probs[:, : self.eos] = log_probs[:, self.eos + 1 :] = -math.inf
        if prefixed:
            log_probs, beams.tokens, beams.scores = self._prefix_tokens(
                step, log_probs, beams.scores, beams.tokens, prefix, beams.beam
            )
        elif step < self.min_len:
            log_probs[:, self.eos] = -math.inf
        suppressed = self.token_indices_to_suppress if not prefixed else None
        if suppressed is not None:
            log_probs[:, suppressed] = -math.inf
        if self.repeat_ngram_blocker is not None:
            sentences = len(beams.lengths)
            log_probs = self.repeat_ngram_blocker(beams.tokens, log_probs, sentences, beams.beam, step)
        few = not prefixed and step < beams.most and suppressed is None and self.repeat_ngram_blocker is None
        return model.again({self.pad, self.unk, self.eos}) if few else Distribution(log_probs)


class AlignedBeamGenerator(SequenceGeneratorWithAlignment, BeamGenerator):
    """The same with `--print-alignment`."""


def best_continuations(model: Distribution, so_far: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the best continuations of each sentence: log p, tokens and hypotheses, [B, count] each, best first.

    The best lie in the runs whose own best are best, and adding a hypothesis's score to all of a run leaves
    their order. So nothing as wide as the vocabulary is added up or sorted. A run with what is no number counts as
    -inf.

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
