"""The package inside other programs: what importing it changes, what it loads, and that fairseq finds all of it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import fairseq_ccpr
from fairseq_ccpr import plug_in
from tests.helpers import ROOT, USER_DIR
from tests.small_models import World

HEAVY = {"fairseq", "torch", "numpy", "faiss", "matplotlib", "sklearn"}
# What a translation does not need, and takes a quarter of a second or more to load.
UNNEEDED = {
    "lxml.etree", "matplotlib", "pandas", "py3langid", "scipy", "sklearn", "torch._dynamo", "torch._inductor",
    "torchaudio", "transformers",
}  # fmt: skip
REGISTERED = {
    "tasks": {
        "phrase_contrast", "token_contrast", "translation_cpu_bf16",
        "translation_retrieval", "translation_retrieval_bart", "translation_retrieval_multi",
    },
    "models": {"marian", "phrase_encoder", "token_adapter"},
    "architectures": {"marian", "phrase_encoder", "token_adapter"},
    "criterions": {"ccpr", "supervised_contrastive"},
}  # fmt: skip


def python(program: str, *words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a program in an interpreter of its own, without the words on warnings that tests have."""
    line = [sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.mark.full
@pytest.mark.parametrize("level", ["WARNING", "DEBUG"])
def test_importing_and_translating_leave_a_program_as_it_was(world: World, level: str) -> None:
    program = f"""
import logging, sys, warnings
root = logging.getLogger()
if "{level}" == "DEBUG":
    logging.basicConfig(level="DEBUG", handlers=[logging.FileHandler("/dev/null")])
def state():
    return root.level, root.handlers[:], logging.getLogger("fairseq").level, sys.excepthook, warnings.filters[:]
before = state()
import fairseq_ccpr
assert not {HEAVY} & set(sys.modules) and state() == before
from fairseq_ccpr import Translator
assert state() == before
with Translator(sys.argv[1], datastore=sys.argv[2], device="cpu", max_len_b=5) as translator:
    assert len(list(translator.translate(["Guten Morgen."]))) == 1
assert state() == before
"""
    done = python(program, world.model, world.datastore)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.full
@pytest.mark.parametrize(
    "first",
    [
        "import fairseq",
        "import fairseq_ccpr",
        "from fairseq_ccpr import Translator",
        "import fairseq_ccpr.settings, fairseq_ccpr.storage.files",
    ],
)
@pytest.mark.parametrize("by_option", [True, False])
def test_fairseq_knows_all_tasks_models_and_criterions(first: str, by_option: bool) -> None:
    """In whichever order they are imported, and, where this package was, without `--user-dir`, too."""
    program = f"""
import json, logging, sys
{first}
from fairseq import options, registry, tasks, models, utils
if {by_option}:
    words = ["DATA", "--user-dir", sys.argv[1], "--task", "translation_retrieval_multi", "--lang-pairs", "de-en"]
    options.parse_args_and_arch(options.get_generation_parser(), [*words, "--path", "model.pt"])
import fairseq_ccpr
found = {{"tasks": tasks.TASK_REGISTRY, "models": models.MODEL_REGISTRY, "architectures": models.ARCH_MODEL_REGISTRY,
         "criterions": registry.REGISTRIES["criterion"]["registry"]}}
own = {{kind: [name for name, one in known.items() if one.__module__.startswith("fairseq_ccpr.")]
       for kind, known in found.items()}}
print(json.dumps(own))
assert sys.excepthook is sys.__excepthook__
assert all(sys.modules[name].__spec__.origin for name in ("fairseq", "fairseq_ccpr.settings", "fairseq_ccpr.storage"))
"""
    own = json.loads(python(program, USER_DIR).stdout)
    assert {kind: set(names) for kind, names in own.items()} == REGISTERED


def test_the_lab_is_loaded_by_its_own_user_dir_alone() -> None:
    program = """
import sys, fairseq_ccpr
from argparse import Namespace
from fairseq import criterions, tasks, utils
assert not [name for name in sys.modules if name.startswith("fairseq_ccpr.lab")]
utils.import_user_module(Namespace(user_dir=sys.argv[1]))
print(tasks.TASK_REGISTRY["phrase_lexicon"].__module__, criterions.CRITERION_REGISTRY["xpco"].__module__)
"""
    done = python(program, USER_DIR / "lab" / "xpr")
    assert done.stdout.split() == ["fairseq_ccpr.lab.xpr.training"] * 2


@pytest.mark.parametrize(
    "line",
    [
        "--version",
        "--help",
        "build",
        "tranlate",
        "tune DATA --outptu FILE",
        "completion bash",
        "completion zsh",
    ],
)
def test_what_needs_no_model_loads_nothing_heavy(line: str) -> None:
    program = f"""
import sys
from fairseq_ccpr.cli import main
try:
    main()
finally:
    assert not {HEAVY} & set(sys.modules), "heavy"
"""
    done = python(program, *line.split(), check=False)
    assert done.stdout + done.stderr and "heavy" not in done.stderr


@pytest.mark.full
def test_what_fairseq_imports_for_other_work_is_imported_when_called() -> None:
    program = """
import io, sys, fairseq_ccpr
fairseq_ccpr.Translator
import sacrebleu.dataset.wmt_xml as wmt
assert not {"lxml", "lxml.etree"} & set(sys.modules)
print(wmt.ET.parse(io.BytesIO(b"<a>b</a>")).getroot().text, "lxml.etree" in sys.modules)
"""
    assert python(program).stdout == "b True\n"


def test_translating_a_sentence_loads_what_it_needs(world: World) -> None:
    """Neither other packages, nor fairseq's description of all its options for Hydra, nor the checkpoint twice."""
    program = """
import atexit, json, sys
from fairseq_ccpr.cli import main
def tell():
    import torch
    from hydra.core.config_store import ConfigStore
    from hydra.core.singleton import Singleton
    described = [*Singleton.instance(ConfigStore).repo]
    print(json.dumps([[*sys.modules], described]), file=sys.stderr)
atexit.register(tell)
main()
"""
    words = ["--path", world.model, "--datastore", world.datastore, "--cpu"]
    line = [sys.executable, "-c", program, "translate", *map(str, words)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, input="Guten Morgen.\n")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1, done.stderr
    loaded, described = json.loads(done.stderr.splitlines()[-1])
    assert not UNNEEDED & set(loaded) and "fairseq_ccpr.translator" in loaded
    assert "task" not in described and "model" not in described


def test_hydra_is_told_what_fairseq_describes_when_it_asks() -> None:
    program = """
import fairseq_ccpr
fairseq_ccpr.Translator
from hydra.core.config_store import ConfigStore
from fairseq import models, registry, tasks
from fairseq.dataclass.configs import FairseqConfig
store = ConfigStore.instance()
assert store is ConfigStore.instance() and set(FairseqConfig.__dataclass_fields__) <= {
    name.removesuffix(".yaml") for name in store.list("")}
for group, known in {"task": tasks.TASK_DATACLASS_REGISTRY, "model": models.MODEL_DATACLASS_REGISTRY,
                     **{name: one["dataclass_registry"] for name, one in registry.REGISTRIES.items()}}.items():
    assert {f"{name}.yaml" for name in known} == set(store.list(group) if known else ()), group
print(store.load("task/translation_retrieval.yaml").node.datastore, store.load("criterion/ccpr.yaml").node._name)
"""
    assert python(program).stdout == "None ccpr\n"


def test_public_names_are_declared() -> None:
    assert set(fairseq_ccpr.__all__) <= set(dir(fairseq_ccpr)) and "Translator" in fairseq_ccpr.__all__
    assert all(
        getattr(plug_in, name) is getattr(fairseq_ccpr, name)
        for name in fairseq_ccpr.__all__
        if "_" not in name
    )
    with pytest.raises(AttributeError, match="has no attribute 'Translater'"):
        _ = fairseq_ccpr.Translater
