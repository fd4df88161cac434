"""Manifests: every byte of a datastore counts, and those of other formats are refused."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fairseq_ccpr.datastore import parts
from fairseq_ccpr.datastore.manifest import (
    MANIFEST_VERSION,
    PHRASE,
    TOKEN,
    Manifest,
    PhraseSection,
    ProjectionDescription,
    Source,
    TextSection,
    TokenSection,
)
from fairseq_ccpr.datastore.opened_part import OpenedPart
from fairseq_ccpr.datastore.source_index import write_source_index
from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.lab.xpr.lexicon import Lexicon, LexiconManifest, write_lexicon
from fairseq_ccpr.phrases.pair_store import PairWriter, PhraseManifest, PhrasePairs
from fairseq_ccpr.search import IndexDescription, RemoteKeys, StoreAddress, build_index
from fairseq_ccpr.search.index_plan import plan_index
from fairseq_ccpr.storage.arrays import save_array
from fairseq_ccpr.storage.equal_strings import hash_strings
from fairseq_ccpr.storage.files import (
    CHECKSUM,
    MANIFEST,
    describe_files,
    read_checked_json,
    write_checked_json,
    write_json,
)
from fairseq_ccpr.storage.text_lines import TextLines, write_lines
from tests.helpers import ROOT, call, contents, edit_manifest
from tests.vectors import clustered

SENTENCES = ["ein Haus", "das Haus am See", "der Weg zurück"]
ENTRIES, WIDTH = 60, 8


@pytest.fixture(scope="module")
def datastore(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens and phrases, each with an index in files of its own."""
    folder = tmp_path_factory.mktemp("manifests") / "datastore"
    keys = clustered(ENTRIES, WIDTH)
    tokens, phrases = folder / TOKEN, folder / PHRASE
    for part in (tokens, phrases):
        part.mkdir(parents=True)
        save_array(part / "keys.npy", keys)
    save_array(tokens / "values.npy", np.arange(ENTRIES, dtype=np.int32) % 4)
    provenance = np.stack([np.zeros(ENTRIES, np.int32), np.arange(ENTRIES, dtype=np.int32)], axis=1)
    save_array(tokens / "provenance.npy", provenance)
    described = write_source_index(tokens, [(0, np.array([1, 2], np.int32))], provenance, 4, 3)
    (tokens / parts.SYMBOLS).write_text("</s>\na\nb\nc\n")
    spans = np.tile(np.array([[0, 0, 3], [2, 4, 7]], np.int32), (ENTRIES // 2, 1))
    save_array(phrases / "spans.npy", spans)
    write_lines(phrases / parts.LINES, phrases / f"{parts.LINE_OFFSETS}.npy", SENTENCES)
    lines = TextLines(phrases / parts.LINES, phrases / f"{parts.LINE_OFFSETS}.npy", len(SENTENCES))
    save_array(phrases / f"{parts.STRING_HASHES}.npy", hash_strings(spans, lines))
    write_json(phrases / parts.TOTALS, {"sentences": len(SENTENCES), "phrases": ENTRIES, "too_long": 0})
    in_memory, on_disk = (
        plan_index(choice, "ip", "", ENTRIES, WIDTH) for choice in ("IVF2,Flat", "disk:IVF2,SQ8")
    )
    build_index(keys, in_memory, tokens / in_memory.file, lambda rows: None)
    build_index(keys, on_disk, phrases / on_disk.file, lambda rows: None)
    fingerprints = {"model": "0" * 64, "corpus": "1" * 64}
    manifest = Manifest(
        TokenSection(
            size=ENTRIES, dimension=WIDTH, key_layer="decoder_output", subsets={"train": 3}, index=in_memory,
            fingerprints=fingerprints, index_recall=0.1 + 0.2, source_index=described,
        ),
        PhraseSection(
            size=ENTRIES, dimension=WIDTH, sentences=len(SENTENCES), segmentation={"kind": "ngram:2"}, index=on_disk,
            encoder="Wörter/encoder.pt", fingerprints={"encoder": "2" * 64},
        ),
    )  # fmt: skip
    assert manifest.token is not None and manifest.phrase is not None
    manifest.token.files = describe_files(folder, [f"token/{name}" for name in manifest.token.names])
    manifest.phrase.files = describe_files(folder, [f"phrase/{name}" for name in manifest.phrase.names])
    manifest.write(folder)
    assert "health         good" in call("inspect", folder).stdout
    return folder


@pytest.fixture
def copied(datastore: Path, tmp_path: Path) -> Path:
    return shutil.copytree(datastore, tmp_path / "copied")


def flip(content: bytes, bit: int) -> bytes:
    """The same with one bit changed."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def changes(content: bytes, rng: np.random.Generator, flips: int, cuts: int) -> list[bytes]:
    """Random bits flipped, and the file cut off at random places, at its last byte too."""
    bits = rng.choice(8 * len(content), min(flips, 8 * len(content)), replace=False)
    lengths = {0, len(content) - 1, *rng.integers(0, len(content), cuts).tolist()}
    return [flip(content, bit) for bit in bits] + [content[:length] for length in lengths]


def test_what_is_written_is_read(datastore: Path, copied: Path):
    manifest = Manifest.read(datastore)
    manifest.write(copied)
    assert contents(copied) == contents(datastore)
    assert list(read_checked_json(copied / MANIFEST)) == [
        "format_version",
        "token",
        "phrase",
        "created_with",
        CHECKSUM,
    ]


def test_every_byte_of_a_manifest_counts(copied: Path, rng: np.random.Generator):
    path = copied / MANIFEST
    content = path.read_bytes()
    for changed in changes(content, rng, flips=2000, cuts=300):
        path.write_bytes(changed)
        with pytest.raises(DatastoreError, match=r"manifest\.json is damaged|holds no datastore"):
            Manifest.read(copied)
    path.write_bytes(content)
    Manifest.read(copied)


def test_every_byte_of_a_text_manifest_counts(tmp_path: Path, rng: np.random.Generator):
    settings = ("de", "en", {"max": 2}, {"text": "0" * 64})
    with PairWriter(tmp_path / "pairs", PhraseManifest("train", *settings)) as writer:
        writer.add("ein Haus", "a house", np.array([[0, 3, 0, 1]], np.int32))
    examples = {"Haus": [("ein Haus", 4, 8)]}, {"house": [("a house", 2, 7)]}
    write_lexicon(tmp_path / "lexicon", LexiconManifest(*settings), [("Haus", "house")], examples)
    for folder, reader in (("pairs", PhrasePairs), ("lexicon", Lexicon)):
        path = tmp_path / folder / MANIFEST
        content = path.read_bytes()
        reader(path.parent)
        for changed in changes(content, rng, flips=500, cuts=100):
            path.write_bytes(changed)
            with pytest.raises(DatastoreError):
                reader(path.parent)


def test_damage_to_any_file_is_found(copied: Path, rng: np.random.Generator):
    whole = contents(copied)
    assert len(whole) == 20  # manifest, 11 of tokens, 8 of phrases
    for name, content in whole.items():
        for changed in changes(content, rng, flips=12, cuts=3):
            (copied / name).write_bytes(changed)
            done = call("inspect", copied, check=False)
            assert done.returncode == 1 and "Traceback" not in done.stderr, (name, len(changed), done.stderr)
            said = done.stdout + done.stderr  # of the first bytes of an array: what it holds, and should
            assert "damaged" in said or "but the manifest says" in said or name == MANIFEST
        (copied / name).unlink()
        assert call("inspect", copied, check=False).returncode == 1
        (copied / name).write_bytes(content)
    assert call("inspect", copied).returncode == 0


@pytest.mark.parametrize("version", [1, 4, 5, MANIFEST_VERSION - 1, MANIFEST_VERSION + 1])
def test_other_versions_are_refused(copied: Path, version: int) -> None:
    """Also without a checksum, as the first four had none."""
    if version < 5:
        data = json.loads((copied / MANIFEST).read_text()) | {"format_version": version}
        write_json(copied / MANIFEST, {name: value for name, value in data.items() if name != CHECKSUM})
    else:
        edit_manifest(copied, format_version=version)
    advice = "build the datastore again" if version < MANIFEST_VERSION else "upgrade fairseq-ccpr"
    with pytest.raises(
        DatastoreError, match=f"has format version {version}, and this .* reads {MANIFEST_VERSION}: {advice}$"
    ):
        Manifest.read(copied)


def test_a_manifest_without_its_checksum_or_with_unknown_entries_is_damaged(copied: Path) -> None:
    data = json.loads((copied / MANIFEST).read_text())

    def opening_fails(pattern: str) -> None:
        with pytest.raises(DatastoreError, match=pattern):
            Manifest.read(copied)

    write_json(copied / MANIFEST, {name: value for name, value in data.items() if name != CHECKSUM})
    opening_fails("it lacks its checksum.: copy it again, or build the datastore again")
    write_json(copied / MANIFEST, data | {"format_version": 4})
    opening_fails("checksum is not that of its bytes")
    write_json(copied / MANIFEST, data)
    edit_manifest(copied, other=1)
    opening_fails("it has an unknown entry 'other'")
    write_json(copied / MANIFEST, data)
    edit_manifest(copied, token=data["token"] | {"colour": "red"})
    opening_fails("it has an unknown entry 'colour'")


TOKENS = TokenSection(
    size=3, dimension=2, key_layer="ffn", subsets={"train": 1}, fingerprints={"keys": "0"},
    index=IndexDescription("exact", "ip"), projection=ProjectionDescription(2, 16, True),
)  # fmt: skip


def test_everything_a_section_knows_is_read_again(tmp_path: Path) -> None:
    source = Source("a", "1", 2, 3, 0.5, {"valid": 1}, 4, "2")
    common = {"index": IndexDescription("milvus", "l2", "HNSW", "M=8"), "fingerprints": {"corpus": "3"}}
    store = StoreAddress("http://localhost:19530", "keys")
    for manifest in (
        Manifest(TOKENS),
        Manifest(
            replace(TOKENS, sources=[source], store=store, ancestors=["4"], shard=[0, 2, 9], share=0.5),
            PhraseSection(
                size=1, dimension=2, sentences=3, segmentation={"kind": "ngram:2"}, encoder="e", pooled=True, store=store,
                **common,
            ),
            TextSection(size=5, sentences=2, words=9, order=4, tables={"grams": [1]}, fingerprints={}, general=3),
            "fairseq-ccpr 0.1.0",
        ),
    ):  # fmt: skip
        manifest.write(tmp_path)
        assert Manifest.read(tmp_path) == manifest
        assert [part.PART for part in manifest.parts] == ["token", "phrase", "text"][: len(manifest.parts)]
    assert manifest.text is not None and str(manifest.text.index) == "exact"


def test_what_was_learned_moves_a_part_to_a_folder_of_its_own(tmp_path: Path) -> None:
    files = {f"{folder}/keys.npy": {"bytes": 1, "sha256": folder} for folder in ("token", "token-2")}
    for section, known in (
        (replace(TOKENS, files=files), (0, "token", "token", "token")),
        (replace(TOKENS, files=files, ancestors=["a", "b"]), (2, "token-2", "token-2", "token-2")),
        (TOKENS, (0, "token", None, "0")),
    ):
        assert (
            section.generation,
            section.folder,
            section.digest("keys.npy"),
            section.keys_fingerprint,
        ) == known
    Manifest(replace(TOKENS, ancestors=["a", "b"])).write(tmp_path)
    assert OpenedPart(tmp_path, TokenSection).keys_fingerprints == ["0", "a", "b"]
    Manifest(replace(TOKENS, files=files)).write(tmp_path)
    with pytest.raises(DatastoreError, match=r"keys\.npy is missing"):
        OpenedPart(tmp_path, TokenSection)
    with pytest.raises(
        DatastoreError, match="has no phrase part: build one with `fairseq-ccpr build phrases`"
    ):
        OpenedPart(tmp_path, PhraseSection)


def test_keys_in_a_database_are_told_apart_by_what_they_were_built_from() -> None:
    store = StoreAddress("http://localhost:19530", "keys")
    kept = replace(TOKENS, store=store, index=IndexDescription("milvus", "ip", "HNSW", "ef=9"))
    identity = {
        "dimension": 2, "key_layer": "ffn", "subsets": {"train": 1}, "share": 1.0, "shard": None, "size": 3,
        "fingerprints": {"keys": "0"}, "index": "HNSW",
        "projection": {"query_dimension": 2, "adapter_dimension": 16, "pca": True},
    }  # fmt: skip
    assert kept.remote_keys(5.0, "secret") == RemoteKeys(store, 3, 2, identity, 5.0, "secret")
    assert kept.remote_keys(5.0).token == ""  # the environment's
    phrases = PhraseSection(
        size=1,
        dimension=2,
        sentences=3,
        segmentation={},
        encoder="e",
        fingerprints={},
        index=kept.index,
        store=store,
    )
    assert phrases.remote_keys(5.0).identity == {
        "dimension": 2, "segmentation": {}, "share": 1.0, "shard": None, "fingerprints": {}, "sentences": 3, "size": 1,
        "index": "HNSW",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("described", "name"),
    [((8, 0, True), "unit"), ((8, 16, False), "clknn16"), ((8, 16, True), "clknn16+pca")],
)  # fmt: skip
def test_projections_have_names(described: tuple[int, int, bool], name: str) -> None:
    assert str(ProjectionDescription(*described)) == name


def test_what_is_no_datastore_is_told_from_what_was_meant(tmp_path: Path) -> None:
    def fails(folder: Path, pattern: str) -> None:
        with pytest.raises(DatastoreError, match=pattern):
            Manifest.read(folder)

    store = tmp_path / "store"
    fails(store, "no datastore at .*store: no such directory")
    (store / "token.partial").mkdir(parents=True)
    fails(store, "is unfinished")
    (store / "token.partial").rename(store / "token")
    (store / "token" / "plan.json").touch()
    fails(store, "is unfinished")
    (store / "token" / "plan.json").unlink()
    fails(store, "it has no manifest.json; build one")
    write_json(store / MANIFEST, {"format_version": 1, "other": {}})
    fails(store, "its manifest.json is that of something else")
    write_json(store / MANIFEST, {"token": {}})
    fails(store, re.escape("manifest.json is damaged (KeyError('format_version'))"))
    for near in (store / "token", tmp_path):  # above it, and below
        fails(near, f"did you mean {store}[?]")
    fails(store / MANIFEST, "is a file, and a datastore is a folder")


@pytest.mark.parametrize("version", [0, -1, "1", None, 1.5])
def test_a_version_that_never_was_is_damage(tmp_path: Path, version: object) -> None:
    write_json(tmp_path / MANIFEST, {"format_version": version, "token": {}})
    with pytest.raises(
        DatastoreError, match=r"manifest\.json is damaged \(it has format version .*, and the first is 1\)"
    ):
        Manifest.read(tmp_path)


def test_a_checksum_whose_name_is_damaged_is_missed(tmp_path: Path) -> None:
    write_checked_json(path := tmp_path / "tuned.json", {"format_version": 1, "tuned": {}})
    whole = path.read_bytes()
    for place in range(whole.index(CHECKSUM.encode()), whole.index(CHECKSUM.encode()) + len(CHECKSUM)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(ValueError):
                read_checked_json(path, 1)
    write_json(path, {"format_version": 1, "tuned": {}})
    with pytest.raises(ValueError, match="it lacks its checksum"):
        read_checked_json(path, 1)


def test_the_page_of_formats_names_the_version_that_is_written() -> None:
    page = (ROOT / "datastores/README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `format_version` \| (\d+), the only one", page, re.MULTILINE) == [
        str(MANIFEST_VERSION)
    ]
