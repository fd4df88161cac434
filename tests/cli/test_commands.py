"""The command `fairseq-ccpr`: its subcommands, their help, what a typo is answered with, completion."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_ccpr.cli import COMMANDS, COMPLETION, load
from fairseq_ccpr.cli.command import Command, HelpFormatter
from fairseq_ccpr.version import __version__
from tests.helpers import ROOT, USER_DIR, call, refused, run
from tests.small_models import World


def test_every_function_that_is_a_command_is_listed() -> None:
    modules = {load(name).work.__module__ for name in [*COMMANDS, COMPLETION]}
    made = [
        value for name in modules for value in vars(sys.modules[name]).values() if isinstance(value, Command)
    ]
    assert {one.name for one in made} == {f"fairseq-ccpr {name}" for name in [*COMMANDS, COMPLETION]}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_the_command_and_explains_every_option(name: str) -> None:
    shown = call(name, "--help").stdout
    assert shown.startswith(f"usage: fairseq-ccpr {name} ")
    assert "(default: None)" not in shown and "(default: False)" not in shown and "(default: )" not in shown
    command = load(name)
    for line in command.text.splitlines():
        assert line.count("fairseq-ccpr ") < 2 and not re.search(r"\S {2,}--", line), (
            f"a line break is lost: {line}"
        )
    for action in command.parser()._actions:
        line = HelpFormatter("")._get_help_string(action) or ""
        assert line and line.count("(default: ") < 2 and "default: [" not in line, action.option_strings


@pytest.mark.parametrize("name", ["translate", "tune", "compare", "explain", "benchmark decoding"])
def test_help_of_commands_that_decode_explains_what_people_use_and_help_all_the_rest(name: str) -> None:
    shown, everything = call(name, "--help").stdout, call(name, "--help-all").stdout
    for option in (
        "--beam",
        "--lenpen",
        "--batch-size",
        "--cpu",
        "--precision",
        "--bpe-codes",
        "--source-lang",
    ):
        assert re.search(rf"^  {option} .*\n? +\w", shown, re.MULTILINE), option
    for option in ("--datastore", "--tokens-k", "--phrases-lambda", "--text-alpha"):
        assert re.search(rf"^  {option} .*\n? +\w", shown, re.MULTILINE), option
    assert len(re.findall(r"^  -", shown, re.MULTILINE)) < 50
    for option in ("--phrases-threshold", "--store-timeout", "--diverse-beam-groups", "--sampling-topp"):
        assert f"  {option} " in everything and f"  {option} " not in shown
    assert set(re.findall(r"^  (--[\w-]+)", shown, re.MULTILINE)) <= set(re.findall(r"--[\w-]+", everything))


def test_help_of_fairseqs_commands_has_the_options_of_our_tasks() -> None:
    shown = run(
        "fairseq-generate", "--user-dir", USER_DIR, "--task", "translation_retrieval", "--help"
    ).stdout
    assert all(f"  {option} " in shown for option in ("--beam", "--tokens-k", "--trust", "--glossary"))
    words = ["--arch", "token_adapter", "--criterion", "supervised_contrastive"]
    shown = run("fairseq-train", "--user-dir", USER_DIR, "--task", "token_contrast", *words, "--help").stdout
    assert "  --positives " in shown
    assert run("fairseq-train", "--user-dir", USER_DIR, "--help").returncode == 0


def test_help_of_prepare_names_the_options_of_subwords_alone() -> None:
    shown, everything = call("prepare", "--help").stdout, call("prepare", "--help-all").stdout
    assert "--bpe-codes" in shown and "--sentencepiece-model" in shown and "--moses-no-escape" in everything
    assert "--tokens-k" not in everything and "--beam" not in everything


def test_overview_and_version() -> None:
    shown = call("", "--help").stdout
    assert all(f"  {name} " in shown and what in shown for name, what in COMMANDS.items())
    assert run("fairseq-ccpr", "--version").stdout == f"fairseq-ccpr {__version__}\n"
    of_group = call("build", "--help").stdout
    assert "build tokens" in of_group and "translate " not in of_group


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["trnslate"], "there is no command 'trnslate'; did you mean translate?"),
        (["build", "token"], "there is no command 'build token'; did you mean build tokens?"),
        (["zzz"], "there is no command 'zzz'; fairseq-ccpr --help lists them"),
        (["inspect", "DIR", "--plann"], "there is no option --plann; did you mean --plan?"),
        (["inspect", "DIR", "--pla"], "there is no option --pla; did you mean --plan?"),
        (["inspect", "DIR", "other"], "'other' belongs to no option"),
        (["translate", str(ROOT / "README.md")], f"belongs to no option: give --input {ROOT / 'README.md'}"),
        (["tune", "DATA", "--outptu", "FILE"], "there is no option --outptu; did you mean --output?"),
        (["compare", "DATA", "--phrse-k=3"], "there is no option --phrse-k; did you mean --phrases-k?"),
        (["translate", "--gensubset", "x"], "there is no option --gensubset; did you mean --gen-subset?"),
        (["prepare", "-s", "a", "-t", "b", "--output", "D", "--bpe-code", "F"], "did you mean --bpe-codes?"),
        (
            ["build tokens", "DATA", "--path", "M", "--ouput", "D"],
            "there is no option --ouput; did you mean --output?",
        ),
        (["build tokens", "DATA", "--path", "M"], "the following arguments are required: --output"),
    ],
)
def test_a_typo_is_answered_in_one_sentence(words: list[str], sentence: str) -> None:
    done = call(" ".join(words[:1]), *words[1:], check=False)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert sentence in done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--task", "translation_retrival"],
            "--task translation_retrival: there is no such choice .a task of your own needs --user-dir.; did you mean",
        ),
        (["--user-dir", "no/plug_in"], "no/plug_in: there is no such file or folder"),
    ],
)
def test_a_plug_in_that_is_not_there_is_named(world: World, words: list[str], sentence: str) -> None:
    refused(call("translate", "--path", world.model, "--data", world.data_bin, *words, check=False), sentence)


def test_the_options_of_fairseq_may_stand_before_the_folder() -> None:
    words = [
        "--path",
        "model.pt",
        "-s",
        "de",
        "--cpu",
        "DATA",
        "--remove-bpe",
        "--lenpen",
        "-0.5",
        "--subset=test",
        "--beam=3",
        "--decode",
        "2",
    ]
    given = load("tune").parse(words)
    assert (given.data_bin, given.subset, given.decode) == (Path("DATA"), "test", 2)
    assert given.rest == [
        "--path",
        "model.pt",
        "-s",
        "de",
        "--cpu",
        "--remove-bpe",
        "--lenpen=-0.5",
        "--beam",
        "3",
    ]
    given = load("tune").parse(["--user-dir", "mine", "DATA", "--gate", "0.5"])
    assert given.data_bin == Path("DATA") and given.rest == ["--user-dir", "mine", "--gate", "0.5"]
    given = load("learn").parse(["one.tmx", "--beam", "5", "two.tmx"])
    assert given.files == [Path("one.tmx"), Path("two.tmx")] and given.rest == ["--beam", "5"]


@pytest.mark.parametrize("words", [[], ["evaluate"]])
def test_an_unfinished_command_lists_what_there_is(words: list[str]) -> None:
    done = call("", *words, check=False)
    assert done.returncode == 2 and "evaluate keys" in done.stderr and not done.stdout


def test_bash_completes_commands_and_their_options(tmp_path: Path) -> None:
    script = tmp_path / "completion.bash"
    script.write_text(call("completion", "bash").stdout)
    asked = f"""
    source {script}
    complete_line() {{
      COMP_WORDS=(fairseq-ccpr "$@"); COMP_CWORD=$#; COMPREPLY=(); _shtab_fairseq_ccpr; echo "${{COMPREPLY[*]}}"
    }}
    complete_line tra
    complete_line build ph
    complete_line translate --output-f
    complete_line evaluate keys --plo
    """
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["translate", "phrases", "--output-format", "--plots"]
    assert "compdef" in call("completion", "zsh").stdout
    refused(call("completion", "bsh", check=False), "no script for 'bsh'; did you mean bash")
