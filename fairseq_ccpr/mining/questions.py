"""Questions and the paragraphs that answer them: the same retrieval, on texts of very different lengths."""

from __future__ import annotations

from pathlib import Path

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.mining.fragments import fragments
from fairseq_ccpr.mining.labelled import LabelledText, label
from fairseq_ccpr.text.pairs import read_pairs


def read_questions(questions: Path, paragraphs: Path) -> LabelledText:
    """Read two TSVs: id, tab, paragraph or whole document; and id of the paragraph that has the answer, tab, question.

    Raises:
        ConfigurationError: a file is missing or no such TSV, an id is there twice or is not known, or a text has no word.
    """
    texts: dict[str, str] = {}
    for name, text in _rows(paragraphs):
        if name in texts:
            raise ConfigurationError(f"{paragraphs} has two paragraphs '{name}': give each an id of its own")
        texts[name] = text
    rows = _rows(questions)
    unknown = next((name for name, _ in rows if name not in texts), None)
    if unknown is not None:
        raise ConfigurationError(f"{questions} has a question on '{unknown}', and {paragraphs} has no such paragraph")
    return label([text for _, text in rows], list(texts.values()), [texts[name] for name, _ in rows])


def _rows(path: Path) -> list[tuple[str, str]]:
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}")
    rows = list(read_pairs(path))
    if not rows:
        raise ConfigurationError(f"{path} is empty: give lines of id, tab, text")
    for number, (_, text) in enumerate(rows, 1):
        if not fragments(text, 1):
            raise ConfigurationError(f"{path}, line {number}: there is no word in '{text[:80]}'")
    return rows
