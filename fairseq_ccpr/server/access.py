"""Who may ask a server for how much: API key, sizes, no pages of other sites. It needs no extra."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

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
    authors: Mapping[str, str] = field(default_factory=dict)  # whose the keys are, as far as that is said
    most_characters: int = 20_000
    most_sentences: int = 1000
    log: str = LOG_NOTHING
    # of this server, as browsers may ask for it where it listens on loopback
    names: tuple[str, ...] = LOOPBACK
    origins: tuple[str, ...] = ()  # of pages that may use it, besides its own


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
