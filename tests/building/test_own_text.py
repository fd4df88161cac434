"""What token datastores know of their own text: sampled at build, carried over, merged, and missing in older ones."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fairseq_ccpr.building import corpus as building_corpus
from fairseq_ccpr.building.corpus import join_domains, sample_domain
from fairseq_ccpr.datastore.domain import Domain
from fairseq_ccpr.datastore.manifest import TOKEN, Manifest
from fairseq_ccpr.datastore.parts import DOMAIN
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.models.token_adapter import TokenAdapter
from fairseq_ccpr.storage.files import MANIFEST, describe_files
from tests.helpers import call, contents, edit_manifest, refused
from tests.small_models import World, build

FILE = f"{TOKEN}/{DOMAIN}"


def corpus(rng: np.random.Generator, sentences: int, width: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Random keys, and provenance of sentences some of which were left out."""
    numbers = np.sort(rng.choice(2 * sentences, sentences, replace=False))
    lengths = rng.integers(1, 12, sentences)
    provenance = [
        (number, position) for number, length in zip(numbers, lengths) for position in range(length)
    ]
    return rng.normal(size=(len(provenance), width)).astype(np.float16), np.array(provenance, np.int32)


def of_sentences(keys: np.ndarray, provenance: np.ndarray, numbers: torch.Tensor) -> np.ndarray:
    return keys[np.isin(provenance[:, 0], numbers.numpy())]


def forget(folder: Path) -> None:
    """Take from a datastore what it knows of its own text."""
    token = vars(Manifest.read(folder).token) | {"index": vars(TokenDatastore(folder).section.index)}
    token |= {name: vars(token[name]) for name in ("projection", "source_index") if token[name] is not None}
    token["files"] = {name: file for name, file in token["files"].items() if name != FILE}
    del token["domain"]
    (folder / FILE).unlink()
    edit_manifest(folder, token=token)


@pytest.fixture(scope="module")
def raw(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Raw datastores of two subsets."""
    folder = tmp_path_factory.mktemp("raw")
    for subset in ("valid", "test"):
        build(world, folder / subset, "--subset", subset)
    return {subset: folder / subset for subset in ("valid", "test")}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Options of an adapter of random weights."""
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("adapter") / "adapter.pt"
    history = {"optimizer_name": "FairseqAdam", "lr_scheduler_state": {}, "num_updates": 1}
    state = {"model": TokenAdapter(32, 48, 24).state_dict(), "cfg": {}, "optimizer_history": [history]}
    torch.save(state | {"extra_state": {"train_iterator": {"epoch": 1}}}, path)
    return ["--adapter", path, "--pca-dim", 0]


@pytest.fixture(scope="module")
def projected(world: World, raw: dict[str, Path], adapter: list[object]) -> dict[str, Path]:
    """Their keys projected."""
    made = {subset: path.with_name(f"{subset}-projected") for subset, path in raw.items()}
    for subset, path in made.items():
        build(world, path, "--subset", subset, *adapter, "--raw-datastore", raw[subset])
    return made


@pytest.mark.parametrize("block", [7, 1 << 20])
@pytest.mark.parametrize("limit", [1, 60, 400, 8192])
def test_whole_sentences_are_drawn_evenly(rng: np.random.Generator, limit: int, block: int) -> None:
    keys, provenance = corpus(rng, 300)
    with patch.object(building_corpus, "STATES", limit), patch.object(building_corpus, "READ_ROWS", block):
        domain = sample_domain(keys, provenance)
    assert np.array_equal(domain.states, of_sentences(keys, provenance, domain.numbers))
    assert domain.lengths.tolist() == [
        np.count_nonzero(provenance[:, 0] == number) for number in domain.numbers
    ]
    ranks = np.searchsorted(np.unique(provenance[:, 0]), domain.numbers.numpy())
    count = max(1, min(300, limit * 300 // len(keys)))
    assert np.array_equal(ranks, np.linspace(0, 299, count).round())
    assert limit < 400 or len(domain.states) == pytest.approx(min(limit, len(keys)), rel=0.2)


def test_keys_that_are_no_numbers_are_refused(rng: np.random.Generator) -> None:
    keys, provenance = corpus(rng, 20)
    keys[5] = np.inf
    with pytest.raises(DatastoreError, match=r"keys are damaged .*: build the datastore again"):
        sample_domain(keys, provenance)


def test_samples_are_joined_in_proportion_to_entries(rng: np.random.Generator) -> None:
    parts = [sample_domain(*corpus(rng, sentences)) for sentences in (200, 200, 4)]
    with patch.object(building_corpus, "STATES", 600):
        joined = join_domains(parts, [3000, 1000, len(parts[2].states)])
    found = joined.states.float().split(joined.lengths.tolist())
    shares = [0, 0, 0]
    for sentence in found:
        owner = next(i for i, part in enumerate(parts) if torch.isin(sentence, part.states.float()).all())
        shares[owner] += len(sentence)
    assert (
        shares[0] == pytest.approx(450, rel=0.2)
        and shares[1] == pytest.approx(150, rel=0.2)
        and shares[2] > 0
    )
    whole = join_domains(parts, [len(part.states) for part in parts])
    assert torch.equal(whole.states, torch.cat([part.states for part in parts]))  # all fit


def test_every_datastore_knows_sentences_of_its_own(world: World) -> None:
    store = TokenDatastore(world.datastore)
    assert store.section.domain and FILE in store.section.files
    domain = store.open_domain()
    assert domain is not None and 0.9 * 8192 < len(domain.states) < 1.1 * 8192 < len(store.keys)
    assert np.array_equal(domain.states, of_sentences(store.keys, store.provenance, domain.numbers))
    assert domain.numbers[0] == 0 and domain.numbers[-1] == store.provenance[-1, 0]
    shown = call("inspect", world.datastore).stdout
    line = rf"own text +{len(domain.states):,} states of {len(domain.lengths):,} sentences"
    assert re.search(line, shown) and FILE in shown


def test_chunks_do_not_change_which_sentences_are_known(world: World, tmp_path: Path) -> None:
    """Nor do they change states, but for rounding."""
    build(world, tmp_path / "chunks", "--chunk-tokens", 700)
    found, wanted = (TokenDatastore(path).open_domain() for path in (tmp_path / "chunks", world.datastore))
    assert found is not None and wanted is not None
    assert torch.equal(found.numbers, wanted.numbers) and torch.equal(found.lengths, wanted.lengths)
    torch.testing.assert_close(found.states, wanted.states, rtol=0, atol=2e-2)


@pytest.mark.parametrize("place, name", [(Domain, "save"), (Domain, "of"), (Manifest, "write")])
def test_a_build_stopped_while_it_learns_its_text_resumes(
    world: World, raw: dict[str, Path], tmp_path: Path, place: type, name: str
) -> None:
    with patch.object(place, name, side_effect=KeyboardInterrupt):
        done = build(world, tmp_path / "stopped", "--subset", "valid", check=False)
    assert done.returncode == 130 and not (tmp_path / "stopped" / MANIFEST).exists()
    build(world, tmp_path / "stopped", "--subset", "valid")
    assert contents(tmp_path / "stopped") == contents(raw["valid"])


def test_projected_keys_keep_what_the_raw_ones_know(
    world: World, raw: dict[str, Path], projected: dict[str, Path], adapter: list[object], tmp_path: Path
) -> None:
    wanted = (raw["valid"] / FILE).read_bytes()
    assert (projected["valid"] / FILE).read_bytes() == wanted
    build(world, tmp_path / "own", "--subset", "valid", *adapter)  # with raw keys of its own, which it drops
    assert (tmp_path / "own" / FILE).read_bytes() == wanted and not (tmp_path / "own" / "raw").exists()
    shutil.copytree(raw["valid"], tmp_path / "older")
    forget(tmp_path / "older")
    build(world, tmp_path / "of-older", "--subset", "valid", *adapter, "--raw-datastore", tmp_path / "older")
    assert contents(tmp_path / "of-older") == contents(projected["valid"])
    domain = TokenDatastore(projected["valid"]).open_domain()
    assert (
        domain is not None
        and len(domain.mean) == 32
        and TokenDatastore(projected["valid"]).section.dimension == 24
    )


def merge(*words: object) -> None:
    call("merge", *words, "--quiet", "--index", "exact")


def test_merged_raw_keys_are_sampled_again(raw: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(raw["test"], tmp_path / "test")
    forget(tmp_path / "test")
    merge(raw["valid"], tmp_path / "test", "--output", tmp_path / "both")
    both = TokenDatastore(tmp_path / "both")
    sample_domain(both.keys, both.provenance).save(tmp_path / "wanted")
    assert (tmp_path / "both" / FILE).read_bytes() == (tmp_path / "wanted").read_bytes()
    merge(tmp_path / "both", "--remove", "valid", "--output", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(raw["test"])


def test_merged_projected_keys_join_their_samples(projected: dict[str, Path], tmp_path: Path) -> None:
    names = [f"{name}={path}" for name, path in projected.items()]
    merge(*names, "--output", tmp_path / "both")
    both = TokenDatastore(tmp_path / "both")
    domain, *parts = (store.open_domain() for store in (both, *map(TokenDatastore, projected.values())))
    assert domain is not None
    assert torch.equal(domain.states, torch.cat([part.states for part in parts]))
    assert domain.numbers.tolist() == [*parts[0].numbers.tolist(), *(parts[1].numbers + 24).tolist()]
    assert domain.numbers.tolist() == sorted(set(both.provenance[:, 0].tolist()))
    for removed, left in (("valid", "test"), ("test", "valid")):
        merge(tmp_path / "both", "--remove", removed, "--output", tmp_path / left)
        assert contents(tmp_path / left) == contents(projected[left])


def test_merged_projected_keys_do_not_know_what_one_does_not(
    projected: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(projected["test"], tmp_path / "test")
    forget(tmp_path / "test")
    merge(f"valid={projected['valid']}", tmp_path / "test", "--output", tmp_path / "both")
    assert f"{tmp_path / 'test'} lacks statistics of its own text" in caplog.text
    assert TokenDatastore(tmp_path / "both").open_domain() is None and not (tmp_path / "both" / FILE).exists()
    assert "health         good" in call("inspect", tmp_path / "both").stdout


def test_older_datastores_open_and_learn_when_built_again(
    world: World, raw: dict[str, Path], tmp_path: Path
) -> None:
    older = shutil.copytree(raw["valid"], tmp_path / "older")
    forget(older)
    assert TokenDatastore(older).open_domain() is None
    shown = call("inspect", older).stdout
    assert "health         good" in shown and "own text" not in shown
    call("fairseq-generate", *world.options("--datastore", older))
    stamp = (older / TOKEN / "keys.npy").stat().st_mtime_ns
    with patch.object(Manifest, "write", side_effect=KeyboardInterrupt):
        assert build(world, older, "--subset", "valid", check=False).returncode == 130
    assert TokenDatastore(older).open_domain() is None
    build(world, older, "--subset", "valid")
    assert (
        contents(older) == contents(raw["valid"]) and (older / TOKEN / "keys.npy").stat().st_mtime_ns == stamp
    )


def test_older_projected_keys_stay_without(
    world: World, projected: dict[str, Path], raw: dict[str, Path], adapter: list[object], tmp_path: Path
) -> None:
    older = shutil.copytree(projected["valid"], tmp_path / "older")
    forget(older)
    before = contents(older)
    build(world, older, "--subset", "valid", *adapter, "--raw-datastore", raw["valid"])
    assert contents(older) == before and TokenDatastore(older).open_domain() is None


def test_knowledge_of_another_width_or_damaged_is_refused(
    world: World, raw: dict[str, Path], projected: dict[str, Path], tmp_path: Path
) -> None:
    lengths = torch.full((30,), 4)
    for name, path in (("raw", raw["valid"]), ("projected", projected["valid"])):
        folder = shutil.copytree(path, tmp_path / name)
        Domain.of(torch.randn(120, 24).half(), lengths, torch.arange(30)).save(folder / FILE)
        files = TokenDatastore(path).section.files | describe_files(folder, [FILE])
        section = Manifest.read(path)
        assert section.token is not None
        section.token.files = files
        section.write(folder)
        with pytest.raises(
            DatastoreError, match=r"of states 24 wide, but the manifest says 32: build the datastore again"
        ):
            TokenDatastore(folder).open_domain()
        refused(call("inspect", folder, check=False), "of states 24 wide")
    folder = shutil.copytree(raw["test"], tmp_path / "damaged")
    content = bytearray((folder / FILE).read_bytes())
    content[9] ^= 1
    (folder / FILE).write_bytes(content)
    refused(
        call("fairseq-generate", *world.options("--datastore", folder), check=False), f"{DOMAIN} is damaged"
    )
    (folder / FILE).unlink()
    refused(
        call("fairseq-generate", *world.options("--datastore", folder), check=False), f"{DOMAIN} is missing"
    )
