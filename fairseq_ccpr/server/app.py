"""The server's routes, its page, and the process that serves them."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from traceback import format_exception, format_tb
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from fairseq_ccpr.errors import CcprError, ConfigurationError, UnknownMemoryError
from fairseq_ccpr.evaluation.explanation import STYLES, TOKENS, Explanation, as_json, as_page
from fairseq_ccpr.evaluation.page import fill
from fairseq_ccpr.server import parameters as given
from fairseq_ccpr.server.access import LOG_NOTHING, LOG_TEXTS, LOOPBACK, Limits, foreign, memories_of
from fairseq_ccpr.server.deepl import VERSIONS, DeepL
from fairseq_ccpr.server.parameters import OPENED, OWNER, Parameters, bad
from fairseq_ccpr.server.service import Service
from fairseq_ccpr.server.work import BusyError
from fairseq_ccpr.translator import Translator

PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# of every answer: what keeps browsers from guessing, framing, telling and keeping it
HEADERS = [("x-content-type-options", "nosniff"), ("x-frame-options", "DENY")]
HEADERS += [("referrer-policy", "no-referrer"), ("cache-control", "no-store")]
logger = logging.getLogger(__name__)
Handler = Callable[[Parameters], Coroutine[Any, Any, Any]]
SECONDS_TO_FINISH = 60  # in which open requests are answered after a signal to stop
SECONDS_OF_HEADERS = 10  # in which they have to arrive
# so that the files of a datastore can be opened besides them, where 1,024 files are allowed
MOST_CONNECTIONS = 512
MOST_OF_ADDRESS = 64  # of these, so that one machine cannot hold all; a proxy on this machine may
MOST_REFUSED = 32  # of those above these limits, which get an answer; others are closed
REFUSED_BODY = b'{"error": "too many connections are open: try again later"}'
REFUSED = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n" + (
    b"content-length: %d\r\n\r\n%b" % (len(REFUSED_BODY), REFUSED_BODY)
)
WRONG_KEY = "the API key is missing or wrong: send it as api_key, or as Authorization: Bearer"
MOST_UPLOADS = 2  # documents that are received at once
BEARERS = ("bearer", "deepl-auth-key")  # of a key, as Authorization
LACKING = ("/metrics", "/spec", "/docs")


def page(settings: dict[str, Any]) -> str:
    """Return the page for the settings of `Service.of_page`; its script makes text of text alone."""
    html, style, script = (Path(__file__).with_name(f"page.{kind}") for kind in ("html", "css", "js"))
    parts = {
        "/* style */": STYLES + style.read_text("utf-8"),
        "/* script */": TOKENS + script.read_text("utf-8"),
    }
    return fill(html, parts | {"/* data */": as_json(settings)})


def endpoint(
    handler: Handler, limits: Limits, *, open_to_all: bool = False, file: bool = False, files: int = 0
) -> Callable[[Request], Awaitable[Response]]:
    """Make a handler an endpoint: read, check who asks, answer; errors become JSON.

    Args:
        file: whether the body is a file. files: how many documents a form has at most.
    """

    uploads = [asyncio.Semaphore(MOST_UPLOADS) for _ in range(2)]  # without a key, and with one

    async def answer(request: Request) -> Response:
        start, asked = time.perf_counter(), Parameters()
        try:
            if reason := foreign(request.headers, limits):
                raise bad(reason, 403)
            alone = given.without_absent(dict(request.query_params))
            early = _key(request, alone)
            known = not limits.keys or memories_of(limits.keys, early) is not None
            if files and early is not None and not known:
                raise bad(WRONG_KEY, 403)
            most = given.MOST_FILE if known else given.MOST_UNKNOWN
            if file:
                asked = alone | {"body": request.stream(), "unless_gone": partial(_unless_gone, request)}
            else:
                async with uploads[known] if files else nullcontext():
                    asked = await given.read_parameters(request, limits.most_characters, files * most)
                asked |= {**request.path_params, "site": _site(request, limits)}
            key = _key(request, asked)
            asked[OPENED] = memories_of(limits.keys, key) if limits.keys and not open_to_all else ()
            asked[OWNER] = key if limits.keys else ""
            if asked[OPENED] is None:
                raise bad(WRONG_KEY, 403)
            handling = handler(asked)  # which itself receives a file
            found = await (handling if file else _unless_gone(request, handling))
            if isinstance(found, Explanation):
                found = asdict(found)
                if "text/html" in request.headers.get("accept", ""):
                    found = HTMLResponse(as_page(found))
            response = found if isinstance(found, Response) else JSONResponse(found)
        except Exception as error:
            response = _refuse(request, error, limits.log)
        if limits.log != LOG_NOTHING:
            text = f" {asked.get('q', '')!r} {asked.get('s', '')!r}" if limits.log == LOG_TEXTS else ""
            took = 1000 * (time.perf_counter() - start)
            told = request.method, request.scope["path"], response.status_code, took
            logger.info("%s %r %d %.0f ms%s", *told, text)
        return response

    return answer


def _key(request: Request, asked: Mapping[str, Any]) -> Any:
    """Return the API key that a request has among its parameters, or in its header."""
    kind, _, bearer = request.headers.get("authorization", "").partition(" ")
    return asked.get("api_key", bearer if kind.lower() in BEARERS else None)


def _site(request: Request, limits: Limits) -> str:
    """Return the address of this server as clients know it, by --public-url where a proxy has it."""
    host = request.headers.get("host", "")
    shown = (one for one in limits.origins if one.partition("://")[2] == host)
    return next(shown, f"{request.url.scheme}://{host}")


async def _unless_gone(request: Request, handling: Coroutine[Any, Any, Any]) -> Any:
    """Return what a handler does; cancel it where the client leaves before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering, leaving = asyncio.ensure_future(handling), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise bad("the client went away", given.GONE)
        return answering.result()
    finally:
        answering.cancel()
        leaving.cancel()


def _refuse(request: Request, error: Exception, log: str) -> Response:
    if isinstance(error, HTTPException):
        status, sentence = error.status_code, error.detail
    elif isinstance(error, UnknownMemoryError):
        status, sentence = 404, str(error)
    elif isinstance(error, CcprError | BusyError):
        status, sentence = 400 if isinstance(error, ConfigurationError) else 503, str(error)
    else:
        # The message of an error may quote what was sent, its traceback does not.
        shown = [type(error).__name__, "\n", *format_tb(error.__traceback__)]
        logger.error("a request failed: %s", "".join(format_exception(error) if log == LOG_TEXTS else shown))
        status, sentence = 500, "the server has a fault, which its log tells"
    return JSONResponse(_told(request, sentence), status)


async def _refused(request: Request, error: Exception) -> Response:
    path = request.scope["path"]
    if isinstance(error, HTTPException) and error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        told = f"{request.method} is not allowed for {path}: use {' or '.join(sorted({*allow.split(', ')} - {'HEAD'}))}"
        return JSONResponse(_told(request, told), 405, {"Allow": allow})
    lacks = ", which LibreTranslate has" if path in LACKING else ""
    return JSONResponse(_told(request, f"there is no path {path}{lacks}"), 404)


def _told(request: Request, sentence: str) -> dict[str, str]:
    """Tell an error as clients of the path read it."""
    return {"message" if request.scope["path"].startswith(VERSIONS) else "error": sentence}


def make_app(service: Service) -> Starlette:
    """Make the ASGI application; when it ends, what waits is finished first."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.work.close)

    deepl = DeepL(service)

    async def root(request: Request) -> Response:
        return HTMLResponse(page(service.of_page()), headers={"Content-Security-Policy": PAGE_POLICY})

    def route(path: str, handler: Handler, *methods: str, **settings: Any) -> Route:
        return Route(path, endpoint(handler, service.limits, **settings), methods=list(methods))

    app = Starlette(
        routes=[
            Route("/", root, methods=["GET"]),
            route("/translate", service.translate, "POST"),
            route("/sentences", service.sentences, "POST"),
            route("/translate_file", service.translate_file, "POST", files=1),
            route("/download_file/{name}", service.download_file, "GET", open_to_all=True),
            route("/languages", service.languages, "GET", open_to_all=True),
            route("/detect", service.detect, "POST"),
            route("/health", service.health, "GET", open_to_all=True),
            route("/frontend/settings", service.settings, "GET", open_to_all=True),
            route("/learn", service.learn, "POST"),
            route("/suggest", service.learn, "POST"),
            route("/memory", service.memory, "GET"),
            route("/memory", service.add, "POST", file=True),
            route("/memory.tmx", service.export, "GET"),
            route("/memory/{id}", service.forget, "DELETE"),
            route("/session/{session:path}", service.end, "DELETE"),
            route("/explain", service.explain, "GET", "POST"),
            route("/v2/translate", deepl.translate, "POST"),
            route("/v2/languages", deepl.languages, "GET", "POST"),
            route("/v2/usage", deepl.usage, "GET", "POST"),
            route("/v2/glossary-language-pairs", deepl.glossary_pairs, "GET"),
        ],
        exception_handlers={HTTPException: _refused},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    if service.limits.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.limits.origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization"],
        )
    return app


class _Server(uvicorn.Server):
    """Ends the reading of files when it begins to stop."""

    service: Service

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.service.stopping.set()
        super().handle_exit(sig, frame)


class _Protocol(H11Protocol):
    """Closes connections whose headers do not arrive in time, and refuses those that are too many."""

    _waiting: asyncio.TimerHandle | None = None
    _excess = 0  # connections above the limits when it came

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        host = _host(self)
        same = sum(_host(one) == host for one in self.connections)
        of_host = 0 if host in LOOPBACK else same - MOST_OF_ADDRESS
        self._excess = max(len(self.connections) - MOST_CONNECTIONS, of_host)
        if self._excess > MOST_REFUSED:
            transport.abort()
        self._wait()

    def data_received(self, data: bytes) -> None:
        if self._excess > 0:
            self.transport.write(REFUSED)
            self.transport.close()
            return
        super().data_received(data)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._waiting is not None:
            self._waiting.cancel()

    def _wait(self) -> None:
        if self.conn.their_state is not h11.IDLE and self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        elif self.conn.their_state is h11.IDLE and self._waiting is None:
            self._waiting = self.loop.call_later(SECONDS_OF_HEADERS, self.transport.abort)


def _host(connection: Any) -> str:
    """Return the address of who connects; that of IPv4 where a socket of IPv6 maps it."""
    address = ip_address(connection.client[0]) if connection.client else ""
    return str(getattr(address, "ipv4_mapped", None) or address)


def listen(host: str, port: int) -> socket.socket:
    """Bind the address, before anything is loaded; port 0 is any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        used = error.errno == errno.EADDRINUSE
        found = f"port {port} of {host} {'is in use' if used else f'cannot be bound ({error.strerror})'}"
        raise ConfigurationError(f"{found}: give another --port{' or --host' * (not used)}") from None


def make_server(translator: Translator, limits: Limits) -> uvicorn.Server:
    """Make the server of a translator, which owns it from now on."""
    service = Service(translator, limits)
    config = uvicorn.Config(
        make_app(service),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=SECONDS_TO_FINISH,
        lifespan="on",
        ws="none",
        headers=HEADERS,
        http=_Protocol,
    )
    server = _Server(config)
    server.service = service
    return server


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
