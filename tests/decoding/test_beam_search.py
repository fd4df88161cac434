"""Beam search over an ensemble that retrieves, against fairseq's own, on Transformers of random weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.search import BeamSearch, DiverseBeamSearch, Sampling
from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment
from torch import Tensor

from fairseq_ccpr.decoding.beam_search import AlignedBeamGenerator, BeamGenerator, best_continuations
from fairseq_ccpr.decoding.ensemble import EncodedBatch, RetrievalEnsemble
from fairseq_ccpr.decoding.memory import Memory, MemoryBatch, Snapshot, Step
from fairseq_ccpr.decoding.mixture import RUN, Distribution, Vote
from fairseq_ccpr.decoding.options import MixtureSettings
from fairseq_ccpr.device import BF16, FP32
from tests.decoding.test_beam_step import CPU, make_ensemble
from tests.models.test_step_decoder import KINDS, OTHERS
from tests.random_transformers import WORDS, dictionary_of, sources, transformer

LENGTHS, MOST = [14, 2, 9, 3, 1, 6], 12
Found = list[list[dict[str, Tensor]]]


def alone(*models: Any) -> RetrievalEnsemble:
    return RetrievalEnsemble(list(models), [], 1, MixtureSettings())


def assert_same(found: Found, wanted: Found, tolerance: float = 1e-5) -> None:
    """All hypotheses of all sentences, with everything that fairseq tells of them."""
    assert [len(each) for each in found] == [len(each) for each in wanted]
    for one, two in ((one, two) for each in zip(found, wanted, strict=True) for one, two in zip(*each)):
        assert one.keys() == two.keys() and torch.equal(one["tokens"], two["tokens"])
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


def generated(
    kind: Callable[..., SequenceGenerator],
    models: Any,
    words: int = WORDS,
    given: Any = None,
    **settings: Any,
) -> Found:
    """Translate sources of very different lengths; `prefix`, `bos` and `ngrams` are what a caller may add."""
    prefix, bos, ngrams = (settings.pop(name, None) for name in ("prefix", "bos", "ngrams"))
    generator = kind(models, dictionary_of(words), **{"beam_size": 3, "max_len_b": MOST, **settings})
    if ngrams:
        block = NGramRepeatBlock(ngrams)
        generator.repeat_ngram_blocker = lambda tokens, scores, sentences, beam, step: block(
            tokens[:, : step + 1], scores, sentences, beam, step
        )  # as on a GPU: on a CPU fairseq compares with the padding after a hypothesis
    return generator.generate([], {"net_input": given}, prefix_tokens=prefix, bos_token=bos)


@torch.no_grad()
def compare(models: list[Any], words: int = WORDS, lengths: list[int] = LENGTHS, **settings: Any) -> Found:
    given = sources(lengths, words)
    wanted = generated(SequenceGenerator, models, words, given, **settings)
    found = generated(BeamGenerator, alone(*models), words, given, **settings)
    if (prefix := settings.get("prefix")) is not None:
        # where it ends, fairseq copies the first hypothesis over the others, but not its attention
        for row in prefix.eq(2).any(dim=1).nonzero().flatten().tolist():
            for one in (*found[row], *wanted[row]):
                del one["attention"]
    assert_same(found, wanted)
    return found


@pytest.mark.parametrize("beam", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 2])
def test_it_finds_what_fairseq_finds(count: int, beam: int) -> None:
    texts = [compare([transformer() for _ in range(count)], beam_size=beam) for _ in range(3)]
    # sentences left before others
    assert any(len({max(len(one["tokens"]) for one in each) for each in found}) > 1 for found in texts)


PREFIX = torch.tensor([[5, 6, 7], [8, 1, 1], [1, 1, 1], [9, 2, 1], [148, 4, 2], [4, 1, 1]])
SETTINGS: dict[str, dict[str, Any]] = {
    "at least six": {"min_len": 6},
    "very short": {"max_len_b": 1, "min_len": 1},
    "by the source's length": {"max_len_a": 0.4, "max_len_b": 2},
    "as long as the source": {"match_source_len": True},
    "few unknown": {"unk_penalty": 4.0},
    "many unknown": {"unk_penalty": -6.0},
    "no penalty of length": {"len_penalty": 0.0},
    "long": {"len_penalty": 1.2},
    "not normalised": {"normalize_scores": False},
    "hot": {"temperature": 1.3},
    "prefix": {"prefix": PREFIX},
    "prefix as long as all": {"prefix": PREFIX, "max_len_b": 3},
    "prefix of what is suppressed": {"prefix": PREFIX, "tokens_to_suppress": ("w1", "w2", "w20")},
    "suppressed": {"tokens_to_suppress": ("w1", *(f"w{number}" for number in range(50, 140)))},
    "nothing twice": {"ngrams": 2},
    "from a tag": {"bos": 77},
    "a single sentence": {"lengths": [5]},
}  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_all_settings_are_kept(settings: dict[str, Any]) -> None:
    compare([transformer()], **settings)


@pytest.mark.parametrize("kind", ["pre-norm", "widths of their own", "marian", "bart", "adaptive softmax"])
def test_any_decoder_is_searched_with(kind: str) -> None:
    """Also with one that fairseq goes on computing, and with both kinds together."""
    model = {**KINDS, **OTHERS}[kind]()
    compare([model])
    compare([model, transformer()], beam_size=2)


@pytest.mark.parametrize("words", [8, RUN - 1, 2 * RUN, 2 * RUN + 1])
def test_a_vocabulary_has_any_size(words: int) -> None:
    compare([transformer(words)], words)


@pytest.mark.parametrize("kind", ["soft", "hard"])
@torch.no_grad()
def test_alignments_are_those_of_fairseq(kind: str) -> None:
    model, given = transformer(), sources(LENGTHS)
    wanted = generated(partial(SequenceGeneratorWithAlignment, print_alignment=kind), [model], given=given)

    def ours(ensemble: RetrievalEnsemble, dictionary: Any, **settings: Any) -> AlignedBeamGenerator:
        generator = AlignedBeamGenerator([model], dictionary, print_alignment=kind, **settings)
        generator.model = ensemble
        return generator

    found = generated(ours, alone(model), given=given)
    for one, two in zip((one for each in found for one in each), (two for each in wanted for two in each)):
        pairs = ([[float(x) for x in row] for row in each.pop("alignment")] for each in (one, two))
        torch.testing.assert_close(*map(torch.tensor, pairs), rtol=0, atol=1e-5)
    assert_same(found, wanted)


def test_what_is_no_number_is_never_chosen() -> None:
    """At each step but the first one hypothesis has no distribution."""
    model, steps = transformer(), []

    def spoil(module: Any, inputs: tuple[Tensor]) -> None:
        steps.append(len(inputs[0]))
        if steps[-1:] != steps[:1] or len(steps) > 1:
            inputs[0][0] = math.nan

    given = sources(LENGTHS)
    found = []
    for kind, ensemble in ((SequenceGenerator, [model]), (BeamGenerator, alone(model))):
        steps.clear()
        hook = model.decoder.output_projection.register_forward_pre_hook(spoil)
        with torch.no_grad():
            found.append(generated(kind, ensemble, given=given))
        hook.remove()
    assert_same(*found)
    assert all(one["positional_scores"].isfinite().all() for each in found[1] for one in each)


SEARCHES: dict[str, Callable[[Any], Any]] = {
    "beam": BeamSearch,
    "sampling": partial(Sampling, sampling_topk=4),
    "diverse": partial(DiverseBeamSearch, num_groups=2, diversity_strength=0.5),
}


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("metric", ["l2", "ip"])
@torch.no_grad()
def test_memories_act_in_every_search(metric: str, search: str) -> None:
    """As in fairseq's loop over the same ensemble, which searches other than the beam's go on with."""
    ensemble, given = make_ensemble(metric, CPU), sources([4, 3], 7)
    found = []
    for kind, models in (
        (SequenceGenerator, ensemble),
        (BeamGenerator, ensemble),
        (BeamGenerator, ensemble.with_memories([], None)),
    ):
        torch.manual_seed(5)
        strategy = SEARCHES[search](dictionary_of(7))
        found.append(generated(kind, models, 7, given, search_strategy=strategy, beam_size=4))
    assert_same(found[1], found[0], 1e-5 if search == "beam" else 0)
    assert str(found[2]) != str(found[1])


class Told(Memory, MemoryBatch):
    """Votes for some tokens, or favours them, by the last token alone."""

    name = "told"

    def __init__(self, acts_on: str) -> None:
        self.acts_on = acts_on  # type: ignore[misc, assignment]

    def begin(self, sources: Tensor, snapshot: Snapshot) -> MemoryBatch:
        return self

    def signature(self) -> str:
        return self.name

    def vote(self, step: Step) -> Vote:
        last = step.tokens[:, -1]
        values = (last.unsqueeze(1) * 7 + torch.arange(40) * 3) % step.model.log_probs.size(1)
        return Vote(values, values.sin().log_softmax(dim=1), 0.2 + 0.1 * (last % 8))

    def rescore(self, step: Step) -> Tensor | None:
        if step.tokens.size(1) % 3 == 0:
            return None
        return step.model.log_probs.scatter_add_(1, self.vote(step).values, torch.ones(len(step.tokens), 40))


@pytest.mark.parametrize("acts", ["vote", "model", "mixture", "vote vote", "model vote mixture"])
@pytest.mark.parametrize("words", [WORDS, 3000])
@torch.no_grad()
def test_what_memories_change_is_among_the_best(acts: str, words: int) -> None:
    given = sources(LENGTHS, words)
    ensemble = RetrievalEnsemble(
        [transformer(words)], [Told(place) for place in acts.split()], 1, MixtureSettings()
    )
    assert_same(*(generated(kind, ensemble, words, given) for kind in (BeamGenerator, SequenceGenerator)))


@pytest.mark.parametrize("precision", [FP32, BF16])
@torch.no_grad()
def test_memories_without_weight_leave_the_model_alone_to_the_bit(precision: str) -> None:
    ensemble, given = make_ensemble("l2", CPU), sources([4, 3], 7)
    ensemble.precision = precision
    loud: list[Any] = list(ensemble.memories)
    memories = [replace(memory, settings=replace(memory.settings, lambda_=0.0)) for memory in loud]
    silent, plain = ensemble.with_memories(memories, None), ensemble.with_memories([], None)
    found = [generated(BeamGenerator, one, 7, given, beam_size=4) for one in (silent, plain)]
    assert_same(*found, tolerance=0)
    plain.precision = FP32
    exact = generated(BeamGenerator, plain, 7, given, beam_size=4)
    assert (str(exact) == str(found[1])) == (precision == FP32)


@pytest.mark.parametrize("words", [3, RUN, RUN + 1, 3 * RUN + 7, 5000])
@pytest.mark.parametrize("beam", [1, 2, 5])
@pytest.mark.parametrize("kind", ["plain", "level", "ended", "impossible", "first"])
def test_best_continuations_are_the_best_of_all(kind: str, beam: int, words: int) -> None:
    """Against sums in float64 of the whole vocabulary, sorted."""
    sentences, count = 4, 2 * beam
    log_probs = torch.randn(sentences * beam, words).log_softmax(dim=1)
    so_far = -7 * torch.rand(sentences, beam)
    if kind == "level":  # many are equal to others
        log_probs, so_far = -torch.randint(1, 4, log_probs.shape).float(), so_far.round()
    elif kind == "ended":  # as at the last step
        log_probs[:, :2] = log_probs[:, 3:] = -math.inf
    elif kind == "impossible":
        log_probs[torch.rand(log_probs.shape) < 0.5] = -math.inf
        log_probs[:: beam + 1] = math.nan
    elif kind == "first":
        so_far[:, 1:] = -math.inf
    best, tokens, beams = best_continuations(Distribution(log_probs), so_far, count)
    sums = log_probs.view(sentences, beam, words).double() + so_far.double().unsqueeze(2)
    sums = sums.nan_to_num(-math.inf, neginf=-math.inf)
    wanted = sums.flatten(1).sort(dim=1, descending=True).values[:, :count]
    assert best.shape == tokens.shape == beams.shape == wanted.shape == (sentences, wanted.size(1))
    torch.testing.assert_close(best.double(), wanted, rtol=1e-6, atol=1e-6)
    possible = best > -math.inf
    told = sums[torch.arange(sentences).unsqueeze(1), beams, tokens]
    torch.testing.assert_close(best.double()[possible], told[possible], rtol=1e-6, atol=1e-6)
    for row, some in zip(beams * words + tokens, possible):
        assert len(row[some].unique()) == int(some.sum())
    assert int(tokens.max()) < words and int(beams.max()) < beam


@torch.no_grad()
def test_an_encoding_is_copied_only_where_sentences_have_ended() -> None:
    """Hypotheses share it otherwise, in our steps and in fairseq's."""
    given = sources([4, 4])
    ours, theirs = alone(transformer()), alone(transformer(adaptive_softmax_cutoff="40,90"))
    orders = [torch.tensor([0, 0, 1, 1]), torch.tensor([1, 0, 2, 2]), torch.tensor([3, 2])]
    encoded = [one.forward_encoder(given) for one in (ours, theirs)]
    begun = [one.reorder_encoder_out(each, orders[0]) for one, each in zip((ours, theirs), encoded)]
    keys = begun[0][0].sources[0][0]
    ours.forward_decoder(torch.full((4, 1), 2), begun[0], [{}])
    swapped = [one.reorder_encoder_out(each, orders[1]) for one, each in zip((ours, theirs), begun)]
    assert all(isinstance(one, EncodedBatch) for one in swapped)
    assert swapped[0][0].sources[0][0] is keys and len(keys) == 2
    whole = begun[1][0]["encoder_out"][0]
    assert swapped[1][0]["encoder_out"][0] is whole and whole.size(1) == 4
    rest = [one.reorder_encoder_out(each, orders[2]) for one, each in zip((ours, theirs), swapped)]
    assert torch.equal(rest[0][0].sources[0][0], keys[1:])
    assert torch.equal(rest[1][0]["encoder_out"][0], whole[:, 2:])
