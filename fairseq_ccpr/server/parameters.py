"""The parameters of a request: forms, JSON, and types of values."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import anyio
import python_multipart  # noqa: F401 - starlette asks for it when the first form comes, which is late
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from fairseq_ccpr.server.access import split_names

FORM, JSON, PARTS = "application/x-www-form-urlencoded", "application/json", "multipart/form-data"
LISTS = ("q", "text")  # parameters that may be
TEXT_PARAMETERS = (*LISTS, "s", "name")  # which may be empty; any other parameter that is empty is left out
BYTES_OF_CHARACTER = 12  # at most: `\ud83d\ude00` in JSON, %F0%9F%98%80 in a form
MOST_NAMES = 1000  # characters of a list of names
BYTES_BESIDE = 1 << 16  # of all parameters that are no text
# that a body, or the next part of a file, may take to arrive; bytes of a file
MAX_SECONDS, MOST_FILE = 30, 1 << 26
KEY_FIRST = "send the API key as Authorization: Bearer, so that it is known first"
MOST_UNKNOWN = 1 << 22  # bytes of a file whose key is not known before it is read
# what a request has besides its own parameters: the memories that its key opens, and whose sessions it has
OPENED, OWNER = "opened", "owner"
GONE = 499  # as the status of a request whose client did not wait; nobody receives it
Parameters = dict[str, Any]
T = TypeVar("T")


def bad(sentence: str, status: int = 400) -> HTTPException:
    """Make the error that refuses a request."""
    return HTTPException(status, sentence)


async def read_parameters(request: Request, most_characters: int, most_file: int = 0) -> Parameters:
    """Read the parameters of a request: of its address, a form, or JSON; `LISTS` may be of several.

    Args:
        most_file: bytes of the file that a form may have; 0: none.
    """
    return without_absent(await _read(request, most_characters, most_file))


def without_absent(given: Parameters) -> Parameters:
    """Leave out what is null, or empty and no text, as clients send it for what they do not ask for."""
    return {
        name: value
        for name, value in given.items()
        if value is not None and (value != "" or name in TEXT_PARAMETERS)
    }


async def save(body: AsyncIterator[bytes], path: Path) -> None:
    """Write a file that was sent."""
    with path.open("wb") as file:
        while True:
            with _arriving():
                chunk = await anext(body, None)
            if chunk is None:
                break
            file.write(chunk)
            if file.tell() > MOST_FILE:
                raise bad(f"the file is longer than {MOST_FILE >> 20} MiB: use fairseq-ccpr learn", 413)


@contextmanager
def _arriving() -> Iterator[None]:
    """Bound the time that is waited for a body, or its next part."""
    try:
        with anyio.fail_after(MAX_SECONDS):
            yield
    except TimeoutError:
        raise bad(f"the request took longer than {MAX_SECONDS} seconds to arrive", 408) from None
    except ClientDisconnect:
        raise bad("the client went away", GONE) from None


async def _read(request: Request, most_characters: int, most_file: int) -> Parameters:
    pairs = list(request.query_params.multi_items())
    if request.method != "POST" and request.headers.get("content-length", "0") == "0":
        return _by_name(pairs)
    most = BYTES_OF_CHARACTER * most_characters + BYTES_BESIDE + most_file
    do = KEY_FIRST if most_file == MOST_UNKNOWN else "divide it"
    body = await _read_body(request, most, do)
    kind = request.headers.get("content-type", FORM).partition(";")[0].strip().lower()
    named: Parameters = {}
    try:
        if kind == FORM:
            pairs += parse_qsl(body.decode("utf-8"), keep_blank_values=True, errors="strict")
        elif kind == PARTS:
            pairs += await _read_parts(request, body, int(most_file > 0))
        elif kind == JSON:
            named = json.loads(body)
            if not isinstance(named, dict):
                raise bad(f"the body is JSON, but not an object: expected {{…}}, found {kind_of(named)}")
        else:
            raise bad(f"the body is {kind[:60]}: send {JSON}, {FORM} or {PARTS}", 415)
    except (ValueError, RecursionError) as error:
        raise bad(f"the body is not valid {kind} in UTF-8: {str(error)[:100]}") from None
    except MultiPartException as error:
        told = f"the form cannot be read ({error.message.rstrip('.')})"
        raise bad(f"{told}: send fields of text, and {'one' if most_file else 'no'} file") from None
    return _by_name(pairs) | named


async def _read_parts(request: Request, body: bytes, files: int) -> list[tuple[str, Any]]:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    if not files:
        body.decode("utf-8")  # what is no UTF-8 would be taken for Latin-1
    most = len(body)
    parser = MultiPartParser(request.headers, stream(), max_files=files, max_fields=inf, max_part_size=most)
    return (await parser.parse()).multi_items()


async def _read_body(request: Request, most: int, do: str) -> bytes:
    too_long = bad(f"the request is longer than the {most:,} bytes that this server takes: {do}", 413)
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > most:
        raise too_long
    body = bytearray()
    with _arriving():
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise too_long
    return bytes(body)


def _by_name(pairs: list[tuple[str, str]]) -> Parameters:
    named: Parameters = dict(pairs)
    for several in LISTS:
        if len(texts := [value for name, value in pairs if name == several]) > 1:
            named[several] = texts
    return named


def kind_of(value: object) -> str:
    """Name the kind of a value of JSON."""
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def text(parameters: Parameters, name: str, most_characters: int, default: str | None = None) -> str:
    """Return a parameter that is one text, and not too long."""
    value = parameters.get(name, default)
    if value is None:
        raise bad(f"the parameter {name} is missing")
    if not isinstance(value, str):
        several = " or a list of texts" * (name in LISTS)
        raise bad(f"the parameter {name} is {kind_of(value)}: expected a text{several}")
    _check([value], name, most_characters)
    return value


def texts(parameters: Parameters, name: str, most_characters: int) -> list[str]:
    """Return a parameter that is a text or a list of them, as a list; an empty one counts as a character."""
    value = parameters.get(name)
    if not isinstance(value, list):
        return [text(parameters, name, most_characters)]
    if not all(isinstance(one, str) for one in value):
        raise bad(
            f"the parameter {name} is a list of other things than texts: expected a text or a list of texts"
        )
    _check(value, name, most_characters)
    return value


def names(parameters: Parameters, name: str) -> tuple[str, ...]:
    """Return a parameter that is names divided by commas, or a list of them; none where it is left out."""
    return split_names(",".join(texts({name: "", **parameters}, name, MOST_NAMES)))


def number(parameters: Parameters, name: str, default: int) -> int:
    """Return a parameter that is a whole number; below 0 it is 0."""
    return max(0, _parsed(parameters, name, default, int, "a whole number from 0"))


def flag(parameters: Parameters, name: str) -> bool:
    """Return a parameter that is true or false; false where it is left out."""
    known = {"true": True, "1": True, "false": False, "0": False}
    return _parsed(parameters, name, False, lambda text: known[text.lower()], "true or false")


def share(parameters: Parameters, name: str) -> float:
    """Return a parameter that is a number from 0 to 1; 0 where it is left out."""

    def read(text: str) -> float:
        if not 0 <= float(text) <= 1:
            raise ValueError
        return float(text)

    return _parsed(parameters, name, 0.0, read, "a number from 0 to 1")


def _parsed(parameters: Parameters, name: str, default: T, read: Callable[[str], T], expected: str) -> T:
    text = str(parameters.get(name, default))
    try:
        return read(text)
    except (ValueError, KeyError):
        raise bad(f"the parameter {name} is {text[:30]!r}: expected {expected}") from None


def _check(values: list[str], name: str, most: int) -> None:
    length = sum(max(1, len(value)) for value in values)
    if length > most:
        raise bad(
            f"the parameter {name} has {length:,} characters, and this server takes {most:,}: divide it"
        )
    try:
        for value in values:
            value.encode()
    except UnicodeEncodeError:
        raise bad(f"the parameter {name} has half a character (a lone surrogate): send Unicode") from None
