"""The recipes that no other test runs: what they print, on real models and phrase pairs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fairseq_ccpr.datastore.preprocessing import read_preprocessing
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import ROOT, call, run
from tests.small_models import TINY, World, build

pytestmark = pytest.mark.full


def test_fuzzy_matches_are_copied(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text(
        "Öffne die Datei jetzt\tOpen the file now\nÖffne die Datei\tOpen the file\n"
    )
    (tmp_path / "source").write_text("Öffne die Datei bald\nSchließe das Fenster\nÖffne die Datei\n")
    (tmp_path / "base").write_text("one\ntwo\nthree\n")
    words = [tmp_path / name for name in ("train.tsv", "source", "base")]
    done = run("scripts/recipes/fuzzy_copy.py", *words)
    assert done.stdout == "one\ntwo\nOpen the file\n" and "1 of 3 sentences copied" in done.stderr
    done = run("scripts/recipes/fuzzy_copy.py", *words, 0.7)
    assert (
        done.stdout == "Open the file now\ntwo\nOpen the file\n" and "2 of 3 sentences copied" in done.stderr
    )


def test_terms_of_a_domain(tmp_path: Path) -> None:
    """Terms are words of the domain that general text has seldom or never; those it has often are none."""
    nouns = {"Drucker": "printer", "Kachel": "tile", "Kanne": "jug", "Datei": "file"}
    frames = {
        "Wo ist {}?": "Where is {}?",
        "Hier steht {}.": "Here stands {}.",
        "Ich mag {} sehr.": "I like {} a lot.",
    }
    rows = [
        f"{german.format(noun)}\t{english.format(translation)}\n"
        for german, english in frames.items()
        for noun, translation in nouns.items()
    ]
    (tmp_path / "train.tsv").write_text("".join(rows * 4), encoding="utf-8")
    general = [f"Here stands a file I like a lot, word{number} word{number}" for number in range(1000)]
    (tmp_path / "general").write_text("\n".join([*general, "a jug here", ""]), encoding="utf-8")
    texts = {
        "source": ["Der DRUCKER und die Datei.", "Eine Kachel", "Kachel, Kanne", "Drucker"],
        "reference": ["The printer and the file.", "A brick", "tile, jug", "Printer"],
        "first": ["The printer and the file.", "A tile", "tile, pot", "Pressure"],
        "second": ["The press and the file.", "A tile", "tile, jug", "printer"],
    }
    for name, lines in texts.items():
        (tmp_path / name).write_text("\n".join([*lines, ""]), encoding="utf-8")
    words = [tmp_path / name for name in ("train.tsv", "general", "source", "reference")]
    systems = [f"{name}={tmp_path / name}" for name in ("first", "second")]
    done = run("scripts/recipes/domain_terms.py", *words, *systems).stdout.splitlines()
    assert done[0] == "3 terms, 4 occurrences in 4 sentences"
    assert done[1] == "first writes 2 of them and misses 2"
    assert (
        done[3]
        == "|  | terms written | by chance | difference | gained of the missed | lost of the written |"
    )
    assert done[5] == "| first | 50.0% | 0.0% |  |  |  |"
    assert done[6].startswith("| second | 75.0% | 0.0% | +25.0 (") and done[6].endswith(" | 100% | 50% |")
    (tmp_path / "second").write_text("one\n", encoding="utf-8")
    short = run("scripts/recipes/domain_terms.py", *words, *systems, check=False)
    assert short.returncode and "second has 1 lines and" in short.stderr


def test_what_is_copied_and_what_the_source_does_not_say(tmp_path: Path) -> None:
    """Of three translations one stands in the text, one in nothing of the source; the reference is neither."""
    nouns = {"Drucker": "printer", "Kachel": "tile", "Kanne": "jug", "Datei": "file"}
    frames = {
        "Wo ist {}?": "Where is {}?",
        "Hier steht {}.": "Here stands {}.",
        "Ich mag {} sehr.": "I like {} a lot.",
    }
    pairs = [(one.format(noun), two.format(nouns[noun])) for one, two in frames.items() for noun in nouns]
    frequent = [
        " ".join(f"word{number}" for number in range(first, first + 12)) for first in range(0, 120, 12)
    ]
    rows = [*pairs * 4, *zip(frequent * 20, frequent * 20)]
    texts = {
        "train.tsv": [f"{one}\t{two}" for one, two in rows],
        "text": ["Now I like jug a lot, here stands file"],
        "source": [
            "Ich mag die Glaskanne sehr. Hier steht die Datei.",
            "Wo ist der Drucker?",
            "Hier steht die Kachel.",
        ],
        "reference": [
            "I like a jug a lot; the file stands here.",
            "Where is the printer?",
            "Here stands the tile.",
        ],
        "copied": ["I like jug a lot - here stands FILE!", "Where is the printer?", "Here stands the tile."],
        "apart": ["Where is printer, where is tile?", "Where is the printer?", "Here stands the tile."],
        "lexicon": ["Datei\tprinter, tile"],
    }
    for name, lines in texts.items():
        (tmp_path / name).write_text("\n".join([*lines, ""]), encoding="utf-8")
    words = [tmp_path / name for name in ("train.tsv", "text", "source")]
    words += [f"{name}={tmp_path / name}" for name in ("reference", "copied", "apart")]

    def measured(*more: object) -> dict[str, list[str]]:
        lines = run("scripts/recipes/faithfulness.py", *words, *more).stdout.splitlines()
        return {cells[0]: cells[1:] for cells in (line.strip("| ").split(" | ") for line in lines[2:])}

    shown = measured()
    assert shown["reference"] == ["6.0", "0.0%", "0.0%", "0.0%"]
    assert shown["copied"] == ["5.3", "50.0%", "0.0%", "0.0%"]
    assert shown["apart"] == ["4.7", "0.0%", "44.4%", "33.3%"]
    thirds = {
        text: turn for name in ("source", "reference", "copied") for turn, text in enumerate(texts[name])
    }
    thirds[texts["apart"][0]] = 1.5
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in thirds), encoding="utf-8")
    turns = np.array([*thirds.values()]) * 2 * np.pi / 3
    np.save(tmp_path / "vectors.npy", np.stack([np.cos(turns), np.sin(turns)], 1))
    shown = measured("--lexicon", tmp_path / "lexicon", "--encoder", tmp_path)
    assert shown["apart"] == ["4.7", "0.0%", "22.2%", "0.0%", "0.171"] and shown["copied"][4] == "1.000"


@pytest.mark.parametrize(
    ("kind", "size", "added"),
    [
        ("adapters", "--adapter-width", "adapter.up.weight"),
        ("lora", "--lora-rank", "fc1.parametrizations.weight.0.up"),
    ],
)
def test_added_weights_alone_are_trained(
    world: World, tmp_path: Path, kind: str, size: str, added: str
) -> None:
    """A plain checkpoint is where they start, as that model; what they are trained to is then translated with."""
    plug_in = ROOT / "scripts/recipes/added_weights"
    words = ["--user-dir", plug_in, "--arch", f"transformer_{kind}", size, 8, *TINY.split()]
    words += ["--decoder-embed-dim", 32, "--decoder-ffn-embed-dim", 64, "--max-tokens", 1500]
    words += ["--task", "translation_cpu_bf16", "--finetune-from-model", world.model, "--cpu"]
    (tmp_path / "in.txt").write_text("Und Gott sprach: Es werde Licht.\n", encoding="utf-8")
    of_data = ["--data", world.data_bin, "--cpu", "--input", tmp_path / "in.txt"]
    alone = call("translate", "--path", world.model, *of_data).stdout
    before = torch.load(world.model)["model"]
    for rate, folder in ((0, tmp_path / "untrained"), (0.02, tmp_path / "trained")):
        of_training = ["--max-update", 2, "--lr", rate, "--save-dir", folder]
        call("fairseq-train", world.data_bin, *words, *of_training)
        path = folder / "checkpoint_best.pt"
        after = {
            name.replace(".parametrizations.weight.original", ".weight"): value
            for name, value in torch.load(path)["model"].items()
        }
        assert all(torch.equal(value.float(), after[name].float()) for name, value in before.items())
        for layer in ("encoder.layers.0", "decoder.layers.0", "decoder.layers.1"):
            assert after[f"{layer}.{added}"].any() == (rate > 0)
        translated = call("translate", "--path", path, "--user-dir", plug_in, *of_data).stdout
        assert (translated == alone) == (rate == 0)


def test_the_base_models_recipe_trains_the_reverse_model(world: World, tmp_path: Path) -> None:
    languages = {"SOURCE": "de", "TARGET": "en", "REVERSE": "1"}
    subwords = {"SPM": str(world.spm), "DICT": str(world.data_bin / "dict.en.txt"), "FROM": str(world.model)}
    settings = {
        **languages,
        **subwords,
        "UPDATES": "2",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    tables = [world.folder / f"{subset}.tsv" for subset in ("train", "valid")]
    small = [
        *TINY.split(),
        "--decoder-embed-dim",
        "32",
        "--decoder-ffn-embed-dim",
        "64",
        "--warmup-updates",
        "1",
    ]
    small += ["--max-tokens", "1500"]
    done = run(
        ROOT / "scripts/recipes/train_base_model.sh", *tables, tmp_path / "reverse", *small, **settings
    )
    assert done.stdout.splitlines()[-1] == f"the model: {tmp_path}/reverse/model.pt"
    prepared = read_preprocessing(tmp_path / "reverse/data-bin")
    assert prepared is not None and (prepared.source_lang, prepared.target_lang) == ("en", "de")
    assert list(read_pairs(tmp_path / "reverse/text/valid.tsv")) == [
        (target, source) for source, target in read_pairs(world.folder / "valid.tsv")
    ]
    of_text = ["--monolingual", tmp_path / "mono.txt", "--reverse-model", tmp_path / "reverse/model.pt"]
    (tmp_path / "mono.txt").write_text("And God said, Let there be light.\n", encoding="utf-8")
    build(world, tmp_path / "store", *of_text)
    assert len(list(read_pairs(tmp_path / "store/back-translations/pairs.tsv"))) == 1


def test_how_near_translations_are_to_references(tmp_path: Path) -> None:
    texts = ["a", "b", "c", "d"]
    vectors = np.array([[1, 0], [0, 1], [0.6, 0.8], [0.8, 0.6]], np.float32)
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder/texts.txt").write_text("\n".join([*texts, ""]), encoding="utf-8")
    np.save(tmp_path / "encoder/vectors.npy", vectors)
    for name, file, lines in (
        ("base", "base", "bcb"),
        ("near", "retrieval", "dca"),
        ("same", "retrieval", "dca"),
    ):
        folder = tmp_path / "office" / name
        folder.mkdir(parents=True)
        for path, text in ((f"{file}.txt", lines), ("reference.txt", "aca")):
            (folder / path).write_text("\n".join([*text, ""]), encoding="utf-8")
    output = tmp_path / "cosine.json"
    words = [
        output,
        tmp_path / "office",
        "--encoder",
        tmp_path / "encoder",
        "--systems",
        "base",
        "near",
        "same",
    ]
    shown = run("scripts/recipes/reference_cosine.py", *words).stdout
    (found,) = json.loads(output.read_text(encoding="utf-8"))["domains"].values()
    rows = {name: row[str(tmp_path / "encoder")] for name, row in found["systems"].items()}
    assert found["sentences"] == 3 and "| near | 0.9333 |" in shown
    assert rows["base"]["cosine"] == pytest.approx(1 / 3) and rows["near"]["cosine"] == pytest.approx(2.8 / 3)
    assert rows["base"]["p"] == {} and rows["near"]["p"]["base"] < 0.2 and rows["same"]["p"]["near"] == 1
