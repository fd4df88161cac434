"""What parts consist of is declared once: the page of formats names it all, and keys may be stored otherwise."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from fairseq_ccpr.datastore import learned
from fairseq_ccpr.datastore.manifest import PhraseSection, Section, TextSection, TokenSection
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.schema import KeyForm
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import ROOT, call
from tests.small_models import Ccpr, World, build_options, build_phrases

PARTS: tuple[type[Section], ...] = (TokenSection, PhraseSection, TextSection)


class Int8(KeyForm):
    """A byte for each number, then the two of a scale."""

    def width(self, dimension: int) -> int:
        return dimension + 2

    def encode(self, vectors: torch.Tensor) -> np.ndarray:
        exact = vectors.float().cpu().numpy()
        scale = (np.abs(exact).max(axis=1, keepdims=True, initial=1e-6) / 127).astype(np.float16)
        return np.concatenate(
            [np.rint(exact / scale).clip(-127, 127).astype(np.int8), scale.view(np.int8)], axis=1
        )

    def decode(self, rows: np.ndarray) -> np.ndarray:
        scale = np.ascontiguousarray(rows[:, -2:]).view(np.float16).astype(np.float32)
        return (rows[:, :-2] * scale).astype(np.float16)


def test_the_page_of_formats_names_all_files() -> None:
    page = (ROOT / "datastores/README.md").read_text(encoding="utf-8")
    for part in PARTS:
        for one in part.FILES:
            assert f"\n{part.PART}/{one.file} " in page, one.file


def test_what_must_be_the_same_is_in_the_manifest() -> None:
    for part in PARTS:
        assert set(part.IDENTITY.split()) <= set(part.ORDER.split())
        assert set(part.ROWS) <= {one.name for one in part.FILES}


@pytest.mark.parametrize("form", [PhraseSection.KEY_FORM, Int8("int8", "int8")], ids=["fp16", "int8"])
def test_keys_are_stored_and_read_in_one_form(form: KeyForm, rng: np.random.Generator) -> None:
    vectors = torch.from_numpy(rng.normal(size=(40, 16))).float()
    rows = form.encode(vectors)
    assert rows.shape == form.empty(40, 16).shape and rows.dtype == np.dtype(form.dtype)
    assert rows[0].nbytes == form.row_bytes(16)
    np.testing.assert_allclose(form.decode(rows), vectors, atol=3e-2)
    assert torch.cat([form.none(16, torch.device("cpu")), torch.from_numpy(form.decode(rows))]).shape == (
        40,
        16,
    )


def test_phrases_with_keys_of_another_form(
    world: World, ccpr: Ccpr, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are built, indexed, merged, checked, searched, learned beside and compacted as those of fp16 are."""
    texts = [[y for _, y in islice(read_pairs(ccpr.pairs), start, start + 40)] for start in (0, 40)]
    for name, lines in zip(("one", "two"), texts):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def built(name: str) -> PhraseDatastore:
        output = tmp_path / name
        build_phrases(ccpr, tmp_path / "one", output / "one", "--segmentation", "all")
        build_phrases(ccpr, tmp_path / "two", output / "two", "--segmentation", "all", "--index", "IVF4,Flat")
        call("merge", output / "one", output / "two", "--output", output / "both", "--quiet", "--cpu")
        assert "health         good" in call("inspect", output / "both").stdout
        return PhraseDatastore(output / "both")

    exact = built("fp16")
    keys = np.array(exact.keys)
    monkeypatch.setattr(PhraseSection, "KEY_FORM", Int8("int8", "int8"))
    monkeypatch.setattr(learned, "_PHRASE_KEY", np.dtype("int8"))
    store = built("int8")
    assert "(keys int8, 16 wide)" in call("inspect", store.directory).stdout
    assert store.arrays["keys"].shape == (store.section.size, 18) and store.keys.shape == keys.shape
    assert np.array_equal(store.spans, exact.spans)
    np.testing.assert_allclose(store.keys, keys, atol=1e-2)
    scores, _ = store.open_index().search(torch.from_numpy(np.array(store.keys[:20])).float(), 1)
    np.testing.assert_allclose(scores[:, 0], (store.keys[:20].astype(np.float32) ** 2).sum(1), atol=1e-2)

    call("build", *build_options(world, store.directory), "--subset", "test")
    words = [
        "--datastore",
        store.directory,
        "--path",
        world.model,
        "--phrases-encoder",
        ccpr.checkpoint,
        "--cpu",
    ]
    said = call(
        "learn", *words, "--source", "Es werde Licht!", "--target", "Let there be light and peace!"
    ).stdout
    assert "learned 1 pair" in said
    assert "of them with phrases" in call("inspect", store.directory).stdout
    call("compact", store.directory, "--cpu", "--quiet")
    grown = PhraseDatastore(store.directory)
    assert grown.section.generation == 1 and grown.section.size > store.section.size
    assert "health         good: checksums, numbers, places" in call("inspect", store.directory).stdout
