"""All that this package does to the import of fairseq and torch, begun by `prepare_fairseq`.

Each change, when it is made, and why. Nothing else here replaces a function or module of another package.

At once, when `fairseq_ccpr` is imported, which loads neither torch nor fairseq:

1. `TORCH_FORCE_WEIGHTS_ONLY_LOAD=1` in the environment. fairseq passes weights_only=False to torch.load;
   this switch of torch overrides callers, here and in child processes. So no checkpoint is ever loaded
   without it.
2. A finder, first in `sys.meta_path` (`_Registration`). It waits for the import of fairseq, or of a module
   of this package that needs it, and loads `plug_in.py` first, whose imports register our tasks, models and
   criterions. fairseq would do so for `--user-dir fairseq_ccpr`, but not where a program has imported this
   package before: it skips a user directory whose module is loaded. A command answers `--help` at once, as
   nothing was loaded. Where fairseq is there already, as under its own commands, `plug_in.py` is loaded at
   once, without a finder.
3. In fairseq's own commands alone: an excepthook that reports what users can cause in one sentence, and two
   loggers at WARNING, which log each step they take since fairseq sets DEBUG. How another program ends is
   its own affair.

While `plug_in.py` loads fairseq and torch (`load_plug_in`):

4. Logging and warnings are held back, and left as they were (`_quietly`): modules of fairseq call
   logging.basicConfig, warn, and announce which packages they lack.
5. sklearn.metrics, scipy.stats and lxml.etree, which fairseq and sacreBLEU import for other work than
   translation, are put off until a function of theirs is called (`_deferred`): a third of the start-up
   time.
6. What fairseq describes to Hydra, all of its dataclasses, is kept, and told when anything asks for Hydra's
   `ConfigStore` (`_described_later`), as its own commands do: `paths.py` makes configurations without. A
   third of a second.

At the end of `plug_in.py`, when all of them are there (`change_fairseq`):

7. torch may build the few classes that fairseq keeps in checkpoints (`_allow_settings`), so that they load
   with weights_only on. Its opposite switch in the environment is refused.
8. `utils.split_paths` takes a colon inside the name of a file that exists for a part of the name
   (`paths.py`).
9. `checkpoint_utils.load_model_ensemble_and_task` refuses a datastore (`_refuse_retrieval_by_hub`):
   fairseq's hub drops our options, and would translate without retrieval, silently.
10. `options.parse_args_and_arch` completes `--help` (`_show_options_of_tasks`), which fairseq prints before
    it has added the options of `--task` and of other choices.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any

from fairseq_ccpr.errors import PROGRAM, ConfigurationError, describe

PACKAGE = __name__.partition(".")[0]
PLUG_IN = f"{PACKAGE}.plug_in"
# of this package, what needs nothing registered
LIGHT = ("__main__", "cli", "errors", "extras", "importing", "plug_in", "settings", "version")
PUT_OFF = ("sklearn.metrics", "scipy.stats", "lxml.etree")
NOISY = ("hydra", "matplotlib")
UNSAFE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"  # which torch refuses beside the other, if only when it loads


def prepare_fairseq() -> None:
    """Make the changes that are made at once, and see that the others follow."""
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    if "fairseq" not in sys.modules:
        sys.meta_path.insert(0, _Registration())
        return
    if install_report():
        for noisy in NOISY:
            logging.getLogger(noisy).setLevel(logging.WARNING)
    load_plug_in()


def load_plug_in() -> ModuleType:
    """Load and register everything; returns `plug_in.py`, which has the public names."""
    if PLUG_IN in sys.modules:
        return import_module(PLUG_IN)  # once another thread has loaded it
    with _quietly(), _deferred(*PUT_OFF), _described_later():
        return import_module(PLUG_IN)


def change_fairseq() -> None:
    """Make the changes that need all modules: the last line of `plug_in.py`."""
    from fairseq import utils

    from fairseq_ccpr.paths import split_paths

    _allow_settings()
    utils.split_paths = split_paths
    _refuse_retrieval_by_hub()
    _show_options_of_tasks()


class _Registration:
    """A finder that loads the plug-in before fairseq, or a module of ours that needs it, is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, module = name.partition(".")
        needed = name == "fairseq" or (package == PACKAGE and module.partition(".")[0] not in LIGHT)
        loader: Any = self  # by duck typing, as importlib.abc is slow to import
        return ModuleSpec(name, loader) if needed and PLUG_IN not in sys.modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        load_plug_in()
        module = import_module(spec.name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


@contextmanager
def _quietly() -> Iterator[None]:
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


@contextmanager
def _described_later() -> Iterator[None]:
    from hydra.core import config_store

    known: Any = config_store.ConfigStore
    instance, waiting = known.instance, []
    later = SimpleNamespace(store=lambda **described: waiting.append(described))

    def told() -> Any:
        store = instance()
        for described in waiting:
            store.store(**described)
        known.instance = staticmethod(instance)
        return store

    known.instance = staticmethod(lambda: later)
    try:
        yield
    finally:
        known.instance = staticmethod(told)


def install_report() -> bool:
    """Let uncaught `CcprError`s, refused checkpoints and missing files end a fairseq command with one sentence.

    fairseq's own entry points know nothing of this package, so the interpreter's last resort is the one place
    where its errors can be reported without a traceback. Everything else goes to the hook that was there.

    Returns:
        Whether this is a command of fairseq.
    """
    program = Path(*sys.argv[:1])
    if not program.name.startswith("fairseq-") and program.parent.name != "fairseq_cli":
        return False
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sentence = describe(error)
        if sentence is None:
            previous(kind, error, trace)
        else:
            print(f"{PROGRAM}: error: {sentence}", file=sys.stderr)

    sys.excepthook = hook
    return True


def _allow_settings() -> None:
    """Name what checkpoints hold besides tensors: a Namespace of settings, and scores as NumPy's numbers."""
    from argparse import Namespace

    import numpy as np
    import torch

    # not dropped silently, as other code in the process may rely on it
    if os.environ.get(UNSAFE, "0").lower() in ("1", "y", "yes", "true"):
        raise ConfigurationError(
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set in the environment, which lets checkpoints run code: unset "
            "it, as fairseq-ccpr reads nothing but tensors and plain settings from them"
        )
    scalar: Any = np.float64(0).__reduce__()[0]
    kinds = (type(np.dtype(code)) for code in f"?SUMm{np.typecodes['AllInteger']}{np.typecodes['AllFloat']}")
    as_numpy_1 = scalar, "numpy.core.multiarray.scalar"
    torch.serialization.add_safe_globals([Namespace, np.dtype, scalar, *set(kinds), as_numpy_1])


def _refuse_retrieval_by_hub() -> None:
    from fairseq import checkpoint_utils
    from fairseq.tasks import TASK_REGISTRY

    from fairseq_ccpr.decoding.retrieval_task import RetrievalTask

    load = checkpoint_utils.load_model_ensemble_and_task

    @wraps(load)
    def checked(
        filenames: Any,
        arg_overrides: Mapping[str, Any] | None = None,
        task: Any = None,
        *others: Any,
        **named: Any,
    ) -> Any:
        given = arg_overrides or {}
        kind = TASK_REGISTRY.get(given.get("task"))
        if task is None and (given.get("datastore") or (kind and issubclass(kind, RetrievalTask))):
            raise ConfigurationError(
                "fairseq's from_pretrained does not retrieve: use fairseq_ccpr.Translator(path, datastore=...)"
            )
        return load(filenames, arg_overrides, task, *others, **named)

    checkpoint_utils.load_model_ensemble_and_task = checked


def _show_options_of_tasks() -> None:
    from fairseq import options

    parse = options.parse_args_and_arch

    @wraps(parse)
    def shown(parser: Any, input_args: list[str] | None = None, *others: Any, **named: Any) -> Any:
        words = [word for word in sys.argv[1:] if word not in ("-h", "--help")]
        if input_args is None and words != sys.argv[1:]:
            with suppress(RuntimeError):  # fairseq-train's, without --arch
                # This gives the parser all of them.
                parse(parser, [".", *words], *others, **named | {"parse_known": True})
        return parse(parser, input_args, *others, **named)

    options.parse_args_and_arch = shown
