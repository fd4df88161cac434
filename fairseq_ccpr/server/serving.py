"""Running the server: its socket, its signals, its end."""

from __future__ import annotations

import errno
import logging
import signal
import socket

import uvicorn

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.server.access import Limits
from fairseq_ccpr.server.app import make_app
from fairseq_ccpr.server.service import Service
from fairseq_ccpr.translator import Translator

SECONDS_TO_FINISH = 60  # that answers may take once the server is told to stop


def listen(host: str, port: int) -> socket.socket:
    """Bind the address, before anything is loaded; port 0 is any that is free.

    Raises:
        ConfigurationError: it is taken, or no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port {port} of {host} is in use: give another --port, or end what uses it"
            ) from None
        raise ConfigurationError(
            f"the server cannot listen at {host}, port {port} ({error.strerror}): give another --host or --port"
        ) from None


def make_server(translator: Translator, limits: Limits) -> uvicorn.Server:
    """Make the server of a translator, which owns it from now on."""
    config = uvicorn.Config(
        make_app(Service(translator, limits)), log_config=None, access_log=False, server_header=False,
        proxy_headers=False, timeout_graceful_shutdown=SECONDS_TO_FINISH, lifespan="on", ws="none",
    )  # fmt: skip
    return uvicorn.Server(config)


def serve(translator: Translator, limits: Limits, listening: socket.socket) -> None:
    """Answer until SIGTERM or SIGINT; what was asked before is answered then."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    for name, level in (("fairseq_ccpr.server", logging.INFO), ("uvicorn", logging.WARNING)):
        log = logging.getLogger(name)
        log.addHandler(handler)
        log.setLevel(level)
        log.propagate = False
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: None)  # uvicorn raises it again when all is done: that is no failure
    make_server(translator, limits).run([listening])
