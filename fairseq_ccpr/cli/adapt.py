"""From sentence pairs to a tuned datastore and its figures in one command: `fairseq-ccpr adapt`."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from itertools import islice
from pathlib import Path
from typing import Any, Optional

from fairseq_ccpr.building.held_out import hold_out, nearly_in, rank_of_draw
from fairseq_ccpr.building.options import refuse
from fairseq_ccpr.building.phrase_build import PhraseBuildSettings
from fairseq_ccpr.building.preparation import pair_files, read_subset
from fairseq_ccpr.building.token_build import TRAINED_ADAPTER, TokenBuildSettings
from fairseq_ccpr.cli.build import build_phrases, build_text, build_tokens
from fairseq_ccpr.cli.command import command, counted, markdown_table
from fairseq_ccpr.cli.decode import CHANCE, LEARNED, tune
from fairseq_ccpr.cli.text import prepare
from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.errors import PROGRAM, ConfigurationError
from fairseq_ccpr.evaluation.test_set import compare_decoding
from fairseq_ccpr.evaluation.tune import QUALITY
from fairseq_ccpr.inference.resources import configure
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.settings import option
from fairseq_ccpr.storage.data_bin import TRAIN
from fairseq_ccpr.storage.files import MANIFEST, read_checked_json, write_checked_json, write_text
from fairseq_ccpr.storage.fingerprint import of_files
from fairseq_ccpr.text.languages import IDENTIFIED_LINES, refuse_exchanged
from fairseq_ccpr.text.pairs import read_lines, tell_skipped, tidy
from fairseq_ccpr.text.translation_memory import Pair

VALID, TEST, ALSO = "valid", "test", "also"
HOME, OF_TARGET = "domain", "text.txt"  # the folder of the domain's pairs; its text
MOST_HELD_OUT, LEAST_HELD_OUT = 500, 50  # pairs of each set
SHARE_HELD_OUT = 10  # one pair in so many, of each set
LINES_AT_ONCE = 100_000  # of a text, that are compared with what is held out
HARM = 1.0  # points that other text may lose before a word is said about it


class Steps:
    """Work that is done once: what each step returned, as JSON, and the seconds it took, in a file."""

    def __init__(self, folder: Path, asked: dict[str, str], output: Path) -> None:
        """Begin in a folder, or go on; refuse what was begun with other inputs, whose digests are `asked`."""
        self.file, self.asked, self.done = folder / "steps.json", asked, dict[str, dict[str, Any]]()
        if not self.file.is_file():
            begun = f"exists, and {PROGRAM} adapt did not begin it: give another --output, or delete it"
            refuse(*((path.exists(), f"{path} {begun}") for path in (folder, output)))
            folder.mkdir(parents=True)
            return
        try:
            known = read_checked_json(self.file)
        except ValueError as error:
            raise ConfigurationError(
                f"{self.file} is damaged ({error}): delete {folder} and {output}"
            ) from None
        differs = "has changed since, or is another: give what it was begun with, or another --output"
        self.done = known["done"]
        changed = (name for name in asked if self.done and known["asked"][name] != asked[name])
        refuse(*((True, f"{output}: {name} {differs}") for name in changed))

    def once(self, name: str, work: Callable[[], Any]) -> Any:
        """Do a step unless it was done, and return what it returned; what it prints goes to stderr."""
        if name not in self.done:
            write_checked_json(self.file, {"asked": self.asked, "done": self.done})
            print(f"{name} ...", file=sys.stderr, flush=True)
            start = time.monotonic()
            with redirect_stdout(sys.stderr):
                made = work()
            self.done[name] = {"made": made, "seconds": round(time.monotonic() - start, 1)}
            write_checked_json(self.file, {"asked": self.asked, "done": self.done})
        return self.done[name]["made"]


@dataclass
class Texts:
    """The files that were given, by option, and the folder of what is made of them, text by text."""

    files: dict[str, list[Path]]
    folder: Path
    languages: tuple[str, str]
    path: Path  # of the model

    @property
    def names(self) -> list[str]:
        """The domain, and each other text."""
        return [HOME, *(f"also-{number}" for number in range(len(self.files[ALSO])))]

    def digests(self) -> dict[str, str]:
        """Digest all files, by option."""
        every = {f"--{name}": given for name, given in self.files.items()} | {"--path": [self.path]}
        return {
            name: of_files(file for one in given for file in pair_files(one, *self.languages))
            for name, given in every.items()
        }

    def divide(self) -> dict[str, int]:
        """Write the pairs of each set, and the text without what is held out; returns how many there are."""
        (given,) = self.files[TRAIN]
        kept = {name: self._read(*self.files[name]) for name in (TEST, VALID) if self.files[name]}
        pairs, wanted = self._read(given), [name for name in (TEST, VALID) if name not in kept]
        most = min(MOST_HELD_OUT, len(pairs) // SHARE_HELD_OUT)
        found = f"{given} has {counted(len(pairs), 'pair')}, and to hold out {' and '.join(wanted)}"
        needed = f"takes {LEAST_HELD_OUT * SHARE_HELD_OUT:,}: give --{VALID} and --{TEST}, or more pairs"
        refuse((bool(wanted) and most < LEAST_HELD_OUT, f"{found} {needed}"))
        drawn, left, aside = hold_out(
            pairs, dict.fromkeys(wanted, most), [pair for some in kept.values() for pair in some]
        )
        _check_sizes(given, {TRAIN: left, **drawn})
        drawn |= kept
        sets = {TRAIN: left, **drawn, "aside": aside}
        self._write(HOME, sets)
        lines = _without(self.files["text"], [target for some in drawn.values() for _, target in some])
        write_text(self.folder / HOME / OF_TARGET, "".join(lines))
        for name, path in zip(self.names[1:], self.files[ALSO]):
            pairs = self._read(path)
            most = min(MOST_HELD_OUT, len(pairs) // 2)
            found = f"--also {path} has {counted(len(pairs), 'pair')}, and to tune and to measure"
            refuse((most < LEAST_HELD_OUT, f"{found} takes {2 * LEAST_HELD_OUT}: give more"))
            some = nsmallest(4 * most, pairs, key=rank_of_draw)  # more, as some are alike
            drawn = hold_out(some, {TEST: most, VALID: most})[0]
            _check_sizes(path, drawn)
            self._write(name, drawn)
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

    def data_bin(self, name: str = HOME) -> Path:
        return self.folder / name / "data-bin"

    def prepare(self, name: str) -> None:
        """Make the DATA_BIN of a text."""
        output = self.data_bin(name)
        shutil.rmtree(output, ignore_errors=True)  # of a run that was killed just then
        train, valid, test = (self.folder / name / f"{subset}.tsv" for subset in (TRAIN, VALID, TEST))
        pairs = train if name == HOME else None
        prepare.work([], *self.languages, output, pairs, valid, test, self.path, [], 0)


def _check_sizes(given: Path, sets: dict[str, list[Pair]]) -> None:
    """Refuse pairs of which too few differ."""
    least = dict.fromkeys(sets, LEAST_HELD_OUT) | {TRAIN: 1}
    few = [f"{len(some)} for {name}" for name, some in sets.items() if len(some) < least[name]]
    found = f"{given} has too few pairs that are not nearly the same: {', '.join(few)}"
    refuse((bool(few), f"{found}; {LEAST_HELD_OUT} are held out for a set: give other pairs"))


def _without(texts: list[Path], held: list[str]) -> Iterator[str]:
    """Yield the lines of texts that are not nearly the same as one that is held out."""
    for waiting in map(read_lines, texts):
        while lines := list(islice(waiting, LINES_AT_ONCE)):
            yield from (f"{line}\n" for line, near in zip(lines, nearly_in(lines, held)) if not near)


def _compare(words: list[str], data_bin: Path) -> list[dict[str, Any]]:
    """Translate test pairs without and with the datastore; returns a row for each."""
    decodings = compare_decoding(System.of([*words, "--gen-subset", TEST], data_bin))
    scores = map(decodings.scores, decodings.systems)
    deciding = ({"deciding": one.deciding, "metric": one.metric} for one in scores)
    of_all = {"sentences": len(decodings.references)}
    return [row | score | of_all for row, score in zip(decodings.rows(), deciding)]


def _built(output: Path) -> str:
    """Return the digest by which a manifest knows the adapter; nothing where there is no datastore."""
    token = Manifest.read(output).token if (output / MANIFEST).is_file() else None
    return token.fingerprints["adapter"] if token is not None else ""


@command("""\
Make a datastore of sentence pairs for a trained model, tune it and measure what it brings, in one command:

  fairseq-ccpr adapt train.tsv --path model.pt --output datastores/mine
  fairseq-ccpr translate --datastore datastores/mine < in.txt > out.txt

It does what prepare, build tokens --adapter clknn, tune and compare do; with --text also build text, and with
--encoder build phrases. Each has more options. The model's dictionaries and subwords lie next to it.

Without --valid or --test, a tenth of the pairs is held out for each, at most 500, drawn by a hash of their
words. What nearly repeats them, or the pairs of --valid and --test, on either side or in --text, is not built
from, so that the figures are of new text; it is in OUTPUT.data/domain/aside.tsv.

--also names pairs of other text, whose translations should lose nothing: half to tune on, half to measure.

Run the same command again to go on where it was interrupted. OUTPUT.data keeps pairs, DATA_BINs and figures.
""")
def adapt(
    train: Path = option(help="sentence pairs of the domain", positional=True, metavar="TSV|PREFIX"),
    path: Path = option(help="checkpoint of the model", metavar="MODEL"),
    output: Path = option(help="the datastore: a new folder", metavar="DIR"),
    valid: Optional[Path] = None,
    test: Optional[Path] = None,
    also: list[Path] = option([], "pairs of other text", nargs="+", metavar="TSV|PREFIX"),
    text: list[Path] = option(
        [], "text of the domain in the target language, one sentence per line", nargs="+", metavar="OF_TARGET"
    ),
    against: list[Path] = [],  # noqa: B006
    source_lang: Optional[str] = None,
    target_lang: Optional[str] = None,
    encoder: Optional[Path] = None,
    cpu: bool = False,
    quiet: bool = False,
) -> int:
    named = {TRAIN: train, VALID: valid, TEST: test, "encoder": encoder}
    files = {name: [given] if given else [] for name, given in named.items()}
    files |= {ALSO: also, "text": text, "against": against}
    for name in ("encoder", "against"):
        alone = bool(files[name]) and not text
        refuse((alone, f"--{name} is for text of the target language: give that as --text"))
    given = {"-s": source_lang, "-t": target_lang}
    languages = [word for name, code in given.items() if code for word in (name, code)]
    task = configure(["--path", str(path), *languages]).task
    texts = Texts(files, output.with_name(f"{output.name}.data"), (task.source_lang, task.target_lang), path)
    steps = Steps(texts.folder, texts.digests(), output)
    data, own = texts.data_bin(), [texts.folder / HOME / OF_TARGET]
    common: dict[str, Any] = {"output": output, "cpu": cpu, "quiet": quiet}
    words = [f"--{name}" for name in ("cpu", "quiet") if common[name]]
    counts = steps.once("pairs", texts.divide)
    for name in texts.names:
        steps.once(f"prepare {name}", partial(texts.prepare, name))
    tokens = TokenBuildSettings(data, str(path), adapter=TRAINED_ADAPTER, **common)
    built = steps.once("build tokens", lambda: (build_tokens.work(tokens), _built(output))[1])
    gone = (
        f"{output} is gone, or another was built there: give another --output, or delete {texts.folder} too"
    )
    refuse((built != _built(output), gone))
    if text:
        of_model = ["--path", str(path), "-s", task.source_lang, "-t", task.target_lang, *words]
        steps.once("build text", lambda: build_text.work(of_model, own, against, output, data, quiet))
    if encoder:
        steps.once("build phrases", lambda: build_phrases.work(PhraseBuildSettings(own, encoder, **common)))
    words += ["--datastore", str(output)]
    others = [str(texts.data_bin(name)) for name in texts.names[1:]]
    steps.once("tune", lambda: tune.work(words, data, None, VALID, others, LEARNED, 1, QUALITY))
    found = [
        steps.once(f"compare {name}", partial(_compare, words, texts.data_bin(name))) for name in texts.names
    ]
    _print(steps, counts, dict(zip([TEST, *map(str, also)], found)), output)
    return 0


def _print(
    steps: Steps, counts: dict[str, int], found: dict[str, list[dict[str, Any]]], output: Path
) -> None:
    """Print a row for each system on each text, what it took, and what to use."""
    cells: list[list[Any]] = [["text", "system", "BLEU", "chrF", "speed"]]
    gains = {}
    for name, (base, retrieval) in found.items():
        gains[name] = retrieval["deciding"] - base["deciding"]
        text = f"{name}, {counted(base['sentences'], 'sentence')}"
        for row, beside, gain in ((base, text, ""), (retrieval, "", f" ({gains[name]:+.2f})")):
            scores = f"{row['bleu']:.2f}", f"{row['chrf']:.2f}"
            cells.append([beside, f"{row['system']}{gain}", *scores, f"{row['speed']:.0%}"])
    seconds = {name: one["seconds"] for name, one in steps.done.items()}
    minutes = ", ".join(f"{name} {took / 60:.1f}" for name, took in seconds.items())
    print(markdown_table(cells))
    print(f"\npairs: {', '.join(f'{name} {count:,}' for name, count in counts.items())}")
    print(f"minutes: {minutes}; {sum(seconds.values()) / 60:.1f} together\n")
    gain, metric, sentences = gains.pop(TEST), *(found[TEST][0][one] for one in ("metric", "sentences"))
    if gain <= 0:
        print("the datastore brings nothing on text like this: translate without it, or give more pairs")
        return
    chance = ", which may be chance" if gain < CHANCE / sentences**0.5 else ""
    quoted = shlex.quote(str(output))
    use = f"{PROGRAM} translate --datastore {quoted} < in.txt > out.txt"
    print(f"{metric} gains {gain:.1f} on text like this{chance}: {use}")
    others = " ".join(shlex.quote(str(steps.file.with_name(HOME) / f"{one}.tsv")) for one in (TEST, "aside"))
    print(f"the pairs not built from, when all is measured: {PROGRAM} learn --datastore {quoted} {others}")
    if not gains:
        print("other text was not measured: --also names pairs of it, whose translations should lose nothing")
    elif (worst := min(gains.values())) < -HARM:
        print(f"other text loses {-worst:.1f}: translate that without --datastore")
