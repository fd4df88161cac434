"""`fairseq-ccpr serve`, and what its options say: keys, and the addresses of sites."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Optional
from urllib.parse import urlsplit

from fairseq_ccpr.cli.command import command, named
from fairseq_ccpr.cli.decode import described
from fairseq_ccpr.errors import ConfigurationError, installing
from fairseq_ccpr.inference.learning import author_fault
from fairseq_ccpr.server.access import KEY_VARIABLE, LOG_NOTHING, LOGS, LOOPBACK, MIN_KEY, Limits, split_names
from fairseq_ccpr.settings import count_option, option
from fairseq_ccpr.translator import Translator


@command(f"""\
Serve LibreTranslate's API, and a page for the browser where translations are corrected and learned.

  fairseq-ccpr serve --datastore datastores/mine
  curl http://127.0.0.1:5000/translate -d source=de -d target=en -d q="Guten Morgen."

All options of decoding apply, as for translate. Besides /translate, /languages, /detect and /health there are /learn, /memory
and /explain. The server listens on this machine only, unless --host names another address, which needs an API key in a file
or in the environment variable {KEY_VARIABLE}. SIGTERM or Ctrl-C stop it when all accepted requests are answered.

It needs further packages: {installing("serve")}.
""")
def serve(
    rest: list[str],
    datastore: list[str] = option(
        [], "datastore; several are chosen by names (the folders')", nargs="+", metavar="[NAME=]DIR"
    ),
    host: str = option(Limits.host, "address to listen on", metavar="ADDRESS"),
    port: int = option(
        5000, "port to listen on; 0: any free one", within="[0, 65535]", needs="a port", metavar="N"
    ),
    api_key_file: Optional[Path] = option(
        None,
        "file with the keys that requests carry, one a line; after tabs the memories it opens (all), whose it is",
        metavar="FILE",
    ),
    public_url: Optional[str] = option(
        None, "address at which a proxy shows the server, such as one with TLS", metavar="URL"
    ),
    allow_origin: list[str] = option(
        [],
        "pages that may use the server, such as https://example.org; with an API key also *, all",
        nargs="+",
        metavar="ORIGIN",
    ),
    max_characters: int = count_option(Limits.most_characters, "longest request, in characters"),
    max_sentences: int = count_option(Limits.most_sentences, "longest request, in sentences"),
    log: str = option(
        LOG_NOTHING,
        "what is logged to standard error: nothing, requests without their texts, or with texts",
        choices=LOGS,
    ),
    data: Optional[Path] = None,
) -> int:
    try:
        from fairseq_ccpr.server import app
    except ImportError as error:
        raise ConfigurationError(
            f"the server needs {error.name}, which is not installed: {installing('serve')}"
        ) from None
    datastores = named(datastore, "datastores")
    if len(datastore) < 2 and [*datastores.values()] == datastore:  # it has no name
        rest, datastores = [*rest, *(f"--datastore={one}" for one in datastore)], {}
    keys, authors = read_keys(api_key_file, datastores)
    origins, names = _known_sites(public_url, allow_origin, bool(keys))
    if host not in LOOPBACK and not keys:
        raise ConfigurationError(
            f"--host {host} lets other machines in: give --api-key-file FILE, or a key in {KEY_VARIABLE}"
        )
    limits = Limits(host, keys, authors, max_characters, max_sentences, log, names, origins)
    with app.listen(host, port) as listening:
        translator = Translator.of(rest, data, datastores)
        for one in translator.named.values():
            one.check_encoding()
            one.lock()
        print(f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}", flush=True)
        for name, one in translator.named.items():
            print(f"{name} {described(one)}".lstrip(), file=sys.stderr)
        app.serve(translator, limits, listening)
    return 0


def read_keys(
    path: Path | None, memories: Collection[str] = ()
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Read the API keys of a file, or else the environment.

    On each line is one, after a tab what it opens, and after another whose it is.

    Args:
        memories: the names of the server's memories.

    Returns:
        What each key opens, nothing for all; and the names of those who have them, as far as they are there.
    """
    if path is None:
        text, where = os.environ.get(KEY_VARIABLE), KEY_VARIABLE
        if text is None:
            return {}, {}
    else:
        where = f"--api-key-file {path}"
        if not path.is_file():
            raise ConfigurationError(f"{where}: there is no such file")
        try:
            text = path.read_text(encoding="utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise ConfigurationError(f"{where}: the bytes are not UTF-8; write a line of text") from None
    keys, authors = dict[str, tuple[str, ...]](), dict[str, str]()
    for number, line in enumerate(text.split("\n"), 1):
        key, *rest = map(str.strip, line.split("\t", 2))
        opened, author = (*rest, "", "")[:2]
        if len(key) < MIN_KEY or not key.isprintable() or key in keys:
            found = "is there twice" if key in keys else f"has {len(key)} characters"
            told = f"{where}, line {number}, {found}"
            raise ConfigurationError(f"{told}: a key is one line of {MIN_KEY} or more")
        keys[key] = split_names(opened)
        authors |= {key: author} if author else {}
        if fault := author_fault(author):
            raise ConfigurationError(f"{where}, line {number}, {fault}")
        named_none = rest and (
            memories or len(rest) == 1
        )  # a column left empty by mistake is not to open all
        unknown = [name for name in keys[key] or [""] * bool(named_none) if name not in memories]
        if unknown:
            known = f"has {' and '.join(memories)}" if memories else "has no named ones"
            told = f"{where}, line {number}, opens the memory '{unknown[0]}'"
            raise ConfigurationError(f"{told}, and the server {known}")
    return keys, authors


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


def _known_sites(
    public_url: str | None, allow_origin: list[str], asks_for_key: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the origins of pages that may use a server, and the names of the server itself."""
    if (every := {"*", "null"}.intersection(allow_origin)) and not asks_for_key:
        raise ConfigurationError(
            f"--allow-origin {every.pop()} lets every site that is visited here in: give --api-key-file FILE, or a key in "
            f"{KEY_VARIABLE}"
        )
    origins = [one if one in ("*", "null") else origin_of(one, "--allow-origin") for one in allow_origin]
    if public_url is None:
        return tuple(origins), LOOPBACK
    if not asks_for_key:
        print(
            f"whoever reaches {public_url} may learn and forget here: the proxy must ask for a key",
            file=sys.stderr,
        )
    shown = origin_of(public_url, "--public-url")
    return (*origins, shown), (*LOOPBACK, urlsplit(shown).hostname or "")
