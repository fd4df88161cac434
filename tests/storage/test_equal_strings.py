"""Equal strings: told by their hashes, found in text of any size."""

from __future__ import annotations

import random
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairseq_ccpr.storage import equal_strings
from fairseq_ccpr.storage.equal_strings import digest, digest_number, first_of_equals, hash_strings
from fairseq_ccpr.storage.text_lines import TextLines, write_lines


@given(st.lists(st.sampled_from(["", "a", "b", "ab", "ä", "longer"]), max_size=40), st.integers(1, 9))
def test_first_of_equals_is_what_a_dictionary_finds(tmp_path_factory, strings, block) -> None:
    firsts: dict[str, int] = {}
    wanted = [firsts.setdefault(string, number) for number, string in enumerate(strings)]
    with patch("fairseq_ccpr.storage.equal_strings.DIGESTED", block):
        assert first_of_equals(strings, tmp_path_factory.mktemp("repeats")).tolist() == wanted


LINES = st.lists(st.text(st.sampled_from("ab ä中😀\t\x85\u2028"), max_size=12), min_size=1, max_size=9)


@given(lines=LINES, block=st.sampled_from([1, 2, 1 << 14]), ordered=st.booleans(), seed=st.integers(0, 2**31))
def test_equal_strings_have_equal_hashes_and_others_do_not(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], block: int, ordered: bool, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    write_lines(folder / "text", folder / "offsets.npy", lines)
    spans = [
        (n, i, j)
        for n, line in enumerate(lines)
        for i in range(len(line))
        for j in range(i + 1, len(line) + 1)
    ]
    if not ordered:
        random.Random(seed).shuffle(spans)
    with patch.object(equal_strings, "HASHED", block):
        text = TextLines(folder / "text", folder / "offsets.npy", len(lines))
        hashes = hash_strings(np.array(spans, np.int32).reshape(-1, 3), text)
    strings = [lines[number][start:end] for number, start, end in spans]
    assert len({*zip(strings, hashes.tolist())}) == len({*strings}) == len({*hashes.tolist()})


def test_digests_are_what_they_were() -> None:
    """Seeded draws and samples depend on every bit of them."""
    assert digest("Haus am See").hex() == "5b38685d003ec0e4"
    assert digest_number("Haus am See") == -1963501266245502885
