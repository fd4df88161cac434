"""The shape of one decoding step: which functions of the package it calls, in which files, and how deep they nest."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import fairseq_ccpr

PACKAGE = Path(fairseq_ccpr.__file__).parent


@dataclass
class Shape:
    """What was called: every frame counts, also of a comprehension, a property, a generator and a mark of a phase."""

    functions: set[CodeType] = field(default_factory=set)
    depth: int = 0  # most own frames inside of one another

    @property
    def files(self) -> set[str]:
        return {Path(code.co_filename).relative_to(PACKAGE).as_posix() for code in self.functions}

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Own functions, their files, depth."""
        return len(self.functions), len(self.files), self.depth

    def __str__(self) -> str:
        names = sorted(
            f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_qualname}" for code in self.functions
        )
        return "\n".join(names)


def shape_of(step: Callable[[], Any]) -> Shape:
    """Watch a step."""
    shape, running = Shape(), 0
    prefix = f"{PACKAGE}/"

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal running
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(prefix):
            return
        running += 1 if event == "call" else -1
        shape.functions.add(frame.f_code)
        shape.depth = max(shape.depth, running)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        step()
    finally:
        sys.setprofile(before)
    return shape


def watched(step: Callable[..., Any], shapes: list[Shape]) -> Callable[..., Any]:
    """The step, which appends its shape each time."""

    def run(*args: Any) -> Any:
        made: list[Any] = []
        shapes.append(shape_of(lambda: made.append(step(*args))))
        return made[0]

    return run
