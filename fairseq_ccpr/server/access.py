"""Who may ask a server for how much: an API key, size limits, no requests from pages of other sites. It needs no extra."""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from fairseq_ccpr.errors import ConfigurationError

KEY_VARIABLE = "FAIRSEQ_CCPR_API_KEY"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MIN_KEY = 8  # characters
NOTHING, REQUESTS, TEXTS = LOGS = "nothing", "requests", "texts"


@dataclass(frozen=True)
class Limits:
    """Who may ask for how much, and what is written down of it."""

    host: str = "127.0.0.1"
    key: str | None = None
    most_characters: int = 20_000
    log: str = NOTHING


def read_key(path: Path | None) -> str | None:
    """Read the API key from a file, or else the environment; None where there is none."""
    if path is None:
        key, where = os.environ.get(KEY_VARIABLE), KEY_VARIABLE
        if key is None:
            return None
    else:
        where = f"--api-key-file {path}"
        if not path.is_file():
            raise ConfigurationError(f"{where}: there is no such file")
        try:
            key = path.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError:
            raise ConfigurationError(f"{where}: the bytes are not UTF-8; write a line of text") from None
    if len(key) < MIN_KEY or not key.isprintable():
        raise ConfigurationError(f"{where} has {len(key)} characters: a key is one line of {MIN_KEY} or more")
    return key


def fits(key: str, given: object) -> bool:
    """Compare a key with what a request gives, in a time that tells nothing of the key."""
    return isinstance(given, str) and hmac.compare_digest(key.encode(), given.encode(errors="replace"))


def foreign(headers: Mapping[str, str], host: str) -> str:
    """Say why a request comes from another site by a visitor's browser; nothing where it does not.

    Browsers name the page's site as `Origin`; a site whose name was made to lead here, as `Host`.

    >>> foreign({"host": "localhost:5000", "origin": "https://example.org"}, "127.0.0.1")
    'requests from pages of https://example.org are refused: this server has its own page alone'
    >>> foreign({"host": "example.org:5000"}, "127.0.0.1")
    'this server is not example.org:5000: ask for it as localhost'
    >>> foreign({"host": "localhost:5000", "origin": "http://localhost:5000"}, "127.0.0.1")
    ''
    """
    asked = headers.get("host", "")
    origin = headers.get("origin")
    try:
        if host in LOOPBACK and urlsplit(f"//{asked}").hostname not in LOOPBACK:
            return f"this server is not {asked[:100]}: ask for it as localhost"
        if origin is not None and urlsplit(origin).netloc != asked:
            return f"requests from pages of {origin[:100]} are refused: this server has its own page alone"
    except ValueError:
        return "Host or Origin is no address"
    return ""
