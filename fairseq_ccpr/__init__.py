"""fairseq-ccpr: retrieval-augmented machine translation as a fairseq plug-in (`--user-dir fairseq_ccpr`).

Importing this loads neither torch nor fairseq, so that a command answers `--help` at once. What it gives is
loaded, and registered with fairseq, as soon as anything needs it: a public name, a module of this package, or
fairseq itself.
"""

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fairseq_ccpr.errors import install_report
from fairseq_ccpr.version import __version__ as __version__

if TYPE_CHECKING:
    from fairseq_ccpr.plug_in import *  # noqa: F403

_PLUG_IN = f"{__name__}.plug_in"
# that need nothing registered
_LIGHT = ("__main__", "cli", "errors", "extras", "plug_in", "settings", "version")

# fairseq's main branch passes weights_only=False to torch.load. This torch switch overrides callers, here and
# in child processes. It is set at once: a checkpoint is never loaded without it where this package was
# imported.
os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"


@contextmanager
def _quietly() -> Iterator[None]:
    """Import what configures logging, warns, and announces which packages it lacks, and leave all as it was."""
    root, fairseq, handler = logging.getLogger(), logging.getLogger("fairseq"), logging.NullHandler()
    level = fairseq.level
    root.addHandler(handler)  # or a module of fairseq would set DEBUG by logging.basicConfig
    fairseq.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        fairseq.setLevel(level)
        root.removeHandler(handler)


class _Deferred(ModuleType):
    """A module whose functions import it when they are called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: getattr(import_module(self.__name__), name)(*args, **kwargs)


@contextmanager
def _deferred(*names: str) -> Iterator[None]:
    """Let modules imported meanwhile defer these: each function imports its module when it is called."""
    made: dict[str, ModuleType] = {}
    for name in names:
        package, _, module = name.partition(".")
        if name in sys.modules:
            continue
        if package not in sys.modules:
            made[package] = sys.modules[package] = ModuleType(package)
        made[name] = sys.modules[name] = _Deferred(name)
        if package in made:
            setattr(made[package], module, made[name])
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


def _load() -> ModuleType:
    # fairseq and sacreBLEU import them for other work than translation, a third of the start-up time.
    with _quietly(), _deferred("sklearn.metrics", "scipy.stats", "lxml.etree"):
        return import_module(_PLUG_IN)


class _Registration:
    """Load and register everything before fairseq, or a module of this package that needs it, is first imported.

    fairseq imports a `--user-dir` only where no module of its name was imported before: a program may have
    done so.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, module = name.partition(".")
        needed = name == "fairseq" or (package == __name__ and module.partition(".")[0] not in _LIGHT)
        loader: Any = self  # by duck typing, as importlib.abc is slow to import
        return ModuleSpec(name, loader) if needed and _PLUG_IN not in sys.modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        _load()
        module = import_module(spec.name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def __getattr__(name: str) -> Any:
    if name in _LIGHT or (name.startswith("_") and name != "__all__"):  # or looking for one would load all
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    public = {one: value for one, value in vars(_load()).items() if not one.startswith("_")}
    globals().update(public, __all__=["__version__", *public])
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})


if "fairseq" in sys.modules:
    if install_report():
        for _noisy in ("hydra", "matplotlib"):  # they log each step they take, since fairseq sets DEBUG
            logging.getLogger(_noisy).setLevel(logging.WARNING)
    _load()
else:
    sys.meta_path.insert(0, _Registration())
