"""Words of text in any script."""

from __future__ import annotations

import pytest

from fairseq_ccpr.text.words import word_spans


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        (" \t ", []),
        ("  two  spaces\u3000and tab\tend ", ["two", "spaces", "and", "tab", "end"]),
        (
            "»Größe« (50%), z.B. C++!?",
            ["»", "Größe", "«", "(", "50", "%", ")", ",", "z.B", ".", "C", "++", "!", "?"],
        ),
        ("_Datei… --help don't", ["_", "Datei", "…", "--", "help", "don't"]),
        ("Привет, мир!", ["Привет", ",", "мир", "!"]),
        ("سلام، دنیا", ["سلام", "،", "دنیا"]),
        ("हिन्दी में।", ["हिन्दी", "में", "।"]),
        ("用Linux2吧。好", ["用", "Linux2", "吧", "。", "好"]),
        ("カタカナ、です", ["カ", "タ", "カ", "ナ", "、", "で", "す"]),
        ("ที่นี่ ok", ["ที่", "นี่", "ok"]),
        ("한국어 문장.", ["한국어", "문장", "."]),
        ("He said: “No...”", ["He", "said", ":", "“", "No", "...", "”"]),
        ("state-of-the-art U.S. 3.5% (x)", ["state-of-the-art", "U.S", ".", "3.5", "%", "(", "x", ")"]),
        ("日本語 text、ok。", ["日", "本", "語", "text", "、", "ok", "。"]),
        ("ที่นี่", ["ที่", "นี่"]),
        ("C++ great😀!?", ["C", "++", "great", "😀", "!", "?"]),
        ("❤\ufe0f👍\U0001f3fd", ["❤\ufe0f", "👍\U0001f3fd"]),
        ("Cafe\u0301s نمی\u200cخواهم", ["Cafe\u0301s", "نمی\u200cخواهم"]),
        ("  \u200b\n", []),
        ("...", ["..."]),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert [text[start:end] for start, end in word_spans(text)] == words
