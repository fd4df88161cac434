"""Who may ask a server for how much: API key, sizes, no pages of other sites. It needs no extra."""

from __future__ import annotations

import hmac
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from fairseq_ccpr.errors import ConfigurationError

KEY_VARIABLE = "FAIRSEQ_CCPR_API_KEY"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MIN_KEY = 8  # characters
LOG_NOTHING, REQUESTS, LOG_TEXTS = LOGS = "nothing", "requests", "texts"


@dataclass(frozen=True)
class Limits:
    """Who may ask for how much, and what is written down of it."""

    host: str = "127.0.0.1"
    # with the memories that each opens; none: all
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    most_characters: int = 20_000
    most_sentences: int = 1000
    log: str = LOG_NOTHING
    # of this server, as browsers may ask for it where it listens on loopback
    names: tuple[str, ...] = LOOPBACK
    origins: tuple[str, ...] = ()  # of pages that may use it, besides its own


def read_keys(path: Path | None, memories: Collection[str] = ()) -> dict[str, tuple[str, ...]]:
    """Read the API keys of a file, or else the environment: on each line one and, after a tab, what it opens.

    Args:
        memories: that there are.
    """
    if path is None:
        text, where = os.environ.get(KEY_VARIABLE), KEY_VARIABLE
        if text is None:
            return {}
    else:
        where = f"--api-key-file {path}"
        if not path.is_file():
            raise ConfigurationError(f"{where}: there is no such file")
        try:
            text = path.read_text(encoding="utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise ConfigurationError(f"{where}: the bytes are not UTF-8; write a line of text") from None
    keys: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(text.split("\n"), 1):
        key, tab, opened = line.rstrip("\r").partition("\t")
        key = key.strip()
        if len(key) < MIN_KEY or not key.isprintable() or key in keys:
            found = "is there twice" if key in keys else f"has {len(key)} characters"
            told = f"{where}, line {number}, {found}"
            raise ConfigurationError(f"{told}: a key is one line of {MIN_KEY} or more")
        keys[key] = split_names(opened)
        unknown = [name for name in keys[key] or [""] * len(tab) if name not in memories]
        if unknown:
            known = f"has {' and '.join(memories)}" if memories else "has no named ones"
            told = f"{where}, line {number}, opens the memory '{unknown[0]}'"
            raise ConfigurationError(f"{told}, and the server {known}")
    return keys


def split_names(text: str) -> tuple[str, ...]:
    """Read names that commas divide, each once."""
    return tuple(dict.fromkeys(filter(None, (name.strip() for name in text.split(",")))))


def memories_of(keys: Mapping[str, tuple[str, ...]], given: object) -> tuple[str, ...] | None:
    """Return the memories that a given key opens, none for all; None where it is none of the keys.

    It compares with all of them, and takes equally long whichever it is.
    """
    text = given.encode(errors="replace") if isinstance(given, str) else b""
    fits = [memories for key, memories in keys.items() if hmac.compare_digest(key.encode(), text)]
    return fits[0] if fits else None


def origin_of(address: str, option: str) -> str:
    """Return the origin of a page's address, as browsers send it.

    >>> origin_of("https://MT.example.org:443/translate/", "--public-url")
    'https://mt.example.org'
    >>> origin_of("https://übersetzung.straße.example", "--public-url")
    'https://xn--bersetzung-8db.xn--strae-oqa.example'
    """
    parts = urlsplit(address)
    try:
        port, host = parts.port, parts.hostname
        if host and not host.isascii():
            import idna  # which the server's packages bring; Python's own has older rules than browsers

            host = idna.encode(host, uts46=True).decode()
    except ValueError:
        port = host = None
    if not parts.scheme or not host or parts.username is not None or parts.query or parts.fragment:
        raise ConfigurationError(f"{option} is {address}: expected an address such as https://mt.example.org")
    host = f"[{host}]" if ":" in host else host
    usual = {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{host}" + (f":{port}" if port not in (None, usual) else "")


def foreign(headers: Mapping[str, str], limits: Limits) -> str:
    """Say why a request comes from another site by a visitor's browser; nothing where it does not.

    Browsers name the page's site as `Origin`, or say of a request without it that it is `cross-site`; a site
    whose name was made to lead here is named as `Host`.

    >>> foreign({"host": "localhost:5000", "origin": "https://a.org"}, Limits())
    'requests from pages of https://a.org are refused: start the server with --allow-origin https://a.org'
    >>> foreign({"host": "example.org:5000"}, Limits())
    'this server is not example.org:5000: ask for it as localhost, or start it with --public-url'
    >>> foreign({"host": "localhost:5000", "origin": "http://localhost:5000"}, Limits())
    ''
    """
    asked = headers.get("host", "")
    origin = headers.get("origin")
    try:
        if limits.host in LOOPBACK and urlsplit(f"//{asked}").hostname not in limits.names:
            return f"this server is not {asked[:100]}: ask for it as localhost, or start it with --public-url"
        if origin is None and headers.get("sec-fetch-site") == "cross-site":
            return "requests from pages of other sites are refused, unless the server is started with --allow-origin"
        if origin is not None and not {"*", origin} & {*limits.origins} and urlsplit(origin).netloc != asked:
            named = f"requests from pages of {origin[:100]} are refused"
            return f"{named}: start the server with --allow-origin {origin[:100]}"
    except ValueError:
        return "Host or Origin is no address"
    return ""
