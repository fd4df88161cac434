"""The errors users can cause, and how they are reported: one sentence on stderr, and exit code 1."""

from __future__ import annotations

import difflib
import errno
import os
import pickle
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = "fairseq-ccpr"
# of a disk, of the size that a file may have, of what a user may
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class CcprError(Exception):
    """Base of errors whose message is for the user: what was found, what was expected, what to do."""


class ConfigurationError(CcprError):
    """An option, or a combination of options, that cannot work."""


class UnknownMemoryError(ConfigurationError):
    """A name that no memory and no session has."""


class DatastoreError(CcprError):
    """A datastore that is missing, unfinished, damaged, or made for something else."""


class NotWritableError(DatastoreError):
    """A datastore that this user may read, but not write."""


class UnreachableError(DatastoreError):
    """A datastore on another machine that does not answer."""


class CheckpointError(CcprError):
    """A model checkpoint that cannot be loaded."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that rejects a word: the similar word that may have been meant, if any.

    >>> did_you_mean("--baem", ["--beam", "--lenpen"])
    '; did you mean --beam?'
    """
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def explain_usage(message: str, known: Iterable[str]) -> str:
    """Rephrase argparse's message on a wrong command line: it suggests what may have been meant.

    >>> explain_usage("unrecognized arguments: --baem 5", ["--beam"])
    'there is no option --baem; did you mean --beam?'
    >>> explain_usage("argument --bpe: invalid choice: 'byte' (choose from 'bytes', 'gpt2')", [])
    '--bpe byte: there is no such choice; did you mean bytes?'
    """
    if choice := re.fullmatch(
        r"argument (\S+): invalid choice: '(.*?)' \(choose from (.*)\)", message, re.DOTALL
    ):
        option, word, listed = choice.groups()
        choices = [one.strip(" '") for one in listed.split(",")]
        near = did_you_mean(word, choices) or f"; give one of {', '.join(choices)}"
        hint = " (a task of your own needs --user-dir)" if option == "--task" else ""
        return f"{option} {word}: there is no such choice{hint}{near}"
    kind, _, rest = message.partition("unrecognized arguments: ")
    if kind or not rest:
        return message
    word = rest.split()[0].partition("=")[0]
    if word.startswith("-"):
        return f"there is no option {word}{did_you_mean(word, known)}"
    reads = "--input" in known and Path(word).is_file()
    return f"'{rest}' belongs to no option" + (f": give --input {word}, or < {word}" if reads else "")


def describe(error: BaseException) -> str | None:
    """Put an error that a user can cause in one sentence; None for a fault of the program."""
    if isinstance(error, CcprError):
        return str(error)
    if isinstance(error, pickle.UnpicklingError):
        code = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it asks for `{code.group(1)}`" if code else "it is not a file of weights"
        return (
            f"the checkpoint was refused and nothing in it was run: {what}, and only tensors and plain settings are "
            "read from checkpoints; if you trust its maker, re-save it with its weights and settings alone"
        )
    if type(error).__module__ == "omegaconf.errors" and "nterpolation" in type(error).__name__:
        return "a path has ${ in it, which fairseq's own commands take for a reference to an option: rename the folder"
    if isinstance(error, ModuleNotFoundError) and error.name in {
        Path(word.rpartition("=")[2]).name for word in sys.argv
    }:
        return f"--user-dir: there is no folder {error.name} to import"
    if isinstance(error, UnicodeEncodeError) and error.encoding != "utf-8":
        return (
            f"the locale's encoding, {error.encoding}, has no {error.object[error.start]!r}: set PYTHONUTF8=1"
        )
    # of torch, and of FAISS in a search
    if isinstance(error, RuntimeError) and "out of memory" in str(error):
        return (
            f"the GPU is out of memory ({str(error).strip().splitlines()[0]}): make batches smaller with --max-tokens or "
            "--batch-size, give --fp16, or work on the CPU with --cpu"
        )
    if isinstance(error, OSError):
        if not error.strerror:  # as fairseq raises them, with nothing but the path
            missing = isinstance(error, FileNotFoundError) and str(error).strip()
            return (
                f"{error}: there is no such file or folder" if missing and " " not in missing else str(error)
            )
        names = " -> ".join(str(n) for n in (error.filename, error.filename2) if n is not None)
        return f"{names}: {error.strerror}" if names else error.strerror
    return None


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Give errors of a full disk, or of a file that may not grow, the name that Python leaves out."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in FULL:
            error.filename = str(path)
        raise
    except Exception as error:  # of safetensors and torch, which have errors of their own
        if any(os.strerror(number) in str(error) for number in FULL) or "PytorchStreamWriter failed" in str(
            error
        ):
            raise OSError(
                errno.ENOSPC, "the disk is full, or the file would be too large", str(path)
            ) from None
        raise


def installing(extra: str) -> str:
    """Return the command that installs what an extra is made of.

    >>> installing("align")
    "pip install 'sil-thot>=3.5'"
    """
    from importlib.metadata import PackageNotFoundError, requires  # slow to import, and rarely needed

    try:
        listed = [one.split("; extra == ") for one in requires(PROGRAM) or ()]
    except PackageNotFoundError:  # the plug-in is used where it lies
        return f"pip install '.[{extra}]' where its pyproject.toml is"
    return f"pip install {shlex.join(one for one, *of in listed if of and of[0][1:-1] == extra)}"
