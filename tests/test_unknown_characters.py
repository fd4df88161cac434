"""Characters that the model does not know: copied from the source as it was given, and found there by glossaries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig

from fairseq_ccpr import Translator
from fairseq_ccpr.inference.unknown import copies
from fairseq_ccpr.text.languages import LanguageTags
from tests.helpers import DEMO, call, refused, write_lines

OPTIONS: dict[str, Any] = {"device": "cpu", "beam": 2}
MODEL = DEMO / "model.pt"  # whose dictionary has neither braces nor €, nor a dash of its own in English


@pytest.fixture(scope="module")
def translator() -> Iterator[Translator]:
    with Translator(MODEL, **OPTIONS) as one:
        yield one


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("Preis: 5 €", "Preis: 5 €"),
        ("{name}", "{name}"),
        ("Öffnen Sie {path} und {file}.", "Open {path} and {file}."),
        ("Er ging nach 東京.", "He went to 東京."),
        ("😀", "😀"),
        ("— 😀\u00a0😀", "— 😀\u00a0😀"),
        ("€", "€"),
        ("", ""),
    ],
)
def test_unknown_characters_come_through(translator: Translator, source: str, expected: str) -> None:
    (one,) = translator.translate([source])
    assert (one.text, one.source) == (expected, source)
    assert "<unk>" not in one.tokens and len(one.tokens) + bool(one.tokens) == len(one.token_scores)


def test_a_known_character_that_the_target_lacks_is_copied_too(translator: Translator) -> None:
    """In a batch with others, and in the alternatives; the model's own dash is in the source's pieces alone."""
    sources = ["Du hast {count} neue Nachrichten – und 5 € gespart.", "Es fehlen 5 € & 3 £.", "Öffnen"]
    found = list(translator.translate(sources, nbest=2))
    assert found[0].text == "You have {count} new messages – and 5 €." and found[1].text.count("€") == 1
    assert not any(
        "<unk>" in text for one in found for text in (one.text, *(other.text for other in one.alternatives))
    )


def test_fairseqs_option_switches_it_off(tmp_path: Path) -> None:
    for off in (False, "none"):
        with Translator(MODEL, replace_unk=off, **OPTIONS) as translator:
            assert [one.text for one in translator.translate(["{name}", "😀"])] == ["<unk>name<unk>", "<unk>"]
    text = write_lines(tmp_path / "text", "Preis: 5 €")
    words = ["--path", MODEL, "--input", text, "--cpu", "--beam", 2]
    assert call("translate", *words, "--replace-unk").stdout == "Preis: 5 €\n"
    assert call("translate", *words, "--replace-unk", "none").stdout == "Preis: 5 <unk>\n"
    wrong = call("translate", *words, "--replace-unk", "dict.txt", check=False)
    refused(wrong, "--replace-unk is dict.txt.*give none, which leaves <unk>")


def test_glossary_and_explanation_read_the_text_as_given(tmp_path: Path) -> None:
    terms = write_lines(tmp_path / "terms.tsv", "€\teuros", "{name}\tyour name")
    with Translator(MODEL, glossary=str(terms), device="cpu") as translator:
        found = [one.text for one in translator.translate(["Preis: 5 €", "Öffnen Sie {name}.", "Preis: 5 £"])]
    assert found[0] == "Preis: 5 euros" and "your name" in found[1] and found[2] == "Preis: 5 £"
    with Translator(MODEL, datastore=DEMO / "ready", tokens_lambda=0, trust="none", **OPTIONS) as translator:
        explanation = translator.explain(["Preis: 5 €", "— 😀"])
    assert [(one.source, one.translation, one.plain) for one in explanation.sentences] == [
        ("Preis: 5 €", "Preis: 5 €", "Preis: 5 €"), ("— 😀", "— 😀", "— 😀"),
    ]  # fmt: skip
    assert [one.symbol for one in explanation.sentences[0].tokens][-2:] == ["€", "</s>"]
    assert "<unk>" not in json.dumps(asdict(explanation))


def copied(
    bpe: Any, text: str | None, source: list[str], target: list[str], looked_at: list[list[float]]
) -> list[str]:
    """What unknown subwords of a target become that looked so at the subwords of the source, known ones in lower case."""
    dictionary = Dictionary()
    for symbol in [*source, *target]:
        if symbol.strip("▁@").islower() or symbol == "▁":
            dictionary.add_symbol(symbol)
    task = SimpleNamespace(
        source_dictionary=dictionary,
        target_dictionary=dictionary,
        tags=LanguageTags(),
        bpe=bpe,
        tokenizer=None,
    )
    tokens = torch.tensor([*map(dictionary.index, target), dictionary.eos()])
    attention = torch.zeros(len(source) + 2, len(tokens))  # padding, subwords, the end
    unknown = [place for place, symbol in enumerate(target) if symbol not in dictionary]
    for place, row in zip(unknown, looked_at, strict=True):
        attention[1:-1, place] = torch.tensor(row)
    padded = torch.tensor([dictionary.pad(), *map(dictionary.index, source), dictionary.eos()])
    return copies(task, text, padded, {"tokens": tokens, "attention": attention})


def test_no_source_is_read_where_nothing_is_unknown() -> None:
    """That of a GPU would be waited for; these are on a device without any values."""
    task, sources = (
        SimpleNamespace(target_dictionary=Dictionary()),
        torch.empty(3, device="meta", dtype=torch.int64),
    )
    assert copies(task, None, sources, {"tokens": torch.tensor([4, 2])}) == []


@pytest.mark.parametrize(
    ("source", "target", "looked_at", "expected"),
    [
        (["a@@", "X", "b"], ["?"], [[0.2, 0.5, 0.2]], ["X"]),
        (["{@@", "a@@", "}"], ["?", "a@@", "?"], [[0.6, 0.2, 0.1], [0.1, 0.2, 0.5]], ["{@@", "}"]),
        (["X@@", "Y", "a"], ["?"], [[0.2, 0.3, 0.4]], ["X@@ Y"]),  # a run, which together has more
        (["X@@", "Y", "a"], ["?", "?"], [[0.4, 0.1, 0.1], [0.1, 0.5, 0.1]], ["", "X@@ Y"]),  # not twice
        (["X", "a", "Y"], ["?", "?"], [[0.6, 0.1, 0.2], [0.5, 0.1, 0.3]], ["X", "Y"]),
        (["X", "a", "Y"], ["?", "?"], [[0.6, 0.1, 0.0], [0.5, 0.1, 0.05]], ["X", ""]),  # Y was never reached
        (["X", "a"], ["?"], [[0.1, 0.7]], ["a"]),  # the target's dictionary lacks it
    ],
)
def test_runs_are_copied_once(
    source: list[str], target: list[str], looked_at: list[list[float]], expected: list[str]
) -> None:
    bpe = SimpleNamespace(encode=lambda text: text)
    assert copied(bpe, " ".join(source), source, target, looked_at) == expected
    signs = ["⁇" if symbol.strip("@").isupper() or symbol in "{@@}" else symbol for symbol in source]
    without = copied(bpe, None, source, target, looked_at)  # a prepared subset: what they were is not known
    assert [bool(one) for one in without] == [bool(one) for one in expected]
    assert all(part in signs for one in without for part in one.split())


def test_the_given_characters_are_copied_not_the_normalised_ones() -> None:
    """⑩ is read as 10, whose pieces stand for one character: a part of it is written as the piece."""
    bpe = SentencepieceBPE(SentencepieceConfig(sentencepiece_model=str(DEMO / "spm.model")))
    pieces = bpe.encode("da ｛ß｝ ½ 東京").split()
    assert pieces == ["▁da", "▁", "{", "ß", "}", "▁1", "⁄", "2", "▁", "東京"]
    one_each = [[float(n == at) for n in range(len(pieces))] for at in (2, 6, 9)]
    assert copied(bpe, "da ｛ß｝ ½ 東京", pieces, ["da", "?", "▁", "?", "?"], one_each)[0] == "｛"
