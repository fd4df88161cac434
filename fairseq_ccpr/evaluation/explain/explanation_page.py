"""An explanation as one self-contained HTML page: no network, no other file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fairseq_ccpr.evaluation.page import STYLE, fill

# In JSON these stand in strings alone, where the escapes mean the same. Left as they are, the first three could end the
# script element that holds the data, or begin a comment in it, and the others end a line.
ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


STYLES = STYLE.read_text(encoding="utf-8") + _read("explanation.css")
TOKENS = _read("explanation_token.js") + _read("explanation_tokens.js")  # displays tokens; other pages use it as well


def as_page(explanation: dict[str, Any]) -> str:
    """Return the page of an `Explanation`, given as a dictionary; its script makes elements of the data, and text of text."""
    parts = {
        "/* style */": STYLES,
        "/* script */": TOKENS + _read("explanation.js"),
        "/* data */": as_json(explanation),
    }
    return fill(Path(__file__).with_name("explanation.html"), parts)


def as_json(explanation: dict[str, Any]) -> str:
    """JSON that may stand inside an HTML script element."""
    text = json.dumps(explanation, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(ESCAPES)
