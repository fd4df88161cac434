"""fairseq-ccpr: retrieval-augmented machine translation as a fairseq plug-in (`--user-dir fairseq_ccpr`).

Importing this loads neither torch nor fairseq, so that a command answers `--help` at once. What it gives is
loaded, and registered with fairseq, as soon as anything needs it: a public name, a module of this package, or
fairseq itself. `importing.py` says what that changes in fairseq and torch.
"""

from typing import TYPE_CHECKING, Any

from fairseq_ccpr import importing as _importing
from fairseq_ccpr.version import __version__ as __version__

if TYPE_CHECKING:
    from fairseq_ccpr.plug_in import *  # noqa: F403


def __getattr__(name: str) -> Any:
    # looking for one of these would load all
    if name not in _importing.LIGHT and (not name.startswith("_") or name == "__all__"):
        public = {one: value for one, value in vars(_importing.load_plug_in()).items() if one[0] != "_"}
        globals().update(public, __all__=["__version__", *public])
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})


_importing.prepare_fairseq()
