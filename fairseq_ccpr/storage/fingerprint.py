"""Fingerprints: SHA-256 digests that tie a datastore to what it was built from and must be used with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor


def of_file(path: Path, done: Callable[[int], object] = lambda count: None) -> str:
    """Digest a file's bytes, read in pieces, calling `done` with the length of each."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
            done(len(chunk))
    return digest.hexdigest()


def of_files(paths: Iterable[Path]) -> str:
    """Digest several files in the given order; their names and folders do not count."""
    return of_strings(of_file(path) for path in paths)


def of_strings(strings: Iterable[str]) -> str:
    """Digest a sequence of strings, in order.

    >>> of_strings(["ab", "c"]) == of_strings(["a", "bc"])
    False
    """
    digest = hashlib.sha256()
    for string in strings:
        encoded = string.encode("utf-8")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


def hash_bytes(content: bytes) -> int:
    """Hash bytes to a uint64 that is never 0."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") or 1


def of_parameters(named: Iterable[tuple[str, Tensor]]) -> str:
    """Digest a model's parameters, rounded to fp16 so that a model and its `--fp16` form are the same model.

    >>> weight = torch.ones(2, 2)
    >>> of_parameters([("w", weight)]) == of_parameters([("w", weight.half())])
    True
    """

    def parts() -> Iterator[str]:
        for name, parameter in sorted(named, key=lambda item: item[0]):
            yield f"{name} {tuple(parameter.shape)}"
            half = parameter.detach().to(device="cpu", dtype=torch.float16).contiguous()
            yield hashlib.sha256(half.numpy().tobytes()).hexdigest()

    return of_strings(parts())


def short(fingerprint: str) -> str:
    """Return the first 12 digits, enough to tell fingerprints apart in messages."""
    return fingerprint[:12]


def brief(value: object) -> str:
    """Shorten a fingerprint, and leave anything else as it is."""
    return short(value) if isinstance(value, str) and len(value) == 64 else str(value)
