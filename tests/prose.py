"""Takes the sentences out of a page of Markdown."""

from __future__ import annotations

import re

FENCE = re.compile(r"^( *)```.*?^\1```[^\n]*$", re.MULTILINE | re.DOTALL)
NEW_BLOCK = re.compile(r"^\s*([-*+]|\d+\.)\s|^\s*$|^#|^\s*\||^!|^<|^    \S")
WORD = re.compile(r"[^\W_]")


def sentences(page: str) -> list[str]:
    """Return the sentences of paragraphs and list items, without code blocks, tables, headings and pictures.

    >>> sentences("# Title\\n\\nOne `a.b c` here. Two\\nlines.\\n\\n- an item: `x`\\n- [a link](to.md)\\n\\n| a | b. |\\n")
    ['One code here.', 'Two lines.', 'an item: code', 'a link']
    """
    blocks: list[list[str]] = [[]]
    for line in FENCE.sub("", page).splitlines():
        if NEW_BLOCK.match(line):
            blocks.append([])
        if not re.match(r"^(#|\s*\||!|<|    \S)", line):
            blocks[-1].append(re.sub(r"^\s*([-*+]|\d+\.)\s+", "", line).strip())
    return [sentence for block in blocks for sentence in _split(" ".join(block))]


def words(sentence: str) -> int:
    """Count what has a letter or a digit, between spaces."""
    return sum(bool(WORD.search(word)) for word in sentence.split())


def _split(text: str) -> list[str]:
    text = re.sub(r"`[^`]+`", "code", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    parts = re.split(r"(?<!e\.g\.)(?<!i\.e\.)(?<! al\.)(?<=[.!?])[)*\"”]*\s+", text)
    return [part.strip() for part in parts if WORD.search(part)]
