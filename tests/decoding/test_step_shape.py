"""A step of plain kNN-MT is short, with the decoder: tokens alone, exact search, no guard, no trust, no likeness."""

from __future__ import annotations

from unittest.mock import patch

from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.text.pairs import tidy
from fairseq_ccpr.timing import phase
from tests.decoding.step_shape import shape_of, watched
from tests.decoding.test_beam_step import CPU, make_ensemble, two_steps

FUNCTIONS, FILES, DEPTH = 45, 9, 12  # eight of the model's own step, and its file


def test_a_step_calls_few_functions() -> None:
    ensemble = make_ensemble("l2", CPU)
    tokens = [memory for memory in ensemble.memories if isinstance(memory, TokenMemory)]
    ensemble = ensemble.with_memories(tokens, None)
    steps, shapes = two_steps(ensemble, CPU), []
    with patch.object(ensemble, "step", watched(ensemble.step, shapes)):
        list(steps)  # what is computed once is computed in the first
    print("own functions, files, depth:", *shapes[1].numbers)
    print(shapes[1])
    functions, files, depth = shapes[1].numbers
    assert functions <= FUNCTIONS and files <= FILES and depth <= DEPTH


def test_everything_own_is_counted() -> None:
    """A comprehension, a property and a mark of a phase are functions like others."""
    shape = shape_of(lambda: tidy("a  b"))
    assert shape.numbers[1:] == (1, 1) and "text/pairs.py:tidy" in str(shape)
    timer = shape_of(phase("merge")(lambda: None))
    assert timer.numbers == (2, 1, 1) and timer.files == {"timing.py"}
