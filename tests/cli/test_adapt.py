"""`fairseq-ccpr adapt`: held-out pairs do not leak, each step runs once, and bad input is refused in one sentence."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from pytest import Config

from fairseq_ccpr.building import adapter_build
from fairseq_ccpr.building.held_out import hold_out, rank_of_draw
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.text.resemblance import NEAR, highest_resemblance
from tests.helpers import begin, call, refused, write_lines
from tests.small_models import World

TOGETHER = ["-s", "de", "-t", "en", "--cpu", "--quiet"]


def test_nothing_like_what_is_held_out_is_left(pytestconfig: Config) -> None:
    rng = random.Random(pytestconfig.getoption("seed"))
    words = [f"w{i}" for i in range(30)]
    pairs = [(" ".join(rng.choices(words, k=7)), " ".join(rng.choices(words, k=7))) for _ in range(400)]
    pairs += [(f"{source.upper()}!", "else") for source, _ in pairs[:40]]  # nearly the same, by their sources
    pairs += [("else", f"{target} w1") for _, target in pairs[40:80]]  # by their targets
    drawn, left, aside = hold_out(pairs, {"test": 60, "valid": 50})
    assert {name: len(some) for name, some in drawn.items()} == {"test": 60, "valid": 50} and aside
    assert sorted([*drawn["test"], *drawn["valid"], *left, *aside]) == sorted(pairs)
    for some, held in ((left, [*drawn["test"], *drawn["valid"]]), (drawn["valid"], drawn["test"])):
        for side in (0, 1):
            likeness = highest_resemblance([pair[side] for pair in some], [pair[side] for pair in held])
            assert likeness.max() < NEAR
    assert left == [pair for pair in pairs if pair in {*left}]
    rng.shuffle(pairs)
    shuffled = hold_out(pairs, {"test": 60, "valid": 50})[0]
    assert {*map(rank_of_draw, shuffled["test"])} == {*map(rank_of_draw, drawn["test"])}
    none, others, near = hold_out(pairs, {}, drawn["test"])  # given, not drawn
    assert not none and {*drawn["test"]} <= {*near} and sorted([*others, *near]) == sorted(pairs)
    assert {*left} <= {*others}
    again = hold_out([*pairs, ("some new", "words here")], {"test": 60})[0]["test"]
    sources = ({source.casefold().strip("!") for source, _ in some} for some in (again, drawn["test"]))
    assert len(next(sources) ^ next(sources)) <= 2  # one that is new may be drawn in place of another


@pytest.fixture
def model(world: World, tmp_path: Path) -> Path:
    """The small model, with what belongs next to it."""
    for name in ("dict.de.txt", "dict.en.txt", "spm.model"):
        (tmp_path / name).symlink_to(world.data_bin / name)
    (tmp_path / "model.pt").symlink_to(world.model)
    return tmp_path / "model.pt"


def figures(output: Path) -> dict[str, object]:
    steps = json.loads(output.with_name(f"{output.name}.data").joinpath("steps.json").read_text("utf-8"))
    made = {name: one["made"] for name, one in steps["done"].items()}
    timed = ("seconds", "tokens_per_second", "speed")
    return {
        name: [{key: value for key, value in row.items() if key not in timed} for row in rows]
        for name, rows in made.items()
        if name.startswith("compare")
    }


@pytest.mark.full
def test_a_killed_run_goes_on_and_ends_as_any_other(
    world: World, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        adapter_build, "DEFAULTS", adapter_build.DEFAULTS.replace(" 1000", " 20")
    )  # for speed
    pairs = [*read_pairs(world.folder / "train.tsv")]
    other = write_lines(
        tmp_path / "other.tsv", *(f"{source} xy\t{target} xy" for source, target in pairs[:120])
    )
    held = write_lines(tmp_path / "mono.en.txt", *(target for _, target in pairs))
    words = [world.folder / "train.tsv", "--path", model, "--also", other, "--text", held, *TOGETHER]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = begin("fairseq-ccpr adapt", *words, "--output", killed, err=(tmp_path / "log"))
    while not killed.exists() and process.is_alive():
        time.sleep(0.005)
    process.kill()
    process.join()
    assert killed.exists() and not (killed / "tuned.json").exists(), (tmp_path / "log").read_text("utf-8")
    done = call("adapt", *words, "--output", killed)
    assert "pairs ..." not in done.stderr and "build tokens ..." in done.stderr and "tune ..." in done.stderr
    assert done.stdout.count("| base |") == 2
    assert ("brings nothing" in done.stdout) != (f"--datastore {killed} <" in done.stdout)
    call("adapt", *words, "--output", whole)
    assert figures(killed) == figures(whole)
    assert call("adapt", *words, "--output", killed).stderr == ""
    folder = Path(f"{killed}.data/domain")
    targets = {target for _, target in read_pairs(folder / "test.tsv")}
    assert targets and not targets & {*(folder / "text.txt").read_text("utf-8").splitlines()}
    killed.rename(tmp_path / "moved")
    refused(call("adapt", *words, "--output", killed, check=False), "is gone, or another was built there")
    write_lines(other, *(f"{source} z\t{target}" for source, target in pairs[:120]))
    refused(call("adapt", *words, "--output", killed, check=False), "--also has changed since")


def test_bad_input(world: World, model: Path, tmp_path: Path) -> None:
    few = write_lines(tmp_path / "few.tsv", *(f"Haus {i}\thouse {i}" for i in range(12)))
    held = write_lines(tmp_path / "held.tsv", *(f"Baum b{i} c{i}\ttree d{i} e{i}" for i in range(60)))
    same = write_lines(tmp_path / "same.tsv", *(f"Haus {i % 3}\thouse {i % 3}" for i in range(1000)))
    none = write_lines(tmp_path / "none.tsv", "nothing")

    def fails(given: Path, said: str, *extra: object) -> None:
        words = [given, "--path", model, "--output", tmp_path / "out", *TOGETHER, *extra]
        refused(call("adapt", *words, check=False), said)

    fails(tmp_path / "absent.tsv", "absent.tsv")
    fails(few, "has 12 pairs, and to hold out test and valid takes 500")
    fails(none, "has 0 pairs")
    fails(few, "--encoder is for text of the target language", "--encoder", few)
    fails(few, "has 12 pairs, and to hold out test takes 500", "--valid", few)
    fails(
        same,
        "has too few pairs that are not nearly the same: 0 for train, [0-3] for test, 0 for valid; 50 are",
    )
    fails(few, "has too few pairs that are not nearly the same: 0 for train", "--valid", held, "--test", few)
    fails(
        few,
        "--also .*none.tsv has 0 pairs, and to tune and to measure takes 100",
        "--valid",
        held,
        "--test",
        held,
        "--also",
        none,
    )
    (tmp_path / "taken").mkdir()
    words = [few, "--path", model, "--output", tmp_path / "taken", *TOGETHER]
    refused(call("adapt", *words, check=False), "taken exists")
