"""Tables of the pages are made from files: what a cell may have, what is best, what the check finds."""

from __future__ import annotations

import json
import random
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import results

ROWS = [
    {"text": "one", "system": "base", "BLEU": 36.69, "p": None},
    {"text": "one", "system": "kNN, more", "BLEU": 51.93, "p": 0.0014},
    {"text": "two", "system": "base", "BLEU": 40.0, "p": None},
    {"text": "two", "system": "kNN, more", "BLEU": 39.3, "p": 0.25},
]
TABLE = {
    "head": ["text", "system", "BLEU", "gained"],
    "labels": 2,
    "best": ["BLEU"],
    "from": "scores:rows",
    "let": {"of": "text=$1&system"},
    "cells": ["$1", "$2", "{$of=$3/BLEU|.2f}", "{$of=$3/BLEU; $of=base/BLEU|minus}"],
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
    monkeypatch.setattr(results, "UNFILED", {})
    return tmp_path


def put(house: Path, table: dict[str, Any], rows: list[dict[str, Any]] = ROWS) -> None:
    (house / "tables.yaml").write_text(yaml.safe_dump({"b": table}, allow_unicode=True), encoding="utf-8")
    (house / "benchmarks/scores.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    results.read.cache_clear()


def cells(*templates: str, rows: list[list[Any]] | None = None, **more: Any) -> dict[str, Any]:
    head = ["name", *("column" for _ in templates)]
    return {"head": head, "cells": ["$1", *templates], "rows": rows or [["a"]], **more}


def made(house: Path, table: dict[str, Any], rows: list[dict[str, Any]] = ROWS) -> list[str]:
    put(house, table, rows)
    return results.make(table).splitlines()[2:]


def test_the_tables_of_the_pages_are_what_their_files_give() -> None:
    assert list(results.faults()) == []


def test_tables_without_a_file_only_become_fewer() -> None:
    assert sum(sum(headings.values()) for headings in results.UNFILED.values()) <= 45


def test_a_table_is_written_and_a_change_of_either_side_is_found(house: Path) -> None:
    page, written = house / "README.md", "README.md has a table that its files do not give"
    table = cells("{scores:rows/text=$1&system=base/BLEU|.2f}", rows=[["one"], ["two"]])
    put(house, table)
    assert [one.partition(":")[0] for one in results.faults()] == [written]
    page.write_text(results.renew(page.read_text())[0], encoding="utf-8")
    assert (
        list(results.faults()) == []
        and "\n| one | 36.69 |\n| two | 40.00 |\n<!-- end -->" in page.read_text()
    )
    page.write_text(page.read_text().replace("40.00", "40.01"), encoding="utf-8")
    assert [one.partition(":")[0] for one in results.faults()] == [written]
    page.write_text(page.read_text().replace("40.01", "40.00"), encoding="utf-8")
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    numbers = random.Random(seed)
    for row in (0, 2):
        changed = [dict(one) for one in ROWS]
        changed[row]["BLEU"] += numbers.choice([-1, 1]) * numbers.randint(2, 500) / 100
        put(house, table, changed)
        assert [one.partition(":")[0] for one in results.faults()] == [written]
    put(house, table)
    assert list(results.faults()) == []


def test_a_number_without_a_file_is_found_unless_it_is_counted(
    house: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = house / "README.md"
    put(house, cells("{scores:rows/0/BLEU|.2f}"))
    new = results.renew(page.read_text())[0]
    by_hand = "\n## C\n\n| a | b |\n|---|---|\n| x | `0.5` |\n| y | **0.5** |\n"
    page.write_text(
        new + by_hand.replace("| y | **0.5** |\n", "") + "\n| of 12.5 | in ACL 2021 |\n", encoding="utf-8"
    )
    assert list(results.faults()) == []  # code, years and labels are no figures
    page.write_text(new + by_hand, encoding="utf-8")
    assert list(results.faults()) == ["README.md, C: a table has figures and no file"]
    monkeypatch.setattr(results, "UNFILED", {"README.md": {"C": 1}})
    assert list(results.faults()) == []
    page.write_text(new + by_hand + by_hand.replace("## C\n", ""), encoding="utf-8")
    assert list(results.faults()) == ["README.md, C: a table has figures and no file"]
    page.write_text(new, encoding="utf-8")
    assert list(results.faults()) == ["README.md, C: UNFILED counts more tables without a file"]
    monkeypatch.setattr(results, "UNFILED", {})
    (house / "benchmarks/scores.json").unlink()
    results.read.cache_clear()
    assert list(results.faults()) == ["README.md, B: a table has figures and no file"]
    page.write_text(new.replace("<!-- end -->", ""), encoding="utf-8")
    assert "no page shows the table b of tables.yaml" in list(results.faults())
    page.write_text(new.replace("table b", "table c"), encoding="utf-8")
    assert "README.md, table c: tables.yaml has no such table" in list(results.faults())


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


FORMS = [
    ("rows/1/BLEU; {}rows/0/BLEU|minus", "+15.2"), ("rows/3/BLEU; {}rows/2/BLEU|minus", "−0.7"),
    ("rows/0/BLEU; {}rows/0/BLEU|minus", "0.0"), ("rows/1/BLEU; {}rows/0/BLEU; {}rows/2/BLEU|share", "460%"),
    ("rows/1/BLEU; {}rows/0/BLEU|ratio", "1"), ("rows/1/BLEU; {}rows/0/BLEU|ratio .1f", "1.4"),
    ("rows/0/BLEU; {}rows/2/BLEU; {}rows/3/BLEU|spread .1f", "38.7 ± 1.7"),
    ("rows/1/p|p", "0.001"), ("rows/3/p|p", "0.25"), ("rows/text=one|count", "2"),
    ("rows/text=one; {}rows/system=none|sign", "0.50"), ("rows/0/system|", "base"), ("rows/2/BLEU|,.0f", "40"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "written"), FORMS)
def test_forms(house: Path, form: str, written: str) -> None:
    assert made(house, cells("{scores:" + form.replace("{}", "scores:") + "}")) == [f"| a | {written} |"]


def test_ways_through_a_file(house: Path) -> None:
    put(house, cells())
    assert results.find("scores:rows/*/BLEU") == [Decimal(str(row["BLEU"])) for row in ROWS]
    assert results.find("scores:rows/system=kNN, more&text=two/p") == [Decimal("0.25")]
    assert results.find("scores:rows/9/p") == results.find("scores:rows/text=three") == []
    (house / "benchmarks/sheet.tsv").write_text("a\tb\n1\tx\n0\ty\n", encoding="utf-8")
    assert results.find("sheet.tsv:a=1/b") == ["x"]


def test_what_is_refused(house: Path) -> None:
    refusals = {
        "51.93": "a cell has '51.93': a number comes from a file",
        "{scores:rows/0/BLEU|.2f} (+15.2)": "a cell has",
        "$2": "a cell has '36.69'",
        "{scores:rows/0/chrF|.2f}": "scores:rows/0/chrF names 0 values, not one",
        "{scores:rows/*/BLEU|.2f}": "names 4 values, not one",
        "{scores:rows/0/p|p}": "names 0 values, not one",
    }
    for template, sentence in refusals.items():
        with pytest.raises(results.Fault, match=sentence.replace("(", r"\(").replace("*", r"\*")):
            made(house, cells(template, rows=[["a", 36.69]]))
    with pytest.raises(results.Fault, match=r"a cell has '36\.69'"):
        made(house, cells("", rows=[[36.69]]))
    with pytest.raises(results.Fault, match="2 cells stand below a head of 3"):
        made(house, cells("", "") | {"cells": ["$1", ""]})
    optional = "{?scores:rows/0/chrF|.2f}"
    assert made(house, cells(optional, "{scores:rows/0/BLEU|.2f}; " + optional)) == ["| a | | 36.69; – |"]


def test_results_of_experiments_fill_their_tables(house: Path) -> None:
    """Tables of a results.json that is not there yet are those of a page when it is."""
    tables = yaml.safe_load((Path(results.__file__).parent / "tables.yaml").read_text(encoding="utf-8"))
    files = Path(results.__file__).parent.parent / "benchmarks"
    shutil.copytree(files, house / "benchmarks", dirs_exist_ok=True)
    names = [
        "base",
        "phrases",
        "text",
        "text+phrases",
        "back",
        "back+text",
        "back+text+phrases",
        "knn",
        "clknn",
    ]
    scores = {"BLEU": 10.0, "chrF": 30.0, "TER": 80.0}
    compared = {metric: {"difference": 1.0, "interval": [0.5, 1.5], "p": 0.01} for metric in scores}
    systems = {
        name: {"scores": scores | {"BLEU": 10.0 + place}, "speed": 0.5,
               "against": {other: compared for other in names if other != name}}
        for place, name in enumerate(names)
    }  # fmt: skip
    domains = {name: {"sentences": 1500, "systems": systems} for name in ("office", "koran1", "bible")}
    (house / "benchmarks/results/monolingual.json").write_text(json.dumps({"domains": domains}))
    results.read.cache_clear()
    assert "| | text memory and phrases | 13.00 | 30.00 |" in results.make(tables["text-gains"]).replace(
        "**", ""
    )
    assert "| office | +1.0; 0.01 | +1.0; 0.01 | | +1.0; 0.01 |" in results.make(tables["phrases-add"])
    assert "| office | none | model alone | 10.00 | " in results.make(tables["readme"])
