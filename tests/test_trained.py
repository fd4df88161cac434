"""What was trained is kept while what it does stays the same: a comment trains nothing again."""

from __future__ import annotations

import pytest

from tests.trained import code_of

TRAINING = '''
"""A module."""

def train(updates: int = 150) -> None:
    """Train."""
    for _ in range(updates):  # each a batch
        step()
'''


@pytest.mark.parametrize(
    "before, after",
    [
        ("# each a batch", "# of all sentences"),
        ("Train.", "Train a model."),
        ("A module.", "Two.\n\n"),
        ("\n\n", "\n\n\n"),
    ],
)
def test_comments_and_docstrings_are_no_code(before: str, after: str) -> None:
    assert code_of(TRAINING) == code_of(TRAINING.replace(before, after))


@pytest.mark.parametrize("before, after", [("150", "151"), ("step()", "step(1)"), ("def train", "def fit")])
def test_what_is_done_otherwise_is_other_code(before: str, after: str) -> None:
    assert code_of(TRAINING) != code_of(TRAINING.replace(before, after))
