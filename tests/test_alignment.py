"""The attention of the model says which words of a translation stand for which of its source."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from fairseq_ccpr import Translator
from fairseq_ccpr.inference.alignment import Alignment, align, place_markup
from fairseq_ccpr.text.html import Page
from fairseq_ccpr.text.pairs import read_pairs
from tests.small_models import World


@pytest.fixture(scope="module")
def translator(world: World) -> Translator:
    return Translator(datastore=world.datastore, device="cpu", max_len_b=25)


def shares(one: Alignment) -> np.ndarray:
    """Of each word of the source."""
    edges = [0, *(n for n, character in enumerate(one.source) if character == " "), len(one.source)]
    return np.array([one.share(start, stop) for start, stop in pairwise(edges)])


def test_words_share_their_attention_among_the_source(translator: Translator, world: World) -> None:
    """The same whether sentences of several lengths are aligned together or alone."""
    sources = [source for source, _ in read_pairs(world.folder / "test.tsv")][:5]
    translations = list(translator.translate(["ja", *sources, sources[0][:30]]))
    together = align(translator, translations)
    for one, translation in zip(together, translations):
        assert (one.source, one.text) == (translation.source, translation.text)
        assert "".join(one.text[start:end] for start, end in one.words) == one.text.replace(" ", "")
        assert np.allclose(one.share(0, len(one.source)), 1, atol=1e-4)
        assert np.allclose(shares(one).sum(axis=0), 1, atol=1e-4)
        (alone,) = align(translator, [translation])
        assert alone.words == one.words and np.allclose(shares(alone), shares(one), atol=1e-3)
    assert align(translator, []) == []


def test_a_translation_without_words_keeps_its_markup() -> None:
    page = Page.of("Das <b>ist <i>so</i></b><img> gut")
    alignment = Alignment(page.sentences[0], "", [], lambda start, stop: [])
    assert page.join([place_markup(alignment, page.marks[0])]) == "<b><i></i></b><img>"
