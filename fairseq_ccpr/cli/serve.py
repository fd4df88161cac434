"""`fairseq-ccpr serve`: a server that translates, explains and learns, for LibreTranslate's clients and the browser."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from fairseq_ccpr.cli.command import command
from fairseq_ccpr.common_options import count_option
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.extras import installing
from fairseq_ccpr.server.access import KEY_VARIABLE, LOGS, LOOPBACK, NOTHING, Limits, read_key
from fairseq_ccpr.settings import option
from fairseq_ccpr.translator import Translator

HELP = f"""\
Serve LibreTranslate's API, and a page for the browser where translations are corrected and learnt.

  fairseq-ccpr serve --datastore datastores/mine
  curl http://127.0.0.1:5000/translate -d source=de -d target=en -d q="Guten Morgen."

All options of decoding apply, as for translate. Besides /translate, /languages, /detect and /health there are /learn, /memory
and /explain. The server listens on this machine only, unless --host names another address, which needs an API key in a file
or in the environment variable {KEY_VARIABLE}. SIGTERM or Ctrl-C stop it when all accepted requests are answered.

It needs further packages: {installing("serve")}.
"""


@dataclass
class Options:
    """The command's own options."""

    host: str = option(Limits.host, "address to listen on", metavar="ADDRESS")
    port: int = option(5000, "port to listen on; 0: any free one", within="[0, 65535]", needs="a port", metavar="N")
    api_key_file: Optional[Path] = option(None, "file with the API key that requests must carry", metavar="FILE")
    max_characters: int = count_option(Limits.most_characters, "longest request, in characters")
    log: str = option(
        NOTHING, "what is logged to standard error: nothing, requests without their texts, or with texts",
        choices=LOGS,
    )  # fmt: skip
    data: Optional[Path] = option(
        None, "folder with the model's dictionaries (found in the datastore, or next to the model)", metavar="DATA_BIN"
    )


def serve(options: Options, rest: list[str]) -> int:
    """Load, and answer until told to stop."""
    try:
        from fairseq_ccpr.server import serving
    except ImportError as error:
        raise ConfigurationError(
            f"the server needs {error.name}, which is not installed: {installing('serve')}"
        ) from None
    key = read_key(options.api_key_file)
    if options.host not in LOOPBACK and key is None:
        raise ConfigurationError(
            f"--host {options.host} lets other machines in: give --api-key-file FILE, or a key in {KEY_VARIABLE}"
        )
    with serving.listen(options.host, options.port) as listening:
        translator = Translator.of(rest, options.data)
        translator.check_encoding()
        translator.lock()
        host = f"[{options.host}]" if ":" in options.host else options.host
        print(f"http://{host}:{listening.getsockname()[1]}", flush=True)
        print(f"retrieval signature: {translator.signature or 'none, the model translates alone'}", file=sys.stderr)
        serving.serve(translator, Limits(options.host, key, options.max_characters, options.log), listening)
    return 0


main = command(HELP, serve, Options, rest=True)
