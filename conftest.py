"""A real, tiny translation model and what is made from it, once a test session."""

from __future__ import annotations

import itertools
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from fairseq import options, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from fairseq_ccpr import device
from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.evaluation.test_set import load
from fairseq_ccpr.phrases.pair_store import PhrasePairs
from fairseq_ccpr.text.pairs import read_pairs
from tests import quick_start
from tests.helpers import DEMO, call, run, write_lines
from tests.small_models import (
    PAIRS,
    Ccpr,
    World,
    Xpr,
    build,
    build_phrases,
    random_context,
    subword_options,
    train,
)
from tests.trained import DATASTORES, MODELS, XPR, Workshop

EXAMPLES, ALL_EXAMPLES = 20, 300  # of Hypothesis, of each test
quick_start.install()
torch.set_num_threads(1)  # as in the processes the tests start: results are compared to the bit


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="run the tests marked `full` as well, and more examples of Hypothesis",
    )
    parser.addoption(
        "--free-seeds",
        action="store_true",
        help="other examples of Hypothesis in each run; a failure prints how to repeat it",
    )
    parser.addoption(
        "--seed", type=int, default=0, help="what random tests draw; each mixes it with its name (default: 0)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let Hypothesis draw the same in each run, and take its time: a first run depends neither on luck nor on other work."""
    checks = hypothesis.HealthCheck
    hypothesis.settings.register_profile(
        "ours",
        max_examples=ALL_EXAMPLES if config.getoption("--all") else EXAMPLES,
        derandomize=not config.getoption("--free-seeds"),
        print_blob=True,
        deadline=None,
        suppress_health_check=[checks.too_slow, checks.function_scoped_fixture],
    )
    hypothesis.settings.load_profile("ours")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which tests were run, on what examples, and by which seed: `-q` leaves out pytest's own header."""
    tier = "all tests" if config.getoption("--all") else "what every change needs, all tests with --all"
    drawn = "different in each run" if config.getoption("--free-seeds") else "the same in each run"
    examples, seed = hypothesis.settings().max_examples, config.getoption("--seed")
    terminalreporter.write_line(f"{tier}; {examples} examples of each property, {drawn}; --seed {seed}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are marked `full`, unless all are wanted or the command line names their file."""
    if config.getoption("--all"):
        return
    named = {(config.invocation_params.dir / word.partition("::")[0]).resolve() for word in config.args}
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        full = item.get_closest_marker("full") and item.path not in named
        (left_out if full else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed Python, NumPy and torch, each test with a number of its own, which a failing one shows."""
    option = request.config.getoption("--seed")
    number = zlib.crc32(f"{option} {request.node.nodeid}".encode())
    print(f"random numbers are those of --seed {option}: {number}")
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    return number


@pytest.fixture(autouse=True)
def names_in_doctests(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any]) -> None:
    """What the examples of `Translator` speak of."""
    if isinstance(request.node, pytest.DoctestItem) and "translator" in request.node.name:
        world = request.getfixturevalue("world")
        folder = request.getfixturevalue("tmp_path")
        shutil.copytree(world.datastore, folder / "datastore")  # which learns
        doctest_namespace |= {"model": world.model, "datastore": folder / "datastore", "folder": folder}


@pytest.fixture
def with_bf16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute in bfloat16 where that is asked for, however long it takes here."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(device, "_seconds_of_product", lambda dtype: 2.0 if dtype == torch.float32 else 1.0)
    device.has_bf16.cache_clear()
    yield
    device.has_bf16.cache_clear()


@pytest.fixture
def without_bf16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Be a processor that is many times slower in it."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    device.has_bf16.cache_clear()
    yield
    device.has_bf16.cache_clear()


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """Random numbers of this test."""
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def workshop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(request.config, tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def world(workshop: Workshop) -> World:
    def models(folder: Path) -> None:
        made = World.within(folder, folder)
        tables: list[object] = []
        for subset, count in PAIRS.items():
            short = (pair for pair in read_pairs(DEMO / f"bible.{subset}.tsv.xz") if len(pair[1]) < 80)
            rows = "".join(f"{source}\t{target}\n" for source, target in itertools.islice(short, count))
            (folder / f"{subset}.tsv").write_text(rows, encoding="utf-8")
            tables += [f"--{subset}", folder / f"{subset}.tsv"]
        call("prepare", *tables, "-s", "de", "-t", "en", "--pieces", 500, "--output", made.data_bin)
        train(made.data_bin, made.model.parent, 150, seed=1)
        train(made.data_bin, made.other_model.parent, 10, seed=2)

    def datastore(folder: Path) -> None:
        build(made, folder / "datastore")

    folder = workshop.fill("world", models, MODELS)
    made = World.within(folder, folder)
    return World.within(folder, workshop.fill("tokens", datastore, DATASTORES, folder) / "datastore")


@pytest.fixture(scope="session")
def sentences(world: World) -> list[str]:
    """Source sentences of the test subset."""
    return [source for source, _ in read_pairs(world.folder / "test.tsv")]


@pytest.fixture(scope="session")
def ccpr(workshop: Workshop) -> Ccpr:
    def make(folder: Path) -> None:
        made = Ccpr.within(folder)
        rows = list(itertools.islice(read_pairs(DEMO / "bible.train.tsv.xz"), 300))
        made.pairs.write_text("".join(f"{source}\t{target}\n" for source, target in rows), encoding="utf-8")
        random_context(rows, made.context)
        call(
            "extract", "--pairs", made.pairs, "-s", "de", "-t", "en", "--valid", 60, "--aligner", "fast-align",
            "--max-edge-share", 0.02, "--max-phrase-words", 4, "--output", made.phrases, "--quiet",
        )  # fmt: skip
        (folder / "log").write_text(run(*made.training(made.checkpoint.parent, 40)).stdout)

    return Ccpr.within(workshop.fill("ccpr", make, MODELS))


@pytest.fixture(scope="session")
def xpr(ccpr: Ccpr, workshop: Workshop) -> Xpr:
    def make(folder: Path) -> None:
        made = Xpr.within(folder, ccpr.context)
        rows = list(read_pairs(ccpr.pairs))
        for path, side in zip(made.texts, zip(*rows)):
            path.write_text("\n".join(side) + "\n", encoding="utf-8")
        store = PhrasePairs(ccpr.phrases / "train")
        strings = dict.fromkeys(
            (source[a:b], target[c:d])
            for number in range(store.sentences)
            for source, target in [store.sentence(number)]
            for _, a, b, c, d in store.pairs_of(number).tolist()
        )
        lines = [f"{source}\t{target}\n" for source, target in list(strings)[:400]]
        made.pairs.write_text("".join(lines), encoding="utf-8")
        call(
            "lexicon", "--pairs", made.pairs, "--source-text", made.texts[0], "--target-text", made.texts[1],
            "--output", made.lexicon, "-s", "de", "-t", "en", "--examples", 6,
        )  # fmt: skip
        (folder / "log").write_text(run(*made.training(made.checkpoint.parent, 24)).stdout)

    return Xpr.within(workshop.fill("xpr", make, XPR, ccpr.pairs.parent), ccpr.context)


@pytest.fixture(scope="session")
def mono(phrase_store: Path) -> Path:
    """Target sentences of training and test."""
    return phrase_store.parent / "mono.txt"


@pytest.fixture(scope="session")
def phrase_store(world: World, ccpr: Ccpr, workshop: Workshop) -> Path:
    """Phrases alone."""

    def make(folder: Path) -> None:
        lines = [
            t for name in ("train", "test") for _, t in list(read_pairs(world.folder / f"{name}.tsv"))[-150:]
        ]
        mono = write_lines(folder / "mono.txt", *lines)
        words = [
            "--encoder",
            ccpr.checkpoint,
            "--output",
            folder / "alone",
            "--segmentation",
            "all",
            "--max-words",
            3,
        ]
        call("build phrases", mono, *words, "--cpu", "--quiet")
        both = folder / "both"
        shutil.copytree(world.datastore, both)
        shutil.copytree(folder / "alone" / "phrase", both / "phrase")
        manifest = Manifest.read(both)
        manifest.phrase = Manifest.read(folder / "alone").phrase
        manifest.write(both)

    return workshop.fill("phrases", make, DATASTORES, world.datastore.parent, ccpr.pairs.parent) / "alone"


@pytest.fixture(scope="session")
def both(phrase_store: Path) -> Path:
    """Tokens and phrases in one folder."""
    return phrase_store.parent / "both"


@pytest.fixture(scope="session")
def decode(world: World) -> Callable[..., dict[int, list[dict[str, Any]]]]:
    """Decode the test subset as fairseq-generate does; gives the hypotheses of each sentence.

    `base`: with the model alone, and the beam search that retrieval has. `stock`: as fairseq does it.
    """
    # what several tests compare with
    of_model: dict[tuple[tuple[str, ...], bool], dict[int, list[dict[str, Any]]]] = {}

    def decode(*extra: object, base: bool = False, stock: bool = False) -> dict[int, list[dict[str, Any]]]:
        words = tuple(map(str, extra))
        if not (base or stock):
            return run_generator(*words)
        if (words, stock) not in of_model:
            of_model[words, stock] = run_generator(*words, base=True, stock=stock)
        return of_model[words, stock]

    def run_generator(
        *extra: object, base: bool = False, stock: bool = False
    ) -> dict[int, list[dict[str, Any]]]:
        parser = options.get_generation_parser()
        words = world.options("--max-tokens", 2000, *extra)
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, input_args=words))
        utils.set_torch_seed(1)
        task, models = load(cfg)
        make = task.build_base_generator if base else task.build_generator
        generator = make(models, cfg.generation)
        if base and not stock and not cfg.generation.score_reference:
            task.equip(generator, task.alone(models))
        found = {}
        iterator = task.get_batch_iterator(
            task.dataset("test"), max_tokens=cfg.dataset.max_tokens, max_sentences=cfg.dataset.batch_size
        )
        for sample in iterator.next_epoch_itr(shuffle=False):
            size = cfg.generation.prefix_size
            prefix = sample["target"][:, :size] if size else None
            hypotheses = task.inference_step(generator, models, sample, prefix_tokens=prefix)
            found.update(zip(sample["id"].tolist(), hypotheses))
        return found

    return decode


@pytest.fixture(scope="session")
def repeated_text(ccpr: Ccpr, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target sentences, some of them twice, and one that is too long for the encoder."""
    lines = [target for _, target in itertools.islice(read_pairs(ccpr.pairs), 90)]
    path = tmp_path_factory.mktemp("repeated") / "text.txt"
    path.write_text(
        "\n".join([*lines, "", *lines[:20], "  ", "so it was " * 70, lines[0]]) + "\n", encoding="utf-8"
    )
    return path


@pytest.fixture(scope="session")
def sharded_store(ccpr: Ccpr, repeated_text: Path) -> Path:
    """Its phrases, as the encoder divides the sentences."""
    build_phrases(ccpr, repeated_text, repeated_text.parent / "store", "--index", "IVF4,Flat")
    return repeated_text.parent / "store"


@pytest.fixture(scope="session")
def phrases(world: World, phrase_store: Path) -> list[object]:
    """Options of decoding with the phrases alone."""
    return ["--datastore", phrase_store, *subword_options(world), "--phrases-k", 3]


@pytest.fixture(scope="session")
def joint(world: World, both: Path) -> list[object]:
    """Options of decoding with tokens and phrases."""
    return ["--datastore", both, *subword_options(world), "--phrases-k", 3, "--tokens-lambda", 0.4]
