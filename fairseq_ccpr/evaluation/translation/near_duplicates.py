"""Near-duplicates: which sentences of a test set stand, nearly as they are, in a training text.

Where a corpus is split at random there are many, and a system that copies gets them right.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.feature_extraction.text import CountVectorizer

from fairseq_ccpr.text.words import has_letters, word_spans

NEAR = 0.7  # from this similarity on, a sentence is a near-duplicate
BLOCK = 256  # sentences compared at once; each block needs memory for its overlaps with the whole text


def highest_resemblance(sentences: Sequence[str], text: Sequence[str]) -> np.ndarray:
    """Compute the highest Jaccard similarity of each sentence to a line of a text, fp64 [len(sentences)].

    The similarity of two sentences is |A & B| / |A | B|, with A and B their sets of words, without case and punctuation. A
    sentence without words resembles nothing.

    >>> highest_resemblance(["Open the file.", "Close it!"], ["open the files", "open the file", ""]).tolist()
    [1.0, 0.0]
    """
    vectorizer = CountVectorizer(analyzer=_words, binary=True, dtype=np.int32)
    counts = vectorizer.fit_transform([*sentences, *text])
    ours, theirs = counts[: len(sentences)], counts[len(sentences) :]
    sizes = np.asarray(theirs.sum(axis=1))[:, 0]
    blocks = [_highest(ours[start : start + BLOCK], theirs, sizes) for start in range(0, len(sentences), BLOCK)]
    return np.concatenate([np.zeros(0), *blocks])


def _words(sentence: str) -> list[str]:
    words = (sentence[start:end].casefold() for start, end in word_spans(sentence))
    return [word for word in words if has_letters(word) or word.isnumeric()]


def _highest(ours: csr_matrix, theirs: csr_matrix, sizes: np.ndarray) -> np.ndarray:
    """Compute the highest similarity of rows [n, W] to other rows [N, W] of sizes [N]: fp64 [n]."""
    shared = (ours @ theirs.T).tocoo()
    own = np.asarray(ours.sum(axis=1))[:, 0]
    jaccard = shared.data / (own[shared.row] + sizes[shared.col] - shared.data)
    highest = np.zeros(ours.shape[0])
    np.maximum.at(highest, shared.row, jaccard)
    return highest
