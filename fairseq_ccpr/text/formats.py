"""The kinds of documents, by the ends of their names."""

from __future__ import annotations

import zlib
from importlib.util import find_spec
from pathlib import Path
from xml.parsers.expat import ExpatError
from zipfile import BadZipFile

from fairseq_ccpr.errors import ConfigurationError, installing
from fairseq_ccpr.text.documents import Document, GettextDocument, HtmlDocument
from fairseq_ccpr.text.markdown import MarkdownDocument
from fairseq_ccpr.text.office import OpenDocument, WordDocument

EXTRA = "files"

FORMATS: dict[str, type[Document]] = {
    ".docx": WordDocument,
    ".odt": OpenDocument,
    ".html": HtmlDocument,
    ".htm": HtmlDocument,
    ".md": MarkdownDocument,
    ".po": GettextDocument,
    ".txt": Document,
}


def open_document(path: Path) -> Document:
    """Open a document by the end of its name.

    Raises:
        ConfigurationError: it is of no known kind, or not what its name says, or packages are missing.
    """
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise ConfigurationError(f"{path} is no document that is known: {', '.join(FORMATS)}")
    try:
        return FORMATS[suffix](path)
    except ImportError as error:
        needed = f"{error.name}, which is not installed: {installing(EXTRA)}"
        raise ConfigurationError(f"documents need {needed}") from None
    # of polib as well; RuntimeError: of a password, of what ZIP has besides
    except (ValueError, OSError, EOFError, RuntimeError, BadZipFile, zlib.error, ExpatError) as error:
        raise ConfigurationError(f"{path} is no readable {suffix} file: {error}") from None


def usable() -> list[str]:
    """List the formats whose packages are installed."""
    return [suffix for suffix, kind in FORMATS.items() if kind.package is None or find_spec(kind.package)]
