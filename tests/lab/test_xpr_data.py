"""What XPR is trained on: examples of phrases, cut to size, in batches, and the vectors pooled of them."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from fairseq_ccpr.lab.xpr.lexicon_build import usable_examples
from fairseq_ccpr.lab.xpr.lexicon_store import Lexicon
from fairseq_ccpr.models.xpr_encoder import XprEncoder, pool
from fairseq_ccpr.text.subwords import subword_bounds
from fairseq_ccpr.text.tokenizers import load_tokenizer
from tests.lab.small_xpr import make_dataset
from tests.small_models import Xpr


def test_pooled_vectors_equal_a_plain_loop(xpr: Xpr) -> None:
    encoder, dataset = XprEncoder.load(xpr.checkpoint), make_dataset(xpr)
    batch = dataset.collater([dataset[i] for i in range(9)])
    with torch.no_grad():
        found, _ = encoder(batch["tables"], 18)
        pooled = pool(batch["tables"], 18, encoder.states)
    of_phrase = defaultdict(list)
    for table in batch["tables"]:
        for tokens, (_, first, last), phrase in zip(
            table["tokens"], table["spans"].tolist(), table["phrases"].tolist()
        ):
            tokens = tokens[tokens != encoder.context.tokenizer.pad]
            with torch.no_grad():
                states = encoder.context(tokens[None])[0].double()
            of_phrase[phrase].append(sum(states[at] for at in range(first, last + 1)) / (last + 1 - first))
    assert sorted(of_phrase) == list(range(18))
    for phrase, means in of_phrase.items():
        mean = (sum(means) / len(means)).float()
        torch.testing.assert_close(pooled[phrase], mean, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            vector = encoder.head(mean)
        torch.testing.assert_close(found[phrase], vector / vector.norm(), rtol=1e-4, atol=1e-5)


def test_examples_of_a_batch_have_their_phrases(xpr: Xpr) -> None:
    dataset = make_dataset(xpr, max_subwords=199)
    lexicon, drawn = dataset.lexicons[0], []
    for epoch in (1, 2, 1):
        dataset.set_epoch(epoch)
        drawn.append([])
        for index in range(0, len(dataset), 5):
            strings, examples, number = dataset[index]
            assert number == index
            for side, of_side in enumerate(examples):
                phrase = int(lexicon.pairs[index, side])
                assert strings[side] == lexicon.sides[side].phrases[phrase]
                texts = [one.subwords.text for one in of_side]
                assert len(set(texts)) == len(texts) == min(3, lexicon.sides[side].counts[phrase])
                for one in of_side:
                    start, end = one.subwords.starts[one.first], one.subwords.ends[one.last]
                    assert strings[side] in one.subwords.text[start : end + 1]
                drawn[-1].append(texts)
    assert drawn[0] == drawn[2] != drawn[1]
    orders = []
    for epoch in (1, 2):
        dataset.set_epoch(epoch)
        orders.append(dataset.ordered_indices().tolist())
    assert orders[0] != orders[1] and sorted(orders[0]) == list(range(len(dataset)))


@pytest.mark.parametrize(("sentences", "max_subwords"), [(0, 60), (3, 1)])
def test_without_a_sentence_the_phrase_stands_alone(xpr: Xpr, sentences: int, max_subwords: int) -> None:
    dataset = make_dataset(xpr, "train", sentences, max_subwords)
    strings, examples, _ = dataset[4]
    alone = [of_side for string, of_side in zip(strings, examples) if of_side[0].subwords.text == string]
    assert len(alone) == 2 or max_subwords == 1
    for (one,) in alone:
        assert (one.first, one.last) == (1, len(one.subwords.ids) - 2)


def test_a_cut_sentence_keeps_its_phrase(xpr: Xpr) -> None:
    """All that fits is used, wherever the phrase stands, and as much of the sentence as there is room for."""
    tokenizer, types = load_tokenizer(xpr.context), Lexicon(xpr.lexicon / "train").sides[0]
    end, moved = tokenizer.dictionary.eos(), 0
    for number in range(0, len(types), 7):
        text, start, stop = types.example(number, 0)
        whole = tokenizer.encode(text)
        if (bounds := subword_bounds(whole, start, stop)) is None:
            continue
        phrase = whole.ids[bounds[0] : bounds[1] + 1]
        for limit in (3, 5, 8, len(whole.ids), len(whole.ids) + 2):
            (one,) = usable_examples(tokenizer, 0, types.phrases[number], [(text, start, stop)], 1, limit)
            if len(phrase) > limit:
                assert one.subwords.text == types.phrases[number]
                continue
            ids = one.subwords.ids
            assert len(ids) - 2 == min(len(whole.ids) - 2, limit)
            assert ids[one.first : one.last + 1] == phrase
            inner = ids[1 : one.first] + phrase + ids[one.last + 1 : -1]
            at = bounds[0] - (one.first - 1)
            assert inner == whole.ids[at : at + len(inner)] and [ids[0], ids[-1]] == [whole.ids[0], end]
            before, after = one.first - 1, len(ids) - 2 - one.last
            assert abs(before - after) < 2 or at == 1 or at + len(inner) == len(whole.ids) - 1
            assert one.subwords.starts == sorted(one.subwords.starts) and len(one.subwords.ends) == len(ids)
            moved += at > 1
    assert moved > 3
