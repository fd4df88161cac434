"""The page at `/`: one file that asks this server alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fairseq_ccpr.evaluation.explain.explanation_page import STYLES, TOKENS, as_json
from fairseq_ccpr.evaluation.page import fill

PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page(settings: dict[str, Any]) -> str:
    """Return the page; its script makes elements of data, and text of text.

    Args:
        settings: see `Service.of_page`.
    """
    parts = {
        "/* style */": STYLES + _read("page.css"),
        "/* script */": TOKENS + _read("page.js"),
        "/* data */": as_json(settings),
    }
    return fill(Path(__file__).with_name("page.html"), parts)


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
