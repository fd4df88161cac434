"""From sentence pairs to a tuned datastore and its figures in one command: `fairseq-ccpr adapt`."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, fields
from functools import partial
from heapq import nsmallest
from itertools import islice
from pathlib import Path
from typing import Any, Optional

from fairseq_ccpr.building.held_out import hold_out, nearly_in, rank_of_draw
from fairseq_ccpr.building.options import check_texts, refuse
from fairseq_ccpr.building.phrase_build import PhraseBuildSettings
from fairseq_ccpr.building.preparation import pair_files, read_subset
from fairseq_ccpr.building.token_build import TRAINED_ADAPTER, TokenBuildSettings
from fairseq_ccpr.cli.build import build_phrases, build_text, build_tokens
from fairseq_ccpr.cli.command import command, counted, markdown_table
from fairseq_ccpr.cli.decode import CHANCE, LEARNED, tune
from fairseq_ccpr.cli.text import prepare
from fairseq_ccpr.errors import PROGRAM, ConfigurationError
from fairseq_ccpr.evaluation.test_set import TranslationScores, compare_decoding
from fairseq_ccpr.evaluation.tune import QUALITY
from fairseq_ccpr.inference.resources import configure
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.settings import option
from fairseq_ccpr.storage.data_bin import TRAIN
from fairseq_ccpr.storage.files import read_checked_json, write_checked_json, write_text
from fairseq_ccpr.storage.fingerprint import of_files
from fairseq_ccpr.text.languages import IDENTIFIED_LINES, refuse_exchanged
from fairseq_ccpr.text.pairs import read_lines, tell_skipped, tidy
from fairseq_ccpr.text.translation_memory import Pair

VALID, TEST, ASIDE = "valid", "test", "aside"
DOMAIN, TEXT = "domain", "text.txt"  # the folder of the domain's pairs; its text
SCORES = tuple(one.name for one in fields(TranslationScores))
MOST_HELD_OUT, LEAST_HELD_OUT = 500, 50  # pairs of each set
SHARE_HELD_OUT = 10  # one pair in so many, of each set
LINES_AT_ONCE = 100_000  # of a text, that are compared with what is held out
HARM = 1.0  # BLEU or chrF that other text may lose before a word is said about it


@dataclass
class Steps:
    """Work that is done once: what each step returned and the seconds it took, in a file beside what it made."""

    file: Path
    asked: dict[str, str]  # a digest of each input
    done: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, folder: Path, asked: dict[str, str], output: Path) -> Steps:
        """Go on with the steps in a folder, or begin; refuse what was begun with other inputs, or otherwise."""
        file = folder / "steps.json"
        if not file.is_file():
            for path in (folder, output):
                if path.exists():
                    raise ConfigurationError(
                        f"{path} exists, and {PROGRAM} adapt did not begin it: give another --output, or delete it"
                    )
            folder.mkdir(parents=True)
            steps = cls(file, asked, {})
            steps.save()
            return steps
        try:
            known = read_checked_json(file)
            before, done = known["asked"], known["done"]
        except (ValueError, KeyError) as error:
            raise ConfigurationError(f"{file} is damaged ({error}): delete {folder} and {output}") from None
        for name in sorted(asked.keys() | before.keys()):
            if asked.get(name) != before.get(name):
                raise ConfigurationError(
                    f"{output} was begun with {name} of other content: give what it was begun with, or another --output"
                )
        return cls(file, asked, done)

    def save(self) -> None:
        write_checked_json(self.file, {"asked": self.asked, "done": self.done})

    def once(self, name: str, work: Callable[[], Any]) -> Any:
        """Do a step unless it was done, and return what it returned, which is JSON; what it prints goes to stderr."""
        if name not in self.done:
            start = time.monotonic()
            print(f"{name} ...", file=sys.stderr, flush=True)
            with redirect_stdout(sys.stderr):
                made = work()
            self.done[name] = {"made": made, "seconds": round(time.monotonic() - start, 1)}
            self.save()
        return self.done[name]["made"]


@dataclass
class Adaptation:
    """What was asked for, and the steps from there: files by option (train, valid, test, text, also, against, encoder)."""

    files: dict[str, list[Path]]
    path: Path
    output: Path
    words: list[str]  # --cpu and --quiet, where they were given
    languages: tuple[str, str]

    @property
    def folder(self) -> Path:
        """Where all but the datastore goes: for each text a folder of pairs, with a DATA_BIN."""
        return self.output.with_name(f"{self.output.name}.data")

    def check(self) -> None:
        """Check that all files are there, and that there is a text for what reads one."""
        for name in (TRAIN, VALID, TEST, "also"):
            for given in self.files[name]:
                for file in pair_files(given, *self.languages):
                    refuse((not file.is_file(), f"there is neither a file {given} nor {file}: give pairs"))
        check_texts([*self.files["text"], *self.files["against"]])
        for file in self.files["encoder"]:
            refuse((not file.is_file(), f"--encoder: there is no checkpoint {file}"))
        for name in ("encoder", "against"):
            missing = bool(self.files[name]) and not self.files["text"]
            refuse((missing, f"--{name} is for text of the target language: give that as --text"))

    def digests(self) -> dict[str, str]:
        """Digest all that is read, by option."""
        every = {f"--{name}": given for name, given in self.files.items()} | {"--path": [self.path]}
        return {
            name: of_files(file for one in given for file in pair_files(one, *self.languages))
            for name, given in every.items()
        }

    @property
    def others(self) -> list[str]:
        return [f"also-{number}" for number in range(len(self.files["also"]))]

    def divide(self) -> dict[str, int]:
        """Write the pairs of each set, and the text without what is held out; returns how many pairs there are."""
        (given,) = self.files[TRAIN]
        pairs, wanted = self._read(given), [name for name in (TEST, VALID) if not self.files[name]]
        most = min(MOST_HELD_OUT, len(pairs) // SHARE_HELD_OUT)
        least = LEAST_HELD_OUT * SHARE_HELD_OUT
        few = f"{given} has {counted(len(pairs), 'pair')}, and to hold out {' and '.join(wanted)} takes {least:,}"
        refuse(
            (not pairs, f"{given} has no pair: expected lines of source, tab, target"),
            (bool(wanted) and most < LEAST_HELD_OUT, f"{few}: give --{VALID} and --{TEST}, or more pairs"),
        )
        drawn, left, aside = hold_out(pairs, dict.fromkeys(wanted, most))
        held = [target for some in drawn.values() for _, target in some]
        drawn |= {name: self._read(self.files[name][0]) for name in (TEST, VALID) if name not in drawn}
        sets = {TRAIN: left, **drawn, ASIDE: aside}
        self._write(DOMAIN, sets)
        if self.files["text"]:
            write_text(self.folder / DOMAIN / TEXT, "".join(_without(self.files["text"], held)))
        for name, path in zip(self.others, self.files["also"]):
            pairs = self._read(path)
            most = min(MOST_HELD_OUT, len(pairs) // 2)
            few = f"--also {path} has {counted(len(pairs), 'pair')}, and it takes {2 * LEAST_HELD_OUT} to tune and to measure"
            refuse((most < LEAST_HELD_OUT, f"{few}: give more"))
            some = nsmallest(4 * most, pairs, key=rank_of_draw)  # more, as some are alike
            self._write(name, hold_out(some, {TEST: most, VALID: most})[0])
        return {name: len(some) for name, some in sets.items()}

    def _read(self, path: Path) -> list[Pair]:
        skipped = Counter[str]()
        read = read_subset(path, *self.languages, skipped=skipped)
        pairs = [(tidy(source), tidy(target)) for source, target in read]
        tell_skipped(str(path), skipped)
        refuse_exchanged(str(path), pairs[:IDENTIFIED_LINES], *self.languages)
        return pairs

    def _write(self, name: str, sets: dict[str, list[Pair]]) -> None:
        (self.folder / name).mkdir(exist_ok=True)
        for subset, pairs in sets.items():
            lines = "".join(f"{source}\t{target}\n" for source, target in pairs)
            write_text(self.folder / name / f"{subset}.tsv", lines)

    def data_bin(self, name: str = DOMAIN) -> Path:
        return self.folder / name / "data-bin"

    def prepare(self, name: str = DOMAIN) -> None:
        """Make the DATA_BIN of a text."""
        shutil.rmtree(self.data_bin(name), ignore_errors=True)
        train, valid, test = (self.folder / name / f"{subset}.tsv" for subset in (TRAIN, VALID, TEST))
        pairs = train if name == DOMAIN else None
        prepare.work([], *self.languages, self.data_bin(name), pairs, valid, test, self.path, [], 0)

    def build_tokens(self) -> None:
        settings = TokenBuildSettings(
            self.data_bin(), str(self.path), adapter=TRAINED_ADAPTER, output=self.output, **self._flags
        )
        build_tokens.work(settings)

    def build_text(self) -> None:
        words, text = ["--path", str(self.path), *self.words], [self.folder / DOMAIN / TEXT]
        build_text.work(
            words, text, self.files["against"], self.output, self.data_bin(), self._flags["quiet"]
        )

    def build_phrases(self) -> None:
        text, (encoder,) = [self.folder / DOMAIN / TEXT], self.files["encoder"]
        build_phrases.work(PhraseBuildSettings(text, encoder, output=self.output, **self._flags))

    @property
    def _flags(self) -> dict[str, Any]:
        return {name: f"--{name}" in self.words for name in ("cpu", "quiet")}

    def tune(self) -> None:
        words, also = (
            ["--datastore", str(self.output), *self.words],
            map(str, map(self.data_bin, self.others)),
        )
        tune.work(words, self.data_bin(), None, VALID, list(also), LEARNED, 1, QUALITY)

    def compare(self, name: str = DOMAIN) -> list[dict[str, Any]]:
        """Translate test pairs without and with the datastore; returns a row for each, with their number."""
        words = ["--datastore", str(self.output), "--gen-subset", TEST, *self.words]
        decodings = compare_decoding(System.of(words, self.data_bin(name)))
        return [row | {"sentences": len(decodings.references)} for row in decodings.rows()]


def _without(texts: list[Path], held: list[str]) -> Iterator[str]:
    """Yield the lines of texts that are not nearly the same as one that is held out."""
    for path in texts:
        waiting = read_lines(path)
        while lines := list(islice(waiting, LINES_AT_ONCE)):
            yield from (f"{line}\n" for line, near in zip(lines, nearly_in(lines, held)) if not near)


@command("""\
Make a datastore of sentence pairs for a trained model, tune it and measure what it brings, in one command:

  fairseq-ccpr adapt train.tsv --path model.pt --output datastores/mine
  fairseq-ccpr translate --datastore datastores/mine < in.txt > out.txt

It does what prepare, build tokens --adapter clknn, tune and compare do; with --text also build text, and with --encoder build
phrases. Each has more options. The model's dictionaries and subwords lie next to it.

Without --valid or --test, a tenth of the pairs is held out for each, at most 500, drawn by a hash of their words. What
nearly repeats them, on either side or in --text, is not built from, so that the figures are of new text; it is in
OUTPUT.data/domain/aside.tsv. The pairs that you give stay as they are.

--also names pairs of other text, whose translations should lose nothing: half are tuned on, and half are measured.

Run the same command again to go on where it was interrupted. OUTPUT.data keeps the pairs, DATA_BINs and figures.
""")
def adapt(
    train: Path = option(help="sentence pairs of the domain", positional=True, metavar="TSV|PREFIX"),
    path: Path = option(help="checkpoint of the model", metavar="MODEL"),
    output: Path = option(help="the datastore: a new folder", metavar="DIR"),
    valid: Optional[Path] = option(None, "pairs to tune on", metavar="TSV|PREFIX"),
    test: Optional[Path] = option(None, "pairs to measure on", metavar="TSV|PREFIX"),
    also: list[Path] = option([], "pairs of other text", nargs="+", metavar="TSV|PREFIX"),
    text: list[Path] = option(
        [], "text of the domain in the target language, one sentence per line", nargs="+", metavar="TEXT"
    ),
    against: list[Path] = [],  # noqa: B006
    encoder: Optional[Path] = None,
    cpu: bool = False,
    quiet: bool = False,
) -> int:
    words = [f"--{name}" for name, given in (("cpu", cpu), ("quiet", quiet)) if given]
    task = configure(["--path", str(path)]).task
    one = {TRAIN: train, VALID: valid, TEST: test, "encoder": encoder}
    files = {name: [given] if given else [] for name, given in one.items()}
    files |= {"also": also, "text": text, "against": against}
    job = Adaptation(files, path, output, words, (task.source_lang, task.target_lang))
    job.check()
    steps = Steps.of(job.folder, job.digests(), output)
    counts = steps.once("pairs", job.divide)
    for name in (DOMAIN, *job.others):
        steps.once(f"prepare {name}", partial(job.prepare, name))
    steps.once("build tokens", job.build_tokens)
    if text:
        steps.once("build text", job.build_text)
    if encoder:
        steps.once("build phrases", job.build_phrases)
    steps.once("tune", job.tune)
    found = {
        name: steps.once(f"compare {name}", partial(job.compare, name)) for name in (DOMAIN, *job.others)
    }
    print(_table(found, also))
    print(f"\n{_told(steps, counts)}\n")
    print("\n".join(_advice(found, output)))
    return 0


def _table(found: dict[str, list[dict[str, Any]]], also: list[Path]) -> str:
    """Write a row for each system on each text."""
    cells: list[list[Any]] = [["text", "system", "BLEU", "chrF", "speed"]]
    for name, rows in zip([TEST, *also], found.values()):
        for row in rows:
            gains = [
                f"{row[one] - rows[0][one]:+.2f}" if row is not rows[0] else "" for one in ("bleu", "chrf")
            ]
            scores = [f"{row[one]:.2f} {gain}".strip() for one, gain in zip(("bleu", "chrf"), gains)]
            text = f"{name}, {counted(row['sentences'], 'sentence')}" if row is rows[0] else ""
            cells.append([text, row["system"], *scores, f"{row['speed']:.0%}"])
    return markdown_table(cells)


def _told(steps: Steps, counts: dict[str, int]) -> str:
    seconds = {name: one["seconds"] for name, one in steps.done.items()}
    minutes = ", ".join(f"{name} {took / 60:.1f}" for name, took in seconds.items())
    pairs = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return f"pairs: {pairs}\nminutes: {minutes}; {sum(seconds.values()) / 60:.1f} together"


def _advice(found: dict[str, list[dict[str, Any]]], output: Path) -> Iterator[str]:
    """Say what to use, and what it costs."""
    gains, chance = {}, 0.0
    for name, rows in found.items():
        base, retrieval = (TranslationScores(**{one: row[one] for one in SCORES}) for row in rows)
        gains[name] = retrieval.deciding - base.deciding
        if name == DOMAIN:
            metric, chance = base.metric, CHANCE / rows[0]["sentences"] ** 0.5
    gain = gains.pop(DOMAIN)
    use = f"{PROGRAM} translate --datastore {shlex.quote(str(output))} < in.txt > out.txt"
    if gain <= 0:
        yield "the datastore brings nothing on text like this: translate with the model alone, or give more pairs"
        return
    yield f"it gains {gain:.1f} {metric} on text like this{', which may be chance' if gain < chance else ''}: {use}"
    if not gains:
        yield "what it does to other text was not measured: give pairs of such text as --also, with another --output"
    elif min(gains.values()) < -HARM:
        yield f"other text loses {-min(gains.values()):.1f} {metric}: translate that without --datastore"
