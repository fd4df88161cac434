"""Vectors of all phrases of a lexicon's side, from any number of example sentences, and retrieval by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor

from fairseq_ccpr.lab.xpr.lexicon import PhraseTypes, as_tables, stored_examples
from fairseq_ccpr.text.subwords import SubwordTokenizer
from fairseq_ccpr.timing import progress_bar

BLOCK = 256  # phrases at a time
TIE = 1e-6  # vectors have length 1: scores that differ by less are equal
Encode = Callable[[Tensor, Tensor], Tensor]


@torch.inference_mode()
def type_means(
    encode: Encode,
    tokenizer: SubwordTokenizer,
    types: PhraseTypes,
    counts: Sequence[int],
    max_subwords: int,
    device: torch.device,
    show: bool = False,
) -> Tensor:
    """Average the vectors of the first m example sentences of each phrase, for C numbers m; 0 is the phrase alone.

    Args:
        encode: tokens int64 [S, L] and spans int64 [S, 3] -> a vector of each span, of several kinds, fp32
            [J, S, d].

    Returns:
        fp32 [C, J, n, d], on the device.
    """
    sums: Tensor | None = None
    numbers = torch.zeros(len(counts), len(types), device=device)
    for most in sorted({0, max(counts)} if 0 in counts else {max(counts)}):
        rows = [row for row, count in enumerate(counts) if bool(count) == bool(most)]
        examples = stored_examples(tokenizer, types, most, max_subwords)
        with progress_bar(f"{most} sentences", "phrase", total=len(types), quiet=not show) as bar:
            while block := list(islice(examples, BLOCK)):
                for table in as_tables(
                    [one for phrase_examples in block for one in phrase_examples], tokenizer.pad
                ):
                    table = {name: tensor.to(device) for name, tensor in table.items()}
                    vectors = encode(table["tokens"], table["spans"])  # [J, S, d]
                    if sums is None:
                        sums = vectors.new_zeros(len(counts), len(vectors), len(types), vectors.size(2))
                    for row in rows:
                        among = table["places"] < max(1, counts[row])
                        sums[row].index_add_(1, table["phrases"][among], vectors[:, among])
                        numbers[row].index_add_(0, table["phrases"][among], among[among].float())
                bar.update(len(block))
    assert sums is not None, "phrases to encode"
    return sums / numbers[:, None, :, None]


@torch.inference_mode()
def find_translations(queries: Tensor, candidates: Tensor, pairs: Tensor) -> Tensor:
    """Check whether the nearest candidate of each query is one of its translations; a tie counts against it.

    Args:
        queries, candidates: [n, o] and [c, o], of length 1.
        pairs: int64 [P, 2], (query, candidate) that translate each other; each query is in at least one.
    """
    right = []
    for start in range(0, len(queries), BLOCK):
        scores = queries[start : start + BLOCK] @ candidates.T  # [b, c]
        rows = (pairs[:, 0] >= start) & (pairs[:, 0] < start + len(scores))
        gold = torch.zeros_like(scores, dtype=torch.bool)
        gold[pairs[rows, 0] - start, pairs[rows, 1]] = True
        best, other = (scores.masked_fill(mask, float("-inf")).amax(dim=1) for mask in (~gold, gold))
        right.append(best > other + TIE)
    return torch.cat(right)
