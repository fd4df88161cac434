"""Progress bars move, count what users count, and stay out of files."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, suppress
from functools import partial
from pathlib import Path
from unittest.mock import patch

from tqdm import tqdm

import fairseq_ccpr
from fairseq_ccpr.cli import main
from fairseq_ccpr.storage.files import check_checksums, describe_files
from fairseq_ccpr.timing import progress_bar, progress_over
from tests.helpers import call
from tests.small_models import World, build_options


class Terminal(io.StringIO):
    """A terminal, as far as a program can tell."""

    def isatty(self) -> bool:
        return True


def bars(do: Callable[[], object]) -> str:
    """What a terminal is shown by bars that are drawn at each step."""
    with (
        redirect_stderr(shown := Terminal()),
        patch("fairseq_ccpr.timing.tqdm", partial(tqdm, mininterval=0)),
    ):
        do()
    return shown.getvalue()


def steps(shown: str, what: str) -> list[int]:
    """The percentages of a bar, each once."""
    return list(dict.fromkeys(int(step) for step in re.findall(rf"{what}:\s*(\d+)%", shown)))


def built(world: World, output: Path, *words: object) -> list[object]:
    return [*(word for word in build_options(world, output) if word != "--quiet"), *words]


def in_terminal(command: str, *words: object) -> str:
    def run() -> None:
        with patch.object(sys, "argv", ["fairseq-ccpr", command, *map(str, words)]), suppress(SystemExit):
            main()

    return bars(run)


def one_chunk(write: Callable, results: Iterable[object]) -> Iterator[object]:
    """`write_behind` of a process that is stopped after its first chunk."""
    yield write(next(iter(results)))
    raise KeyboardInterrupt


def test_building_counts_tokens_within_a_chunk_and_resumes_where_it_was(world: World, tmp_path: Path) -> None:
    words = built(world, tmp_path / "store", "--max-tokens", 300, "--chunk-tokens", 2000)
    with patch("fairseq_ccpr.building.part.write_behind", one_chunk):
        begun = steps(in_terminal("build", *words), "force decoding")
    assert begun[0] == 0 and len(begun) > 3
    shown = in_terminal("build", *words)
    resumed = steps(shown, "force decoding")
    assert resumed[0] >= begun[-1] > 0 and resumed[-1] == 100 and len(resumed) > 3
    assert "token/s" in shown and re.search(r"\d\d:\d\d<\d\d:\d\d", shown)


def test_files_get_no_bars(world: World, tmp_path: Path) -> None:
    for words in (built(world, tmp_path / "store"), [*built(world, tmp_path / "other"), "--quiet"]):
        done = call("build", *words)
        assert "%|" not in done.stderr and "token/s" not in done.stderr
    assert "%|" not in in_terminal("build", *built(world, tmp_path / "third"), "--quiet")


def test_bars_are_made_in_one_place() -> None:
    package = Path(fairseq_ccpr.__file__).parent
    assert [
        path.name for path in package.rglob("*.py") if re.search(r"\bt(qdm|range)\(", path.read_text())
    ] == ["timing.py"]


def test_items_count_as_many_units_as_they_have() -> None:
    read = lambda: list(progress_over([[0] * 3, [1] * 7], "reading", "token", len))  # noqa: E731
    assert steps(bars(read), "reading") == [0, 30, 100]


def test_verification_of_large_files_has_a_bar(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(9 << 20))
    files = describe_files(tmp_path, ["file"])
    assert not bars(lambda: check_checksums(tmp_path, files)), "it takes less than a second"
    at_once = patch(
        "fairseq_ccpr.storage.files.progress_bar",
        lambda *words, delay, **others: progress_bar(*words, **others),
    )
    with at_once:
        assert len(steps(bars(lambda: check_checksums(tmp_path, files)), "checksums")) > 2
