"""Tables of the pages are made from files: what a cell may have, what is best, what the check finds."""

from __future__ import annotations

import json
import lzma
import random
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from scripts import results

ROWS = [
    {"text": "one", "system": "base", "BLEU": 36.69, "p": None},
    {"text": "one", "system": "kNN, more", "BLEU": 51.93, "p": 0.0014},
    {"text": "two", "system": "base", "BLEU": 40.0, "p": None},
    {"text": "two", "system": "kNN, more", "BLEU": 39.3, "p": 0.25},
]
TABLE = {
    "labels": 2,
    "best": ["BLEU"],
    "from": "scores:rows",
    "let": {"of": "text=$1&system"},
    "columns": {
        "text": "$1",
        "system": "$2",
        "BLEU": "{$of=$3/BLEU|.2f}",
        "gained": "{$of=$3/BLEU; $of=base/BLEU|minus}",
    },
    "rows": [
        ["one", "model alone", "base"],
        ["one", "kNN for 8 minutes", "kNN, more"],
        ["two", "alone", "base"],
    ],
}


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a page, its table and a file."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "README.md").write_text("# A\n\n## B\n<!-- table b -->\n<!-- end -->\n", encoding="utf-8")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "FILES", tmp_path / "benchmarks")
    monkeypatch.setattr(results, "TABLES", tmp_path / "tables.yaml")
    return tmp_path


def put(house: Path, table: dict[str, Any], rows: list[dict[str, Any]] = ROWS, unfiled: int = 0) -> None:
    tables = {"b": table, "unfiled": {"README.md": unfiled}, "columns": {"BLEU": "{scores:$2/BLEU|.1f}"}}
    text = yaml.safe_dump(tables, allow_unicode=True, sort_keys=False)
    (house / "tables.yaml").write_text(text, encoding="utf-8")
    more = {
        "text": ["36.69", "36", "x"],
        "small": 0.0004,
        "low": -1,
        "lower": -3,
        "true": True,
        "nan": float("nan"),
    }
    (house / "benchmarks/scores.json").write_text(json.dumps({"rows": rows, **more}), encoding="utf-8")
    results.read.cache_clear()


def cells(*templates: str, rows: list[list[Any]] | None = None, **more: Any) -> dict[str, Any]:
    columns = {f"column {'abcd'[place]}": template for place, template in enumerate(templates)}
    return {"columns": {"name": "$1", **columns}, "rows": rows or [["a"]], **more}


def made(house: Path, table: dict[str, Any], rows: list[dict[str, Any]] = ROWS) -> list[str]:
    put(house, table, rows)
    return results.make(table).splitlines()[2:]


def faults(house: Path) -> list[str]:
    """What is wrong, the digests of tables left out."""
    results.read.cache_clear()
    return [re.sub(", [0-9a-f]{8}:", ":", one.partition(": ")[0] + ":")[:-1] for one in results.faults()]


def test_the_tables_of_the_pages_are_what_their_files_give() -> None:
    assert results.faults() == []


KEPT = sorted((results.FILES / "results").glob("*.tsv.xz"))


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.name)
def test_kept_translations_have_the_scores_that_their_file_says(file: Path) -> None:
    found = json.loads(file.with_suffix("").with_suffix(".json").read_text(encoding="utf-8"))
    if "domains" in found:  # of an experiment, else of `evaluate systems`
        systems = next(one for name, one in found["domains"].items() if name in file.name)["systems"]
        scored = {name: one["scores"] for name, one in systems.items()}
    else:
        scored = {row["system"]: row for row in found["rows"]}
    names, *rows = (line.split("\t") for line in lzma.decompress(file.read_bytes()).decode().splitlines())
    kept = {name: list(lines) for name, *lines in zip(names, *rows, strict=True)}
    references = [kept.pop("reference")]
    assert kept.keys() == scored.keys()
    for name, lines in kept.items():
        assert round(BLEU().corpus_score(lines, references).score, 2) == scored[name]["BLEU"]
        assert round(CHRF().corpus_score(lines, references).score, 2) == scored[name]["chrF"]


def test_tables_without_a_file_only_become_fewer() -> None:
    assert sum(results.read_tables()[1].values()) <= 32


def test_a_table_is_written_and_a_change_of_either_side_is_found(house: Path) -> None:
    page, written = house / "README.md", "README.md, a table is not what its files give"
    table = cells("{scores:rows/text=$1&system=base/BLEU|.2f}", rows=[["one"], ["two"]])
    put(house, table)
    assert faults(house) == [written]
    page.write_text(results.renew(page.read_text(), {"b": table})[0], encoding="utf-8")
    assert faults(house) == [] and "\n| one | 36.69 |\n| two | 40.00 |\n<!-- end -->" in page.read_text()
    page.write_text(page.read_text().replace("40.00", "40.01"), encoding="utf-8")
    assert faults(house) == [written]
    page.write_text(page.read_text().replace("40.01", "40.00"), encoding="utf-8")
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    numbers = random.Random(seed)
    for row in (0, 2):
        changed = [dict(one) for one in ROWS]
        changed[row]["BLEU"] += numbers.choice([-1, 1]) * numbers.randint(2, 500) / 100
        put(house, table, changed)
        assert faults(house) == [written]
    put(house, table)
    assert faults(house) == []


def test_tables_without_a_file_are_counted(house: Path) -> None:
    page, table = house / "README.md", cells("{scores:rows/0/BLEU|.2f}")
    put(house, table)
    new = results.renew(page.read_text(), {"b": table})[0]
    by_hand = "\n## C\n\n| a | b |\n|---|---|\n| y | **0.5** |\n"
    page.write_text(new + 2 * by_hand, encoding="utf-8")
    sentence = (
        "README.md, 2 tables have figures and no file, and `unfiled` says {}: file what is new, or write 2"
    )
    assert results.faults() == [sentence.format(0)]
    put(house, table, unfiled=1)
    assert results.faults() == [sentence.format(1)]
    put(house, table, unfiled=2)
    assert results.faults() == []
    page.write_text(new, encoding="utf-8")
    assert results.faults()[0].endswith("or write 0")


def test_a_missing_file_or_table_is_told(house: Path) -> None:
    page, table = house / "README.md", cells("{scores:rows/0/BLEU|.2f}")
    put(house, table)
    new = results.renew(page.read_text(), {"b": table})[0]
    page.write_text(new, encoding="utf-8")
    (house / "benchmarks/scores.json").unlink()
    results.read.cache_clear()
    (missing,) = results.faults()
    assert missing.startswith("README.md, table b: row a") and missing.endswith(
        "there is no benchmarks/scores.json"
    )
    page.write_text(new.replace("<!-- end -->", ""), encoding="utf-8")
    assert "no page shows the table b of tables.yaml" in results.faults()
    page.write_text(new.replace("table b", "table c"), encoding="utf-8")
    assert "README.md, table c: tables.yaml has no such table" in results.faults()


HEAD = "| a | b |\n|---|---|\n"
TYPED = [
    HEAD + "| x | 36.69", "a | b\n---|---\nx | 36.69\n", "> | a | b |\n> |---|---|\n> | x | 5 |\n",
    HEAD + "| x | `36.69` |\n",
    HEAD + "| x | BLEU 37 |\n", HEAD + "| x | 63–68 |\n", HEAD + "| x | 12k |\n",
    HEAD + "| x | p<.05 |\n", HEAD + "| 36.69 | x |\n", HEAD + "| x | ½ |\n",
]  # fmt: skip
UNTYPED = [
    "```text\n| x | 36.69 |\n```\n", "   ```text\n| x | 36.69 |\n   ```\n", "BLEU is 36.69, or `a | b`.\n",
    HEAD + "| x | `--k8`, [y](z-2.md) |\n",
]  # fmt: skip


@pytest.mark.parametrize(("text", "count"), [*((one, 1) for one in TYPED), *((one, 0) for one in UNTYPED)])
def test_what_is_a_table_with_figures(text: str, count: int) -> None:
    assert results.by_hand(f"# A\n\n{text}") == count
    assert results.by_hand(f"# A\n\n{text}\n\n{text}") == 2 * count


def test_rows_labels_and_the_best(house: Path) -> None:
    assert made(house, TABLE) == [
        "| one | model alone | 36.69 | 0.0 |",
        "| | kNN for 8 minutes | **51.93** | +15.2 |",
        "| two | alone | 40.00 | 0.0 |",  # one of its kind is not the best of anything
    ]
    pair = "{scores:rows/text=one&system=$2/BLEU|.1f} / {scores:rows/text=two&system=$2/BLEU|.1f}"
    rows = [["a", "base", "kNN, more"], ["b", "base", None], ["c", "base", "base"]]
    assert made(house, cells(pair, pair.replace("$2", "$3"), rows=rows, best="across")) == [
        "| a | 36.7 / **40.0** | **51.9** / 39.3 |",
        "| b | 36.7 / 40.0 | |",
        "| c | **36.7** / **40.0** | **36.7** / **40.0** |",  # as good as one another
    ]


def test_an_entry_that_is_a_list_has_mean_and_standard_deviation(house: Path) -> None:
    number, gained = "{scores:$2/BLEU|.1f}", "{scores:$2/BLEU; scores:rows/0/BLEU|minus}"
    rows = [["a", ["rows/0", "rows/2", "rows/3"]], ["b", "rows/2"], ["c", ["rows/2"]]]
    assert made(house, cells(number, gained, "{scores:rows/0/BLEU|.1f}", rows=rows)) == [
        "| a | 38.7 ± 1.7 | +2.0 | 36.7 |",
        "| b | 40.0 | +3.3 | 36.7 |",
        "| c | 40.0 | +3.3 | 36.7 |",
    ]
    assert made(house, cells("{scores:$2|.1f}", rows=[["a", ["low", "lower"]]])) == ["| a | −2.0 ± 1.4 |"]
    of = "{scores:rows/text=$2&system=$3/BLEU|mean .1f}"
    assert made(house, cells(of, rows=[["a", ["one", "two"], ["base", "kNN, more"]]])) == ["| a | 42.0 |"]
    with pytest.raises(results.Fault, match="scores:rows/9/BLEU names 0 values, not one"):
        made(house, cells(number, rows=[["a", ["rows/0", "rows/9"]]]))
    with pytest.raises(results.Fault, match="'p' is of one run, and 2 are given"):
        made(house, cells("{scores:$2/p|p}", rows=[["a", ["rows/1", "rows/3"]]]))


def test_what_is_within_a_standard_deviation_of_the_best_is_bold_too(house: Path) -> None:
    several = ["rows/0", "rows/2", "rows/3"]  # 38.7 ± 1.7
    scores = [36.69, 40.4, 40.0, 39.3, 40.5, 36.0]
    table = cells("{scores:$2/BLEU|.1f}", best="across", rows=[])
    table["columns"]["other"] = "{scores:$3/BLEU|.1f}"
    table["rows"] = [
        ["a", several, "rows/1"],
        ["b", several, "rows/4"],
        ["c", "rows/5", several],
        ["d", "rows/4", "rows/1"],
    ]
    assert made(house, table, [{"BLEU": score} for score in scores]) == [
        "| a | **38.7 ± 1.7** | **40.4** |",
        "| b | 38.7 ± 1.7 | **40.5** |",
        "| c | 36.0 | **38.7 ± 1.7** |",
        "| d | **40.5** | 40.4 |",
    ]


FORMS = [
    ("rows/1/BLEU; {}rows/0/BLEU|minus", "+15.2"), ("rows/3/BLEU; {}rows/2/BLEU|minus", "−0.7"),
    ("rows/0/BLEU; {}rows/0/BLEU|minus", "0.0"), ("rows/1/BLEU; {}rows/0/BLEU; {}rows/2/BLEU|share", "460%"),
    ("rows/1/BLEU; {}rows/0/BLEU|ratio", "1"), ("rows/1/BLEU; {}rows/0/BLEU|ratio .1f", "1.4"),
    ("rows/3/BLEU|mean .0f", "39"),
    ("rows/1/p|p", "0.001"), ("rows/3/p|p", "0.25"), ("rows/text=one/#|", "2"), ("small|p", "< 0.001"),
    ("rows/text=one&system=none/#|", "0"), ("text/0|.1f", "36.7"), ("text/0; {}text/1|minus", "+0.7"),
    ("rows/text=one/#; {}rows/text=one&system=none/#|sign", "0.50"), ("rows/0/system|", "base"), ("rows/2/BLEU|,.0f", "40"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "written"), FORMS)
def test_forms(house: Path, form: str, written: str) -> None:
    assert made(house, cells("{scores:" + form.replace("{}", "scores:") + "}")) == [f"| a | {written} |"]


def test_ways_through_a_file(house: Path) -> None:
    put(house, cells())
    assert results.find("scores:rows/*/BLEU") == [Decimal(str(row["BLEU"])) for row in ROWS]
    assert results.find("scores:rows/system=kNN, more&text=two/p") == [Decimal("0.25")]
    assert results.find("scores:rows/9/p") == results.find("scores:rows/text=one&system=none") == []
    (house / "benchmarks/sheet.tsv").write_text("a\tb\n1\tx\n0\ty\n", encoding="utf-8")
    assert results.find("sheet.tsv:a=1/b") == ["x"]
    printed = (
        "1 sentence\n\n|  | speed | n |\n|---|---|---|\n| alone | 84.8% | 1,201 |\n| terms |  | +0.5 |\n"
    )
    (house / "benchmarks/printed.md").write_text(f"{printed}\n| a |\n|---|\n| -2 ms |", encoding="utf-8")
    assert results.find("printed.md:0/=alone") == [
        {"": "alone", "speed": Decimal("0.848"), "n": Decimal(1201)}
    ]
    assert results.find("printed.md:0/1/speed") == [None] and results.find("printed.md:1/0/a") == ["-2 ms"]
    (house / "benchmarks/twice.md").write_text("| a | a |\n|---|---|\n| 1 | 2 |\n", encoding="utf-8")
    with pytest.raises(results.Fault, match="have one name"):
        results.find("twice.md:0")
    for path, sentence in {
        "sheet.tsv:a=7&b=x": "no member has a=7 of", "sheet.tsv:a=1&c=x": "no member has c=x of"
    }.items():  # fmt: skip
        with pytest.raises(results.Nothing, match=sentence):
            results.find(path)


REFUSED = {
    "51.93": "a cell has '51.93': a number comes from a file",
    "{scores:rows/0/BLEU|.2f} (+15.2)": "a cell has",
    "½": "a cell has '½'",
    "$2": "a cell has '36.69'",
    "$3": "no row has anything of the column 'column a'",
    "{scores:$of|.2f}": r"there is no \$of",
    "{scores:rows/0/chrF|.2f}": "scores:rows/0/chrF names 0 values, not one",
    "{scores:rows/*/BLEU|.2f}": r"scores:rows/\*/BLEU names 4 values, not one",
    "{scores:rows/0/p|p}": "names 0 values, not one",
    "{scores:rows/0/BLEU; scores:rows/1/BLEU|.0f}": "'.0f' takes 1 paths, not 2",
    "{scores:rows/0/BLEU|minus}": "'minus' takes 2 paths, not 1",
    "{scores:rows/txt=one/#|}": "no member has txt=one",
    "{scores:rows/text=on&system=base/#|}": "no member has text=on",
    "{scores:rows/0|.2f}": "TypeError|ValueError",
    "{scores:rows/0/BLEU; scores:rows/0/BLEU; scores:rows/0/BLEU|share}": "InvalidOperation|DivisionUndefined",
    "{scores:rows/0/BLEU|.2q}": "ValueError",
    "{scores:text/2|.2f}": "InvalidOperation",
    "{scores:true|.2f}": "scores:true is no number",
    "{scores:nan|.2f}": "scores:nan is no number",
    "{?scores:rows/0/chrF|.2f}": "no row has anything of the column 'column a'",
}


@pytest.mark.parametrize("template", REFUSED)
def test_what_is_refused(house: Path, template: str) -> None:
    table = cells(template, rows=[["a", 36.69]])
    put(house, table)
    with pytest.raises(results.Fault, match=REFUSED[template]) as refused:
        results.make(table)
    if "no row has anything" not in str(refused.value):
        assert str(refused.value).startswith(f"row a, 36.69, {template}: ")
    (told,) = results.renew((house / "README.md").read_text(), {"b": table})[1]
    assert told == f"table b: {refused.value}" and "\n" not in told


def test_what_labels_and_heads_may_have(house: Path) -> None:
    assert made(house, cells("", rows=[["of 12,800 tokens"]])) == ["| of 12,800 tokens | |"]
    for label in ("36", "gains 36.69 BLEU", "36% of them"):
        with pytest.raises(results.Fault, match="a cell has"):
            made(house, cells("", rows=[[label]]))
    with pytest.raises(results.Fault, match="a cell has 'gains"):
        made(house, cells("") | {"columns": {"a": "$1", "gains 36.69 BLEU": ""}})
    optional = "{?scores:rows/$2/chrF|.2f}"
    rows = [dict(ROWS[0]), {**ROWS[1], "chrF": 60.0}]
    table = cells(optional, "{scores:rows/0/BLEU|.2f}; " + optional, rows=[["a", 0], ["b", 1], ["c", None]])
    assert made(house, table, rows) == ["| a | | 36.69; – |", "| b | 60.00 | 36.69; 60.00 |", "| c | | |"]


def test_columns_without_a_template_and_those_with_names_for_one(house: Path) -> None:
    columns = {"row": "number $1", "BLEU": None, "system": None}
    put(house, {"from": "scores:rows/$1", "columns": columns, "rows": [["a", "rows/1"]]})
    with pytest.raises(results.Fault, match="scores:rows/a/system names 0 values"):
        results.make(results.read_tables()[0]["b"])
    put(house, {"from": "scores:$2", "columns": columns, "rows": [["a", "rows/1"]]})
    assert results.make(results.read_tables()[0]["b"]).splitlines()[2:] == ["| number a | 51.9 | kNN, more |"]
    table = cells(rows=[["a", "$short"], ["b", "$long"], ["c", None]], cell="$2")
    table |= {
        "let": {"short": "{$of|.0f}", "long": "{$of|.2f}", "of": "scores:rows/text=$text&system=base/BLEU"}
    }
    table["columns"] |= {"one": {"text": "one"}, "two": {"text": "two", "long": "{$of|.1f}"}}
    assert made(house, table) == ["| a | 37 | 40 |", "| b | 36.69 | 40.0 |", "| c | | |"]


def test_a_row_may_stay_out_until_its_system_is_there(house: Path) -> None:
    rows = [["a", "BLEU"], {"if": "$2", "row": ["b", "chrF"]}]
    table = cells("{$2|.2f}", rows=rows, **{"from": "scores:rows/0"})
    assert made(house, table) == ["| a | 36.69 |"]
    assert made(house, table, [{**ROWS[0], "chrF": 60.0}]) == ["| a | 36.69 |", "| b | 60.00 |"]
