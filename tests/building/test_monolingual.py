"""Token datastores of target-language text: its sentences with their back-translations, as if those were pairs."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fairseq_ccpr.building.part import Processes
from fairseq_ccpr.building.token_build import TokenBuildSettings
from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.datastore.preprocessing import Preprocessing
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.inference import back_translation
from fairseq_ccpr.inference.resources import preprocessing_for_build
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.storage.files import write_checked_json
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import call, contents, refused, write_lines
from tests.killing import killed
from tests.small_models import PAIRS, Ccpr, World, build, build_options, train

LENGTH = 30  # of parts, in place of thousands of lines
BACK = "back-translations"


@pytest.fixture(scope="module")
def reverse(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the opposite direction, trained as the recipe does it: with the columns exchanged."""
    folder = tmp_path_factory.mktemp("reverse")
    rows = [f"{target}\t{source}" for source, target in read_pairs(world.folder / "train.tsv")]
    write_lines(folder / "train.tsv", *rows)
    words = ["--sentencepiece-model", world.spm, "--dict", world.data_bin / "dict.en.txt"]
    call(
        "prepare",
        "--train",
        folder / "train.tsv",
        "-s",
        "en",
        "-t",
        "de",
        *words,
        "--output",
        folder / "data-bin",
    )
    train(folder / "data-bin", folder / "model", 100, seed=3)
    return folder / "model/checkpoint_last.pt"


@pytest.fixture(scope="module")
def lines(world: World) -> list[str]:
    """Target sentences, one of them with a tab."""
    targets = [target for _, target in list(read_pairs(world.folder / "train.tsv"))[:100]]
    return [targets[0].replace(" ", "\t", 1), *targets[1:]]


@pytest.fixture(scope="module")
def text(lines: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same in two files, one of them compressed, with lines that give no pair."""
    folder = tmp_path_factory.mktemp("text")
    first = write_lines(folder / "one.txt", *lines[:40], "", "  ", "so it was " * 600)
    with gzip.open(folder / "two.txt.gz", "wt", encoding="utf-8") as stream:
        stream.writelines(f"{line}\n" for line in lines[40:])
    return [first, folder / "two.txt.gz"]


@pytest.fixture(autouse=True)
def short_parts() -> object:
    with patch.object(back_translation, "PART_SENTENCES", LENGTH):
        yield


@pytest.fixture
def options(text: list[Path], reverse: Path) -> list[object]:
    return ["--monolingual", *text, "--reverse-model", reverse]


@pytest.fixture(scope="module")
def whole(world: World, text: list[Path], reverse: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A datastore that was built in one go."""
    output = tmp_path_factory.mktemp("whole") / "store"
    with patch.object(back_translation, "PART_SENTENCES", LENGTH):
        done = build(world, output, "--monolingual", *text, "--reverse-model", reverse)
    assert "3 lines were left out: 2 empty, 1 longer than the reverse model takes" in done.stdout
    return output


@pytest.mark.full
def test_it_equals_translating_preparing_and_building(
    world: World, whole: Path, lines: list[str], reverse: Path, tmp_path: Path
) -> None:
    write_lines(tmp_path / "mono.txt", *(line.replace("\t", " ") for line in lines))
    words = [
        "--input",
        tmp_path / "mono.txt",
        "--path",
        reverse,
        "--data",
        reverse.parent.parent / "data-bin",
        "--cpu",
    ]
    shown = call("translate", *words, "--beam", back_translation.BEAM, "--max-tokens", 1500, "--quiet").stdout
    rows = [f"{source}\t{line}" for source, line in zip(shown.splitlines(), (tmp_path / "mono.txt").open())]
    (tmp_path / "pairs.tsv").write_text("".join(rows), encoding="utf-8")
    mine, theirs = list(read_pairs(whole / BACK / "pairs.tsv")), list(read_pairs(tmp_path / "pairs.tsv"))
    assert [target for _, target in mine] == [target for _, target in theirs]
    # A batch of other sentences rounds otherwise, which turns a few hypotheses.
    assert np.mean([one == two for one, two in zip(mine, theirs)]) > 0.95
    assert len({source for source, _ in mine}) > 30  # the model says something

    shutil.copy(whole / BACK / "pairs.tsv", tmp_path / "mine.tsv")
    dictionaries = [world.data_bin / f"dict.{language}.txt" for language in ("de", "en")]
    of_model = ["--sentencepiece-model", world.spm, "--dict", *dictionaries]
    call(
        "prepare",
        "--train",
        tmp_path / "mine.tsv",
        "-s",
        "de",
        "-t",
        "en",
        *of_model,
        "--output",
        tmp_path / "data",
    )
    assert contents(whole / BACK / "data-bin") == contents(tmp_path / "data")
    words = build_options(world, tmp_path / "store")
    words[1] = tmp_path / "data"
    call("build", *words)
    for name, content in contents(tmp_path / "store").items():
        if name.startswith("token/"):
            assert (whole / name).read_bytes() == content, name


def test_the_manifest_names_the_reverse_model(world: World, whole: Path, reverse: Path) -> None:
    section = TokenDatastore(whole).section
    digest = section.fingerprints["reverse_model"]
    model = call("build memory", "--path", reverse, "--data", reverse.parent.parent / "data-bin",
                 "--output", whole.parent / "memory").returncode  # fmt: skip
    assert model == 0 and digest == TokenDatastore(whole.parent / "memory").section.fingerprints["model"]
    shown = call("inspect", whole).stdout
    assert "pairs          back-translations" in shown and f"reverse_model  {digest}" in shown
    assert "reverse_model" not in TokenDatastore(world.datastore).section.fingerprints
    assert "back-translations" not in call("inspect", world.datastore).stdout


@pytest.mark.full
def test_killed_builds_resume_to_the_same_bytes(
    world: World, whole: Path, options: list[object], tmp_path: Path
) -> None:
    """A process is killed when so many parts are there; the next one translates those that are not, and no other."""
    output = tmp_path / "store"
    done = output / f"{BACK}.partial/parts"
    for parts in (1, 3):
        before = {path: path.stat().st_mtime_ns for path in done.glob("*.json")}
        with patch.object(back_translation, "write_checked_json", partial(_stop_after, parts, done)):
            assert build(world, output, *options, check=False).returncode == 130
        after = {path: path.stat().st_mtime_ns for path in done.glob("*.json")}
        assert len(after) == parts and before.items() <= after.items()
    refused(call("inspect", output, check=False), "unfinished")
    killed(partial(_build, world, output, options), 1.5)
    build(world, output, *options)
    assert contents(output) == contents(whole)


def _stop_after(count: int, folder: Path, path: Path, part: dict[str, object]) -> None:
    if len(list(folder.glob("*.json"))) == count:
        raise KeyboardInterrupt
    write_checked_json(path, part)


def _build(world: World, output: Path, options: list[object], writing: int) -> None:
    build(world, output, *options)


@pytest.mark.parametrize("stage", ["binarise", "rename", "build_token_datastore"])
def test_stopped_between_the_stages_it_resumes(
    world: World, whole: Path, options: list[object], stage: str, tmp_path: Path
) -> None:
    output = tmp_path / "store"
    stops: dict[str, Callable[[], object]] = {
        "binarise": lambda: patch.object(back_translation, "binarise", side_effect=KeyboardInterrupt),
        "rename": lambda: patch.object(back_translation, "rmtree", side_effect=KeyboardInterrupt),
        "build_token_datastore": lambda: patch(
            "fairseq_ccpr.cli.build.build_token_datastore", side_effect=KeyboardInterrupt
        ),
    }
    with stops[stage]():
        assert build(world, output, *options, check=False).returncode == 130
    refused(call("inspect", output, check=False), "unfinished")
    with patch.object(System, "translate", side_effect=AssertionError):  # all of it was translated
        build(world, output, *options)
    assert contents(output) == contents(whole)


def test_processes_share_the_parts(
    world: World, whole: Path, text: list[Path], options: list[object], reverse: Path, tmp_path: Path
) -> None:
    """The second of two translates every other part; the rest is the work of whoever comes next."""
    output = tmp_path / "store"
    settings = TokenBuildSettings(
        world.data_bin, str(world.model), output=output, monolingual=text, reverse_model=reverse, max_tokens=1500, cpu=True,
        quiet=True,
    )  # fmt: skip
    forward = preprocessing_for_build(world.data_bin, world.model, "de", "en")
    second = back_translation.BackTranslation(settings, forward, Processes(rank=1, world=2))
    second.begin()
    second.translate()
    assert {path.name for path in (output / f"{BACK}.partial/parts").iterdir()} == {
        "000001.json",
        "000003.json",
    }
    build(world, output, *options)
    assert contents(output) == contents(whole)


def test_a_finished_one_is_reused_and_reindexed(
    world: World, whole: Path, options: list[object], tmp_path: Path
) -> None:
    shutil.copytree(whole, output := tmp_path / "store")
    with patch.object(System, "translate", side_effect=AssertionError):
        assert "3 lines were left out" in build(world, output, *options).stdout
        assert contents(output) == contents(whole)
        build(world, output, *options, "--index", "IVF16,Flat")
    assert str(TokenDatastore(output).section.index).startswith("IVF16,Flat")
    assert call("inspect", output).returncode == 0


def test_another_text_or_reverse_model_is_refused(
    world: World, whole: Path, text: list[Path], reverse: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, output := tmp_path / "store")
    before = contents(output)
    weights = torch.load(reverse)
    weights["model"]["decoder.embed_tokens.weight"] += 1
    torch.save(weights, other := tmp_path / "other.pt")
    of_text, of_model = ["--monolingual", *text], ["--reverse-model", reverse]
    for words, sentence in (
        (
            ["--monolingual", text[1], *of_model],
            "built with another text: [0-9a-f]{12} there, [0-9a-f]{12} now",
        ),
        ([*of_text, "--reverse-model", other], "built with another reverse model: [0-9a-f]{12} there"),
        ([], "is built from monolingual text: give the same --monolingual"),
    ):
        refused(build(world, output, *words, check=False), sentence)
        assert contents(output) == before
    begun = tmp_path / "begun"
    with patch.object(System, "translate", side_effect=KeyboardInterrupt):
        build(world, begun, *of_text, *of_model, check=False)
    refused(build(world, begun, "--monolingual", text[1], *of_model, check=False), "another text")
    refused(
        build(world, begun, *of_text, *of_model, "--max-tokens", 900, check=False),
        "another max tokens: 1500 there",
    )
    shutil.copytree(world.datastore, of_pairs := tmp_path / "pairs")
    refused(
        build(world, of_pairs, *of_text, *of_model, check=False),
        "holds tokens that were not built with --monolingual",
    )
    assert contents(of_pairs) == contents(world.datastore)


def test_bad_input_is_refused_and_leaves_nothing(
    world: World, text: list[Path], reverse: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    output = folder / "store"
    of_text, of_model = ["--monolingual", *text], ["--reverse-model", reverse]
    wide = torch.load(reverse)
    for name in (
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "decoder.output_projection.weight",
    ):
        wide["model"][name] = torch.cat([wide["model"][name], wide["model"][name][:8]])
    torch.save(wide, tmp_path / "wide.pt")
    (tmp_path / "foreign").mkdir()
    shutil.copy(reverse, tmp_path / "foreign/reverse.pt")
    symbols = (world.data_bin / "dict.en.txt").read_text(encoding="utf-8").splitlines()
    write_lines(tmp_path / "foreign/dict.en.txt", symbols[1], symbols[0], *symbols[2:])
    blank = write_lines(tmp_path / "blank.txt", "", "  ")
    latin = tmp_path / "latin.txt"
    latin.write_bytes("Öl\n".encode("latin-1"))
    plain = tmp_path / "plain"
    shutil.copytree(world.data_bin, plain)
    (plain / "preprocessing.json").unlink()
    (plain / "spm.model").unlink()
    for words, sentence in (
        (of_text, "--monolingual needs --reverse-model: give"),
        (of_model, "--reverse-model needs --monolingual: give"),
        (["--monolingual", tmp_path / "no.txt", *of_model], r"there is no text .*no\.txt"),
        (
            ["--monolingual", blank, *of_model],
            r"blank\.txt gives no sentence pair \(2 lines were left out: 2 empty\)",
        ),
        (["--monolingual", latin, *of_model], r"latin\.txt, line 1: the bytes are not UTF-8"),
        ([*of_text, "--reverse-model", tmp_path / "no.pt"], r"there is no checkpoint .*no\.pt"),
        ([*of_text, "--reverse-model", world.spm], r"spm\.model: the checkpoint was refused"),
        (
            [*of_text, "--reverse-model", tmp_path / "wide.pt"],
            r"has embeddings of 5\d\d source and 5\d\d target symbols",
        ),
        (
            [*of_text, "--reverse-model", tmp_path / "foreign/reverse.pt"],
            "differ: symbol 4 is .* in the first",
        ),
        ([*of_text, *of_model, "--subset", "valid"], "--subset chooses among sentence pairs"),
        ([*of_text, *of_model, "--fraction", 0.5], "--fraction chooses among"),
        ([*of_text, *of_model, "--num-shards", 2], "--num-shards chooses among"),
        (
            [*of_text, *of_model, "--adapter", "clknn", "--adapter-options", "--size 3"],
            "fairseq-train does not take them",
        ),
        ([*of_text, *of_model, "--path", tmp_path / "model.pt"], r"there is no checkpoint .*model\.pt"),
    ):
        refused(build(world, output, *words, check=False), sentence)
        assert not list(folder.iterdir()), words
    words = build_options(world, output)
    words[1] = plain
    refused(call("build", *words, *of_text, *of_model, check=False), "does not say how its text was cut")


def test_a_reverse_model_may_have_subwords_of_its_own(
    world: World, text: list[Path], reverse: Path, tmp_path: Path
) -> None:
    """In a folder that names them; the pairs then have the subwords of the model that the datastore is for."""
    folder = tmp_path / "reverse"
    rows = list(read_pairs(world.folder / "train.tsv"))
    write_lines(tmp_path / "train.tsv", *(f"{target}\t{source}" for source, target in rows))
    call(
        "prepare",
        "--train",
        tmp_path / "train.tsv",
        "-s",
        "en",
        "-t",
        "de",
        "--pieces",
        300,
        "--output",
        folder,
    )
    train(folder, tmp_path / "model", 20, seed=4)
    model = shutil.copy(tmp_path / "model/checkpoint_last.pt", folder / "model.pt")
    build(world, tmp_path / "store", "--monolingual", text[1], "--reverse-model", model)
    store = TokenDatastore(tmp_path / "store")
    assert store.read_symbols() == TokenDatastore(world.datastore).read_symbols()
    assert call("inspect", tmp_path / "store").returncode == 0


def test_exchanging_languages_exchanges_subword_models() -> None:
    """Of Marian's models, which have one for each language; a tag in front of the source is for the other direction."""
    files = {"sentencepiece_model": "source.spm", "sentencepiece_target_model": "target.spm"}
    options = {"bpe": "sentencepiece_pair", **files, "source_tag": ">>eng<<"}
    back = Preprocessing(Path("data"), "de", "en", options).exchanged()
    assert (back.source_lang, back.target_lang) == ("en", "de")
    exchanged = {"sentencepiece_model": "target.spm", "sentencepiece_target_model": "source.spm"}
    assert back.options == {"bpe": "sentencepiece_pair", **exchanged}
    joint = {"bpe": "sentencepiece", "sentencepiece_model": "spm.model"}
    assert Preprocessing(Path("data"), "de", "en", joint).exchanged().options == joint


@pytest.mark.full
def test_an_adapter_is_trained_on_it_and_validated_on_real_pairs(
    world: World, whole: Path, options: list[object], tmp_path: Path
) -> None:
    training = (
        "--max-update 20 --batch-size 64 --anchors-per-epoch 640 --valid-queries 100 --nearest-clusters 20 "
    )
    training += (
        "--adapter-hidden-dim 32 --adapter-output-dim 16 --lr 3e-3 --total-num-update 20 --warmup-updates 5"
    )
    words = ["--adapter", "clknn", "--adapter-options", training, "--pca-dim", 8, "--keep-raw-keys"]
    build(world, output := tmp_path / "store", *options, *words)
    assert (output / "raw/token/keys.npy").read_bytes() == (whole / "token/keys.npy").read_bytes()
    section = TokenDatastore(output).section
    raw = TokenDatastore(output / "raw").section
    assert (
        section.dimension == 8 and section.fingerprints["reverse_model"] == raw.fingerprints["reverse_model"]
    )
    valid = TokenDatastore(output / "valid").section
    assert valid.subsets == {"valid": PAIRS["valid"]} and "reverse_model" not in valid.fingerprints

    # One adapter makes keys of pairs, too, that can be merged with these; not with PCA, which each fits to
    # its own.
    words = ["--adapter", output / "adapter/checkpoint_best.pt", "--pca-dim", 0]
    build(world, tmp_path / "mono", *options, *words, "--raw-datastore", output / "raw")
    build(world, tmp_path / "pairs", *words, "--raw-datastore", world.datastore)
    of_merge = ["--output", tmp_path / "both", "--index", "exact", "--cpu", "--quiet"]
    call("merge", tmp_path / "mono", tmp_path / "pairs", *of_merge)
    assert (
        TokenDatastore(tmp_path / "both").section.size
        == section.size + TokenDatastore(world.datastore).section.size
    )


def test_it_is_merged_with_pairs_and_taken_out_again(world: World, whole: Path, tmp_path: Path) -> None:
    call(
        "merge",
        f"pairs={world.datastore}",
        f"mono={whole}",
        "--output",
        tmp_path / "both",
        "--index",
        "exact",
        "--cpu",
    )
    one, other, both = map(TokenDatastore, (world.datastore, whole, tmp_path / "both"))
    assert np.array_equal(both.keys, np.concatenate([one.keys, other.keys]))
    assert "reverse_model" not in both.section.fingerprints
    digest = other.section.fingerprints["reverse_model"]
    assert [source.reverse_model for source in both.section.sources] == ["", digest]
    shown = call("inspect", tmp_path / "both").stdout
    assert f"sentences, sources translated back by {digest}" in shown and shown.count("translated back") == 1
    for removed, left in (("pairs", other), ("mono", one)):
        call(
            "merge",
            tmp_path / "both",
            "--remove",
            removed,
            "--output",
            tmp_path / removed,
            "--index",
            "exact",
            "--cpu",
        )
        assert TokenDatastore(tmp_path / removed).section.fingerprints == left.section.fingerprints
    call(
        "merge",
        f"mono={whole}",
        f"pairs={world.datastore}",
        "--output",
        tmp_path / "turned",
        "--index",
        "exact",
        "--cpu",
    )
    turned = Manifest.read(tmp_path / "turned").token
    assert turned is not None and "reverse_model" not in turned.fingerprints


def test_one_command_builds_what_three_build(
    world: World, whole: Path, text: list[Path], reverse: Path, ccpr: Ccpr, tmp_path: Path
) -> None:
    words: list[object] = [
        *text,
        "--output",
        tmp_path / "all",
        "--path",
        world.model,
        "--data",
        world.data_bin,
    ]
    words += ["--cpu", "--quiet", "--encoder", ccpr.checkpoint]
    done = call("build monolingual", *words, "--reverse-model", reverse)
    assert "n-grams" in done.stdout and "phrases of" in done.stdout and "3 lines were left out" in done.stdout
    parts = contents(tmp_path / "all")
    call(
        "build text",
        *text,
        "--path",
        world.model,
        "--data",
        world.data_bin,
        "--output",
        tmp_path / "one",
        "--quiet",
    )
    call(
        "build phrases", *text, "--encoder", ccpr.checkpoint, "--output", tmp_path / "one", "--cpu", "--quiet"
    )
    assert len(Manifest.read(tmp_path / "all").parts) == 3
    for name, content in contents(tmp_path / "one").items():
        if name.startswith(("text/", "phrase/")):
            assert parts[name] == content, name
    assert np.array_equal(TokenDatastore(tmp_path / "all").values, TokenDatastore(whole).values)
    call("build monolingual", *words, "--reverse-model", reverse)  # resumes what is complete
    assert contents(tmp_path / "all") == parts


def test_what_one_command_refuses(world: World, text: list[Path], reverse: Path, tmp_path: Path) -> None:
    for words, reason in (
        ([], "there is nothing to build but the text memory"),
        (["--reverse-model", reverse], "--reverse-model needs --data DATA_BIN"),
    ):
        where = ["--output", tmp_path / "store", "--path", world.model]
        refused(call("build monolingual", *text, *words, *where, check=False), reason)
    assert not (tmp_path / "store").exists()
