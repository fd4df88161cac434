"""What a benchmark measured, as rows of tables."""

from __future__ import annotations

from typing import Any

from fairseq_ccpr.evaluation.speed.decoding_speed import REST, DecodingSpeed
from fairseq_ccpr.evaluation.speed.part_timer import (
    DECODER,
    FINDING,
    MERGE,
    PHRASES,
    PROJECTION,
    SEARCH,
)
from fairseq_ccpr.evaluation.speed.search_speed import SearchCost

PARTS = (DECODER, PROJECTION, SEARCH, MERGE, FINDING, PHRASES, REST)


def decoding_table(rows: list[DecodingSpeed]) -> list[list[Any]]:
    """Speed, and where the time of a step goes, a row a system and load."""
    head = ["keys", "batch", "hypotheses", "system", "tokens/s", "slowest–fastest", "speed"]
    head += [f"{part}, ms a step" for part in PARTS]
    table: list[list[Any]] = [[*head, "search ÷ floor", "peak memory"]]
    for row in rows:
        around = f"{row.slowest:,.0f}–{row.fastest:,.0f}"
        what = [f"{row.entries:,}" if row.entries else "", f"{row.batch:,}", row.hypotheses, row.system]
        parts = [f"{row.parts[part]:.2f}" if part in row.parts else "" for part in PARTS]
        floor = f"{row.parts[SEARCH] / row.floor:.1f}" if row.floor else ""
        speeds = [f"{row.tokens_per_second:,.0f}", around, f"{row.speed:.0%}"]
        table.append([*what, *speeds, *parts, floor, _gigabytes(row.peak_bytes)])
    return table


def search_table(rows: list[SearchCost]) -> list[list[Any]]:
    """The cost of a search, a row for each combination."""
    head = ["keys of", "width", "keys", "index", "H", "k", "ms", "fastest–slowest", "floor, ms", "÷ floor", "recall"]
    table: list[list[Any]] = [[*head, "bytes a key", "built in, s", "peak memory"]]
    for row in rows:
        table.append([
            row.store, row.dimension, f"{row.keys:,}", row.index, row.queries, row.k, f"{row.milliseconds:.2f}",
            f"{row.fastest:.2f}–{row.slowest:.2f}", f"{row.floor:.3f}", f"{row.milliseconds / row.floor:.1f}",
            f"{row.recall:.1%}", f"{row.bytes_per_key:.0f}", f"{row.build_seconds:.1f}", _gigabytes(row.peak_bytes),
        ])  # fmt: skip
    return table


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
