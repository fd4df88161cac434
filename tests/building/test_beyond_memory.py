"""Stores larger than memory: merged, indexed and decoded with from disk, and what a plan says they need."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fairseq_ccpr.cli.planning import Limits, needs
from fairseq_ccpr.datastore.manifest import TOKEN, Manifest
from fairseq_ccpr.datastore.parts import PROVENANCE, SOURCE_FILES, SYMBOLS
from fairseq_ccpr.datastore.source_index import write_source_index
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.search import ExactIndex, build_index, exact, faiss_index, open_index
from fairseq_ccpr.search.index_plan import plan_index
from fairseq_ccpr.storage.arrays import ArrayWriter
from fairseq_ccpr.storage.files import describe_files
from tests.helpers import ROOT, call, refused
from tests.small_models import World
from tests.vectors import clustered

pytestmark = pytest.mark.full

LIMIT = 80 << 20  # bytes that a process may take beyond what it has when all is imported
CHILD = """
import re, resource, sys
from pathlib import Path
import numpy as np
import torch
from fairseq.data import indexed_dataset
from fairseq_cli import generate
import fairseq_ccpr
from fairseq_ccpr.cli import load
from fairseq_ccpr.search import ExactIndex, exact, faiss_index

warm = faiss_index.make_index(32, "IVF64,SQ8", "l2")  # libraries take memory of their own when they first multiply
rows = torch.rand(20_000, 32)
warm.train(rows)
warm.add(rows)
warm.search(rows[:300], 3)
ExactIndex(rows.half(), "l2").search(rows[:300], 3)
indexed_dataset._warmup_mmap_file = lambda path: None  # fairseq reads a file of any size through 100 MB of memory
exact.TILE_NUMBERS = exact.KEPT_NORMS = 1 << 20  # small stores are to this process what large ones are to others
has = 1024 * int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
resource.setrlimit(resource.RLIMIT_DATA, (has + MOST, has + MOST))
try:
    np.ones(MOST + (MOST >> 3), np.uint8)
    sys.exit("the limit does not hold")
except MemoryError:
    pass
sys.argv = sys.argv[1:]
COMMAND()
"""


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_exact_search_in_blocks_equals_search_at_once(metric: str) -> None:
    keys = clustered(5000, 16)
    keys[3000:3100] = keys[100]  # ties within blocks and between them
    queries = torch.from_numpy(np.concatenate([clustered(9, 16, seed=1), keys[[100, 4999]]])).float()
    whole = ExactIndex(keys, metric).search(queries, 70)
    for numbers, count in ((64, 4), (1000, 4096), (1000, 1)):
        with patch.object(exact, "TILE_NUMBERS", numbers), patch.object(exact, "QUERIES", count):
            scores, ids = ExactIndex(keys, metric).search(queries, 70)
        torch.testing.assert_close(scores, whole[0])
        assert torch.equal(ids, whole[1])


@pytest.mark.parametrize("factory", ["IVF32,SQ8", "PCA8,IVF32,Flat", "IVF32_HNSW8,SQfp16"])
def test_lists_on_disk_find_what_lists_in_memory_find(
    factory: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys, queries = clustered(6000, 16), torch.from_numpy(clustered(40, 16)).float()
    (tmp_path / "made").mkdir()
    # of a killed run
    (tmp_path / "made" / f"{plan_index(f'disk:{factory}', 'ip', '', 6000, 16).file}.partial").mkdir()
    found = []
    for choice in (factory, f"disk:{factory}"):
        description = plan_index(choice, "ip", "", len(keys), 16)
        with (
            patch.object(faiss_index, "TRAIN_ROWS", 2000),
            patch.object(faiss_index, "TRAIN_ROWS_PER_CENTROID", 50),
        ):
            build_index(keys, description, tmp_path / "made" / description.file, lambda rows: None)
    (tmp_path / "made").rename(tmp_path / "moved")
    files = list((tmp_path / "moved").iterdir())
    assert len(files) == 3 and not any(str(tmp_path).encode() in file.read_bytes() for file in files)
    for choice in (factory, f"disk:{factory}"):
        index = open_index(plan_index(choice, "ip", "", len(keys), 16), keys, tmp_path / "moved")
        threads = len(list(Path("/proc/self/task").iterdir()))
        found.append(index.search(queries, 8))
        assert len(list(Path("/proc/self/task").iterdir())) == threads  # none that reads ahead
    assert torch.equal(found[0][1], found[1][1]) and torch.equal(found[0][0], found[1][0])
    assert capfd.readouterr().out == ""  # which is for results


@pytest.mark.parametrize("factory", ["Flat", "HNSW16", "IVF32,PQ16x4fs", "IVF32,SQ8,RFlat"])
def test_what_cannot_stay_on_disk_is_refused(factory: str, world: World, tmp_path: Path) -> None:
    words = [
        "tokens",
        world.data_bin,
        "--path",
        world.model,
        "-s",
        "de",
        "-t",
        "en",
        "--output",
        tmp_path / "s",
        "--cpu",
    ]
    done = call("build", *words, "--quiet", "--index", f"disk:{factory}", check=False)
    refused(done, "the only index that FAISS keeps on disk: give one such as disk:IVF")
    assert not (tmp_path / "s").exists()


def repeated(store: TokenDatastore, times: int, output: Path) -> Path:
    """A datastore of the same entries many times over."""
    (output / TOKEN).mkdir(parents=True)
    section = replace(store.section, size=store.section.size * times, suits={})
    arrays = {name: np.concatenate([store.arrays[name]] * times) for name in section.ROWS}
    sentences, numbers = store.section.source_index.sentences, np.arange(times)
    arrays[PROVENANCE][:, 0] += np.repeat(numbers * sentences, store.section.size).astype(np.int32)
    section.subsets = {"train": times * sentences}
    writer = ArrayWriter(output / TOKEN, section.shapes(*section.ROWS))
    writer.create()
    writer.write_chunk(0, 0, arrays)
    shutil.rmtree(output / TOKEN / "done")
    shutil.copy(store.directory / TOKEN / SYMBOLS, output / TOKEN)
    sources = (
        (number + n * sentences, source)
        for n in range(times)
        for number, source in store.source_index.sources()
    )
    section.source_index = write_source_index(
        output / TOKEN,
        sources,
        arrays[PROVENANCE],
        section.source_index.vocabulary,
        section.source_index.unknown,
    )
    section.files = describe_files(output, [f"{TOKEN}/{name}" for name in section.names])
    Manifest(section).write(output)
    return output


def limited(command: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a command that may take no more than LIMIT."""
    child = CHILD.replace("MOST", str(LIMIT)).replace("COMMAND", command)
    line = [sys.executable, "-X", "faulthandler", "-c", child, command, *map(str, words)]
    # What was freed must go back to the system: memory that a process keeps is beyond the limit.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    env |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_a_store_three_times_the_memory_limit_is_built_and_decoded_from_disk(
    world: World, tmp_path: Path
) -> None:
    store = TokenDatastore(world.datastore)
    bytes_each = 2 * store.section.dimension + 12
    one = repeated(store, 3 * LIMIT // (2 * bytes_each * store.section.size) + 1, tmp_path / "one")
    shutil.copytree(one, two := tmp_path / "two", copy_function=os.link)
    manifest = Manifest.read(two)
    assert manifest.token is not None
    manifest.token.fingerprints["corpus"] = "0" * 64
    (two / "manifest.json").unlink()
    manifest.write(two)
    large = tmp_path / "large"
    index = ["--index", "disk:IVF64,SQ8", "--index-parameters", "nprobe=1"]
    limited('load("merge")', one, two, "--output", large, *index, "--cpu", "--quiet")
    assert sum(path.stat().st_size for path in (large / TOKEN).glob("*.npy")) > 3 * LIMIT
    words = world.options("--datastore", large, "--max-tokens", 300, "--num-shards", 40, "--shard-id", 0)
    words += ["--beam", "1", "--max-len-b", "4"]
    done = limited("generate.cli_main", *words, "--tokens-k", 4)
    assert "disk:IVF64,SQ8;nprobe=1" in done.stdout + done.stderr and "\nH-" in done.stdout
    for path in (large / TOKEN).glob("index-*"):
        path.unlink()
    merged = Manifest.read(large)
    assert merged.token is not None
    merged.token.index = plan_index("exact", "l2", "", merged.token.size, store.section.dimension)
    merged.token.files = {name: file for name, file in merged.token.files.items() if "index-" not in name}
    merged.write(large)
    # compares all keys at each step
    assert "\nH-" in limited("generate.cli_main", *words, "--max-len-b", 1).stdout


def test_a_plan_says_what_each_way_to_search_needs(world: World) -> None:
    words = ("--plan", "--size", 10**9, "--queries", 5, "--speeds", "host=10", "device=1000", "disk=2")
    *lines, room = call("inspect", world.datastore, *words).stdout.splitlines()
    assert re.fullmatch(
        r"this machine: [\d,]+ GB free on disk, [\d,]+ GB of memory, (GPUs of .*|no GPU)", room
    )
    rows = {
        (cells[1], cells[2]): cells[3:-1]
        for line in lines[3:]
        for cells in [[c.strip() for c in line.split("|")]]
    }
    width = TokenDatastore(world.datastore).section.dimension
    section = TokenDatastore(world.datastore).section
    sources = sum(section.files[f"{TOKEN}/{one.file}"]["bytes"] for one in SOURCE_FILES)
    disk = f"{2 * width + 12 + sources / section.size:,.4g} GB"
    assert rows["exact", "from disk, mapped"] == [disk, "0 GB", "0 GB", "64 GB", "32 s"]
    assert rows["exact", "on one GPU"] == [disk, "0 GB", "72 GB", "64 GB", "64 ms"]
    lists = next(
        cells for (index, _), cells in rows.items() if index.startswith("disk:IVF32768,SQ8;nprobe=16")
    )
    read = 5 * 16 / 32768 * 1e9 * (width + 8)
    assert lists[3:] == [f"{read / 1e9:,.4g} GB", f"{read / 2e9 * 1e3:,.3g} ms"]
    refused(call("inspect", world.datastore, "--plan", "--size", 0, check=False), "--size is 0")
    for wrong in ("host", "host=fast", "tape=3", "disk=0"):
        done = call("inspect", world.datastore, "--plan", "--speeds", wrong, check=False)
        refused(done, f"--speeds has '{wrong}'")


def test_a_plan_agrees_with_the_files_there_are(world: World, tmp_path: Path) -> None:
    store = TokenDatastore(world.datastore)
    limits = Limits(1e9, 1e9)
    planned = needs(store.section, store.section.size, 5, {"disk": limits, "host": limits})
    arrays = sum(path.stat().st_size for path in (store.directory / TOKEN).glob("*.npy"))
    for need in planned:
        choice = need.index.partition(";")[0]
        if choice == "exact":
            found = arrays
        else:
            description = plan_index(choice, "l2", "", store.section.size, store.section.dimension)
            build_index(store.keys, description, tmp_path / description.file, lambda rows: None)
            found = arrays + sum((tmp_path / name).stat().st_size for name in description.files)
        assert need.disk == pytest.approx(found, rel=0.02)
