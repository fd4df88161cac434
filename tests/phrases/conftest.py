"""Text of a small language, once a test session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.phrases.small_language import sentences


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """text.de, text.en and text.tsv."""
    folder = tmp_path_factory.mktemp("text")
    pairs = sentences(400)
    (folder / "text.de").write_text("".join(f"{source}\n" for source, _ in pairs))
    (folder / "text.en").write_text("".join(f"{target}\n" for _, target in pairs))
    (folder / "text.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    return folder
