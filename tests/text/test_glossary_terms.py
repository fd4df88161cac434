"""A glossary's terms are found in sentences of every script, as they are written there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unicodedata import normalize

import pytest
import regex
from hypothesis import assume, example, given
from hypothesis import strategies as st

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.text.glossary import Glossary

Find = Callable[[str, list[str]], list[str]]


@pytest.fixture
def find(tmp_path: Path) -> Find:
    def found(sentence: str, terms: list[str]) -> list[str]:
        path = tmp_path / "terms.tsv"
        path.write_text("".join(f"{term}\tx\n" for term in terms), encoding="utf-8", newline="\n")
        return [sentence[start:end] for start, end, _ in Glossary(path).find(sentence)]

    return found


@pytest.mark.parametrize(
    ("sentence", "terms", "found"),
    [
        ("この契約は本日発効する。iPhoneの契約", ["契約", "iPhone"], ["契約", "iPhone", "契約"]),
        ("ソフトウェア契約、ﾃﾞｰﾀﾍﾞｰｽ", ["ソフト", "データ"], ["ソフト", "ﾃﾞｰﾀ"]),
        ("使用iPhone手机", ["使用 iPhone"], ["使用iPhone"]),
        ("สัญญานี้มีผล ភាសាខ្មែរ", ["สัญญา", "ភាសា"], ["สัญญา", "ភាសា"]),
        ("คำนี้", ["คา", "ค"], []),
        ("कानून का अनुबंध है।", ["अनुबंध", "नून", "कान", "क"], ["अनुबंध"]),
        ("이 계약은 API는 이계약 삼성TV", ["계약", "API", "TV"], ["계약", "API", "TV"]),
        ("བོད་ཡིག་ནི།", ["བོད་ཡིག", "བོ"], ["བོད་ཡིག"]),
        ("الـعـقـد والعقد", ["العقد"], ["الـعـقـد"]),
        ("می‌خواهم", ["میخواهم"], ["می‌خواهم"]),
        (normalize("NFD", "Das Café"), ["café"], [normalize("NFD", "Café")]),
        ("Das Café", [normalize("NFD", "café"), "cafe"], ["Café"]),
        ("cafe\u0301\u0302", ["café"], []),
        ("l’amour, l'accord, п’ять", ["l'amour", "accord", "п'ять"], ["l’amour", "accord", "п’ять"]),
        ("Ver\u00adtrags Ver\u00adtrag", ["Vertrag"], ["Ver\u00adtrag"]),
        ("STRASSE, Straße, Straßen", ["straße"], ["STRASSE", "Straße"]),
        ("İş istanbul IŞIK ışık", ["iş", "İstanbul", "ışık"], ["İş", "istanbul", "ışık"]),
        ("Die ＡＰＩ, die API", ["ＡＰＩ"], ["ＡＰＩ", "API"]),
        ("Windows™ Vertrag² CO₂ CO2", ["Windows", "Vertrag", "CO2"], ["Windows", "Vertrag", "CO₂", "CO2"]),
        ("E‑Mail, E-Mail, Email", ["E-Mail"], ["E‑Mail", "E-Mail"]),
        ("New\u00a0York NewYork z.B. z. B.", ["new york", "z. B."], ["New\u00a0York", "z.B.", "z. B."]),
        ("inform 3.5 5km", ["in form", "5", "km"], []),
        ("👩‍🚀 C++", ["👩", "C++"], ["C++"]),
    ],
)
def test_terms_are_words_where_there_are_words(
    sentence: str, terms: list[str], found: list[str], find: Find
) -> None:
    assert find(sentence, terms) == found


ALPHABET = "aZßİ'’-.3 \u00ad\u200d\u200b\u0301क्षि契ーカﾞｶサ한ㄱ\u1161ไทស្ខ་ذـ\u0600👩™½\u3000\u0600\u115f"
UNSEEN = regex.compile(r"\p{Default_Ignorable_Code_Point}")
TERMS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(ALPHABET), min_size=1), max_size=12
)


@example(words=["a\x1f\u0301"], around="")
@example(words=["\x1c\u0301", "b\x1d"], around="a")
@given(words=TERMS, around=st.sampled_from(["", "a", "契", "한", "\u0e01"]))
def test_any_term_is_found_between_spaces_or_refused(words: list[str], around: str, find: Find) -> None:
    term = " ".join(words).replace("\ufeff", "").translate(dict.fromkeys(map(ord, "\t\n\r")))
    try:
        found = find(f"{around} {term} {around}", [term])
    except ConfigurationError as error:
        assert (
            "terms.tsv, line 1 has no source term" in str(error)
            or "has no term" in str(error)
            or len(term.split()) > 12
        )
    else:
        assume(not around or not normalize("NFKC", term).casefold().startswith(around))
        (one,) = found
        assert UNSEEN.sub("", one) == UNSEEN.sub("", term).strip()


def test_terms_of_nothing_that_is_seen_are_refused(tmp_path: Path) -> None:
    (tmp_path / "terms.tsv").write_text("\u00ad\u200b\tx\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="line 1 has no source term"):
        Glossary(tmp_path / "terms.tsv")


@pytest.mark.parametrize(
    ("table", "variants"),
    [
        ('"Münze"\t"coin"\n"""Rote"" Karte"\t"red\ncard"\n', {"münze": ["coin"], '"rote"karte': ["red card"]}),
        ('"Halt"\t"stop"\nMünze\tcoin\n', {'"halt"': ['"stop"'], "münze": ["coin"]}),
        ('"Hund, großer"\tbig dog\nTor\tgate\n', {"hund,grosser": ["big dog"], "tor": ["gate"]}),
        ("Münze\tcoin\tDE\tEN-US\nTor\tgate\tDE\tEN-US\n", {"münze": ["coin"], "tor": ["gate"]}),
        ("Source\tTarget\nMünze\tcoin\tDE\tEN-US\nTor\tgate\tDE\tEN-GB\n", {"münze": ["coin"], "tor": ["gate"]}),
        ("German\tEN-GB\tEN-US\nTor\tgate\tdoor\n", {"tor": ["gate", "door"]}),
        ("Münze\tcoin\tEN-US\n\nTor\tgate\tEN-GB\n", {"münze": ["coin"], "tor": ["gate"]}),
        ("EDV\tdata processing\tIT\nTor\tgate\n", {"edv": ["data processing", "IT"], "tor": ["gate"]}),
        ('Münze,coin,DE,EN\n"Hund, großer",big dog,DE,EN\n', {"münze": ["coin"], "hund,grosser": ["big dog"]}),
        ('Entry_ID;German;English\n7;Tor;"gate; ""door"""\n8;Hund, der;dog\n',
         {"tor": ['gate; "door"'], "hund,der": ["dog"]}),
        ("Münze\tcoin\tpiece\tcash\nTor\tgate\n", {"münze": ["coin", "piece", "cash"], "tor": ["gate"]}),
        ("Entry_ID\tEntry_Note\tGerman\tGerman_Def\tTerm_Info\tGerman\tTerm_Info\tEnglish_UK\tEnglish_UK_Def\tTerm_Info\n"
         '7\tx\tTor\td\tCase\tPforte\tCase\tgate\td\t"Case; ""no"""\n8\t\tMünze\t\t\t\t\tcoin\n',
         {"tor": ["gate"], "pforte": ["gate"], "münze": ["coin"]}),
        ("\ufeffMünze\tcoin\n\ufeffTor\tgate\n", {"münze": ["coin"], "tor": ["gate"]}),
    ],
)  # fmt: skip
def test_tables_of_spreadsheets_and_of_other_tools_are_read(
    tmp_path: Path, table: str, variants: dict[str, list[str]]
) -> None:
    (tmp_path / "terms.tsv").write_text(table, encoding="utf-8", newline="\n")
    assert Glossary(tmp_path / "terms.tsv").variants == variants
    (tmp_path / "terms.tsv").write_text('a\t"b "c\nd"\n', encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"terms\.tsv cannot be read .*a quoted cell does not end"):
        Glossary(tmp_path / "terms.tsv")


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ("Tor,gate\nMünze,coin,piece\n", "has no tabs, and [,] may be part of terms"),
        ("Tor, das\nMünze, die\n", "has no tabs, and [,] may be part of terms"),
        ("Tor,x;gate\nMünze,y;coin\n", "has no tabs, and [,] or ; may be part of terms"),
        (
            "Tor\tgate\tDE\tEN\nTor\tporte\tDE\tFR\n",
            r"has terms of several languages \(en, fr\): keep those of one pair",
        ),
        ("de\ten\tfr\nTor\tgate\tporte\n", r"has terms of several languages \(en, fr\)"),
        ("Tor\tgate\tDE\tEN\ngate\tTor\tEN\tDE\n", r"has terms of several languages \(de, en\)"),
    ],
)
def test_tables_that_are_not_clear_are_refused(tmp_path: Path, table: str, fault: str) -> None:
    (tmp_path / "terms.tsv").write_text(table, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=f"terms.tsv {fault}"):
        Glossary(tmp_path / "terms.tsv")


def test_a_large_glossary_takes_time_by_the_sentence_alone(find: Find) -> None:
    terms = [f"Wort{number} Vertrag" for number in range(3000)]
    assert find("Der Wort2999 Vertrag " * 100, terms) == ["Wort2999 Vertrag"] * 100


def test_terms_given_later_replace_those_of_another_glossary(tmp_path: Path) -> None:
    (tmp_path / "terms.tsv").write_text("Herr\tLord\nHund, großer\tbig dog\n", encoding="utf-8")
    glossary = Glossary(others=(others := Glossary(tmp_path / "terms.tsv")))
    text = "Der Herr der Bundeslade, Hund, großer"

    def found() -> list[str]:
        return [variant for _, _, (variant,) in glossary.find(text)]

    assert found() == ["Lord", "big dog"]
    glossary.become([("Herr", "Yahweh"), ("der Bundeslade", "of the ark"), ("\u200b", "nothing")])
    assert found() == ["Yahweh", "of the ark", "big dog"]
    assert others.variants == {"herr": ["Lord"], "hund,grosser": ["big dog"]}
    glossary.become([("HERR", "master"), ("Herr", "Yahweh")])
    assert found()[0] == "Yahweh", "the last one, however it is written"
    glossary.become(())
    assert found() == ["Lord", "big dog"]
