"""What CCPR is trained on: phrases drawn from sentences and from other contexts, in batches."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
import torch
from fairseq.tasks import FairseqTask

from fairseq_ccpr.phrases.pair_store import PhrasePairs
from fairseq_ccpr.text.subwords import subword_bounds
from fairseq_ccpr.text.tokenizers import load_tokenizer
from fairseq_ccpr.text.words import word_spans
from fairseq_ccpr.training.contrast_dataset import Occurrences
from fairseq_ccpr.training.length_batches import LengthBatches, Mixture
from fairseq_ccpr.training.phrase_contrast import PhraseContrastConfig, PhraseContrastTask
from tests.small_models import Ccpr


def test_phrases_are_drawn_again_each_epoch(ccpr: Ccpr) -> None:
    dataset = ccpr.dataset(phrases_per_sentence=3)
    again = ccpr.dataset(phrases_per_sentence=3)
    first = [dataset[i] for i in range(20)]
    dataset.set_epoch(2)
    assert [dataset[i] for i in range(20)] != first == [again[i] for i in range(20)]
    again.set_epoch(2)
    assert [dataset[i] for i in range(20)] == [again[i] for i in range(20)]
    assert [ccpr.dataset(phrases_per_sentence=3, seed=2)[i] for i in range(20)] != first
    assert all(1 <= len(example[0].spans) <= 3 for example in first)


@pytest.mark.parametrize("mixed", [False, True])
def test_equal_lengths_come_in_another_order_each_epoch(ccpr: Ccpr, mixed: bool) -> None:
    def make() -> LengthBatches:
        sets = [ccpr.dataset(split) for split in ("train", "valid")]
        return Mixture(sets) if mixed else sets[0]

    dataset, again = make(), make()
    first = dataset.ordered_indices()
    assert np.array_equal(first, again.ordered_indices())
    dataset.set_epoch(2)
    second = dataset.ordered_indices()
    again.set_epoch(2)
    assert np.array_equal(second, again.ordered_indices())
    assert [dataset[i] for i in range(9)] == [again[i] for i in range(9)] != [make()[i] for i in range(9)]
    sizes = np.array([dataset.size(i) for i in range(len(dataset))])
    for order in (first, second):
        assert sorted(order) == list(range(len(dataset))) and (np.diff(sizes[order]) >= 0).all()
        equal = np.diff(sizes[order]) == 0
        assert equal.sum() > 50 and 0.3 < (np.diff(order)[equal] > 0).mean() < 0.7  # as often back as forth
    assert np.array_equal(sizes[first], sizes[second]) and (first != second).mean() > 0.5


def test_workers_follow_the_epoch(ccpr: Ccpr) -> None:
    dataset, same = (ccpr.dataset(phrases_per_sentence=2) for _ in range(2))
    task = FairseqTask(None)
    for epoch in (1, 2):
        batches = task.get_batch_iterator(dataset, max_sentences=16, num_workers=1, epoch=epoch)
        of_workers = [batch["source"]["strings"] for batch in batches.next_epoch_itr(shuffle=False)]
        same.set_epoch(epoch)
        whole = same.collater([same[i] for i in same.ordered_indices()])
        assert torch.equal(torch.cat(of_workers), whole["source"]["strings"])


def test_examples_hold_phrases_and_other_spans(ccpr: Ccpr) -> None:
    dataset = ccpr.dataset()
    pairs, others = dataset.pairs, 0
    for index in range(len(dataset)):
        number = int(dataset.sentences[index])
        sides = dataset[index]
        phrases = [{tuple(row) for row in pairs.pairs_of(number)[:, c : c + 2].tolist()} for c in (1, 3)]
        for text, side, of_side in zip(pairs.sentence(number), sides, phrases, strict=True):
            assert side.subwords.text == text
            words = word_spans(text)
            all_spans = {(a, b) for i, (a, _) in enumerate(words) for _, b in words[i : i + 4]}
            bounds = {span: subword_bounds(side.subwords, *span) for span in all_spans}
            drawn = [{span for span in of_side if bounds[span] == ends} for ends in side.spans]
            assert all(
                string in {text[a:b] for a, b in spans}
                for string, spans in zip(side.strings, drawn, strict=True)
            )
            assert set(side.others) <= {bounds[span] for span in all_spans - of_side}
            assert not set(side.others) & {bounds[span] for span in of_side}
            assert len(set(side.others)) == len(side.others) <= len(side.spans)
            others += len(side.others)
        assert len({len(side.spans) for side in sides}) == 1
    assert others > 0.9 * sum(2 * len(dataset[i][0].spans) for i in range(len(dataset)))


def test_batches_number_sentences_and_pad(ccpr: Ccpr) -> None:
    dataset = ccpr.dataset()
    samples = [dataset[i] for i in (3, 0, 7)]
    batch = dataset.collater(samples)
    for side, name in enumerate(("source", "target")):
        of_side, sides = batch[name], [sample[side] for sample in samples]
        assert of_side["tokens"].shape == (3, max(len(s.subwords.ids) for s in sides))
        expected = [[n, *span] for n, s in enumerate(sides) for span in s.spans]
        assert of_side["spans"].tolist() == expected
        assert of_side["others"].tolist() == [[n, *span] for n, s in enumerate(sides) for span in s.others]
        texts = [s.subwords.text for s in sides for _ in s.spans]
        strings = [string for s in sides for string in s.strings]
        for of_text, column in ((strings, "strings"), (texts, "contexts")):
            equal = [[a == b for b in of_text] for a in of_text]
            numbers = of_side[column]
            assert (numbers[:, None] == numbers).tolist() == equal
    assert batch["phrases"] == len(batch["source"]["spans"]) and batch["nsentences"] == 3
    assert dataset.collater([]) == dataset.collater([None]) == {}


def test_long_sentences_are_left_out_and_counted(ccpr: Ccpr) -> None:
    tokenizer, pairs = load_tokenizer(ccpr.context), PhrasePairs(ccpr.phrases / "valid")
    lengths = [
        max(len(tokenizer.encode(text).ids) for text in pairs.sentence(i)) for i in range(pairs.sentences)
    ]
    with_pairs = [i for i in range(pairs.sentences) if len(pairs.pairs_of(i))]
    dataset = ccpr.dataset(max_subwords=50)
    assert dataset.sentences.tolist() == [i for i in with_pairs if lengths[i] <= 50]
    assert dataset.left_out == sum(lengths[i] > 50 for i in with_pairs) > 0
    order = dataset.ordered_indices()
    assert sorted(order) == list(range(len(dataset))) and (np.diff(dataset.sizes[order]) >= 0).all()


def other_contexts(pairs: PhrasePairs) -> dict[int, set[int]]:
    """For each row the rows of the same strings in other target sentences, by comparing all."""
    groups = defaultdict(list)
    for row, (number, a, b, c, d) in enumerate(pairs.pairs.tolist()):
        source, target = pairs.sentence(number)
        groups[source[a:b], target[c:d]].append((row, target))
    return {
        row: {other for other, elsewhere in rows if elsewhere != target}
        for rows in groups.values()
        for row, target in rows
    }


def test_occurrences_are_those_in_other_sentences(ccpr: Ccpr) -> None:
    pairs, rng = PhrasePairs(ccpr.phrases / "train"), np.random.default_rng(1)
    occurrences, wanted = Occurrences(pairs), other_contexts(pairs)
    assert sum(map(bool, wanted.values())) > 100
    for row, others in wanted.items():
        drawn = set(occurrences.draw(np.array([row] * 64), rng).tolist())
        assert drawn <= (others or {row})
        assert len(drawn) == max(1, len(others)) or len(others) > 4
    everything = np.arange(pairs.size)
    assert all(
        drawn in (wanted[row] or {row})
        for row, drawn in enumerate(occurrences.draw(everything, rng).tolist())
    )


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_targets_come_from_other_contexts(ccpr: Ccpr, fraction: float) -> None:
    dataset = ccpr.dataset("train", different_context_fraction=fraction, max_subwords=1000)
    wanted = {
        tuple(dataset.pairs.pairs[row].tolist()): {
            dataset.pairs.sentence(dataset.pairs.pairs[o, 0])[1] for o in others
        }
        for row, others in other_contexts(dataset.pairs).items()
    }
    elsewhere = able = 0
    for index in range(100):
        number = int(dataset.sentences[index])
        source, target = dataset.pairs.sentence(number)
        of_sentence = {}
        for key in map(tuple, dataset.pairs.pairs_of(number).tolist()):
            _, a, b, c, d = key
            of_sentence.setdefault((source[a:b], target[c:d]), set()).update(wanted[key])
        example = dataset[index]
        assert example[0].subwords.text == source
        others = [(string, side.subwords.text) for side in example[1:] for string in side.strings]
        for string, (other, text) in zip(example[0].strings, others, strict=True):
            able += bool(of_sentence[string, other])
            elsewhere += text != target
            assert text in {target} | of_sentence[string, other]
        texts = [side.subwords.text for side in example[1:]]
        assert len(set(texts)) == len(texts) == len({text for _, text in others})
    assert able > 30
    assert (
        elsewhere == 0
        if fraction == 0
        else elsewhere == able
        if fraction == 1
        else 0.3 < elsewhere / able < 0.7
    )


@pytest.mark.full
@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_batches_are_as_large_as_asked_for_on_either_side(ccpr: Ccpr, fraction: float) -> None:
    most, sides = 900, ("source", "target")
    dataset = ccpr.dataset("train", different_context_fraction=fraction)
    largest = []
    for epoch in (1, 2):
        dataset.set_epoch(epoch)
        batches = dataset.batch_by_size(dataset.ordered_indices(), max_tokens=most)
        assert np.array_equal(np.concatenate(batches), dataset.ordered_indices())
        tables = [dataset.collater([dataset[i] for i in batch]) for batch in batches]
        for batch, table in zip(batches, tables, strict=True):
            shapes = np.array([table[side]["tokens"].shape for side in sides])
            assert len(batch) == shapes[0, 0] == table["nsentences"]  # each source sentence once
            assert np.array_equal(shapes[:, 0], dataset.counts[batch].sum(axis=0))
            assert np.array_equal(shapes[:, 1], dataset.lengths[batch].max(axis=0))
            largest.append(shapes.prod(axis=1).max())
        for batch, following in itertools.pairwise(batches):
            table = dataset.collater([dataset[i] for i in (*batch, following[0])])
            # there was no room for another
            assert max(table[side]["tokens"].numel() for side in sides) > most
    assert max(largest) <= most and np.mean(largest) > 0.8 * most
    assert (dataset.counts[:, 1].max() > 1) == (fraction > 0)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_fairseq_makes_batches_of_a_mixture(ccpr: Ccpr, fraction: float) -> None:
    sets = [ccpr.dataset(split, different_context_fraction=fraction) for split in ("train", "valid")]
    mixture, task = Mixture(sets), FairseqTask(None)
    # the trainer gives both
    limits = {"max_tokens": 300, "max_positions": 300, "ignore_invalid_inputs": True}
    for epoch in (1, 2):
        batches = task.get_batch_iterator(mixture, epoch=epoch, required_batch_size_multiple=4, **limits)
        assert all(one.epoch == epoch for one in sets)
        taken = np.concatenate(batches.frozen_batches)
        tokens = [mixture.num_tokens(i) for i in range(len(mixture))]
        assert sorted(taken) == [i for i, count in enumerate(tokens) if count <= 300]
        assert (len(taken) == len(mixture)) == (fraction == 0)
        assert all(len(batch) < 4 or len(batch) % 4 == 0 for batch in batches.frozen_batches)
        assert max(map(len, batches.frozen_batches)) >= 8
        for batch in batches.next_epoch_itr():
            assert max(batch[side]["tokens"].numel() for side in ("source", "target")) <= 300
    few = mixture.batch_by_size(mixture.ordered_indices(), max_tokens=9999, max_sentences=7)
    assert {len(batch) for batch in few[:-1]} == {7} and sum(map(len, few)) == len(mixture)
    alone = mixture.batch_by_size(mixture.ordered_indices(), max_tokens=10)
    assert len(alone) == len(mixture)


def test_validation_is_the_same_however_many_phrases_are_drawn_for_training(ccpr: Ccpr) -> None:
    """So that accuracies of encoders that were trained on more or fewer can be compared."""

    def drawn(split: str, phrases_per_sentence: int, fraction: float) -> list[list[int]]:
        cfg = PhraseContrastConfig(
            data=str(ccpr.phrases), phrases_per_sentence=phrases_per_sentence, different_context_fraction=fraction,
            seed=1, cpu=True, encoder=str(ccpr.context),
        )  # fmt: skip
        task = PhraseContrastTask(cfg)
        task.load_dataset(split)
        dataset = task.dataset(split)
        return [part.tolist() for part in (dataset.sources, dataset.targets, dataset.starts)]

    few, many = ((1, 1.0), (20, 0.0))
    assert drawn("valid", *few) == drawn("valid", *many)
    assert drawn("train", *few) != drawn("train", *many)
