"""Which sentences occur almost verbatim in a text.

Where a corpus is split at random there are many such near-duplicates, and a system that copies gets them
right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from scipy.sparse import coo_matrix
from sklearn.feature_extraction.text import CountVectorizer

from fairseq_ccpr.text.words import has_letters, word_spans

NEAR = 0.7  # from this similarity on, a sentence is a near-duplicate
BLOCK = 256  # sentences compared at once; each block needs memory for its overlaps with the whole text


def highest_resemblance(sentences: Sequence[str], text: Sequence[str]) -> np.ndarray:
    """Compute the highest Jaccard similarity of each sentence to a line of a text, fp64 [len(sentences)]."""
    highest = np.zeros(len(sentences))
    for first, similarities in resemblances(sentences, text):
        np.maximum.at(highest, first + similarities.row, similarities.data)
    return highest


def resemblances(sentences: Sequence[str], text: Sequence[str]) -> Iterator[tuple[int, coo_matrix]]:
    """Compute the Jaccard similarities of sentences to the lines of a text, by blocks of sentences.

    Each comes with the number of its first sentence. That is |A & B| / |A | B| of the sets of words, without
    case and punctuation. What has no words resembles nothing.
    """
    if not sentences or not text:
        return
    counts = CountVectorizer(analyzer=compared_words, binary=True, dtype=np.int32).fit_transform(
        [*sentences, *text]
    )
    sizes = np.asarray(counts.sum(axis=1))[:, 0]
    ours, theirs = counts[: len(sentences)], counts[len(sentences) :].T
    for start in range(0, len(sentences), BLOCK):
        shared = (ours[start : start + BLOCK] @ theirs).tocoo()
        union = sizes[start + shared.row] + sizes[len(sentences) + shared.col] - shared.data
        yield start, coo_matrix((shared.data / union, (shared.row, shared.col)), shape=shared.shape)


def compared_words(sentence: str) -> list[str]:
    """Return the words of a sentence that are compared: casefolded, those of letters or figures."""
    words = (sentence[start:end].casefold() for start, end in word_spans(sentence))
    return [word for word in words if has_letters(word) or word.isnumeric()]
