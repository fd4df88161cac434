"""Translating with a datastore: `fairseq-ccpr tune`, `translate`, `explain` and `compare`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import asdict
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import Optional

from fairseq_ccpr.cli.command import SHOWN, check_folders, command, markdown_table
from fairseq_ccpr.datastore.preprocessing import remember, remembered
from fairseq_ccpr.datastore.tuned import trust_path, write_tuned
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation import tune as tuning
from fairseq_ccpr.evaluation.confidence import confidence_table, measure
from fairseq_ccpr.evaluation.copying import STRETCH
from fairseq_ccpr.evaluation.explain import explain_subset
from fairseq_ccpr.evaluation.test_set import (
    BASE,
    RETRIEVAL,
    OtherText,
    TranslationScores,
    compare_decoding,
    other_texts,
)
from fairseq_ccpr.evaluation.tune import table
from fairseq_ccpr.inference.alignment import with_markup
from fairseq_ccpr.inference.system import WINDOW, System
from fairseq_ccpr.provenance import describe_run
from fairseq_ccpr.settings import count_option, option
from fairseq_ccpr.storage.files import atomic_file, write_json, write_text
from fairseq_ccpr.text.documents import Document
from fairseq_ccpr.text.formats import FORMATS, open_document
from fairseq_ccpr.text.languages import IDENTIFIED_LINES, language_name, look_foreign
from fairseq_ccpr.text.pairs import read_lines, read_standard_input
from fairseq_ccpr.text.sentences import Parts, with_marks
from fairseq_ccpr.timing import progress_bar

LEARNED, FIXED = "learned", "fixed"
FEW_SENTENCES = 150  # sentences, of which a point may be chance
CHANCE = 20.0  # points, divided by the root of the sentences: what systems that are equal may differ by
TEXT, JSONL = "text", "jsonl"


@command(
    """\
Tune retrieval on held-out pairs: settings (--tokens-k, --tokens-lambda, --tokens-temperature, --tokens-likeness for
tokens; --phrases-lambda with --combiner fixed), the votes of retrieved phrases, and trust, a small network that
weighs model, tokens and phrases at each token. The result is stored with the datastore, where every command and
fairseq-generate find it:

  fairseq-ccpr tune data-bin --path model.pt --datastore datastores/mine --also other-data-bin
  fairseq-ccpr translate --datastore datastores/mine < in.txt > out.txt

--also names pairs of other domains, a few hundred or more, whose translations should lose nothing. Trust that has
seen only the datastore's domain helps there and harms elsewhere.

One teacher-forced pass over each text scores hundreds of settings by the likelihood of the references. Trust is
learned with the best temperature, for 8 and for 32 neighbours, and starts from a weight of 0.5. 32 must gain 0.2
points. A third of the held-out pairs is then decoded with each candidate and with the model alone, phrases
also with half their weight. All of them, the third among them, are decoded with the finalists: what is best
on the third, the same with a bound on the votes of phrases (--phrases-consent 3, unless one is given), the
same with votes and trust trained without --also, and what another --prefer takes of those tried. A table says
what each gains, copies, loses on sentences of --also that train nothing, and takes. Of those that lose at
most 0.01 nats a token more there than another that beats the model, --prefer chooses one. If none beats the
model, the weights of tokens, phrases and text are set to 0. Trust in tokens and phrases together takes the
number of neighbours that was tuned for the tokens alone, or else 32. Where the tokens alone are better, the
weight of phrases becomes 0. --output FILE writes the options there instead, for $(cat FILE), and trust to
FILE.trust.

For an adapter's keys the grid has both a fixed lambda and lambda*; --tokens-confidence or --no-tokens-confidence
restricts it to one of them, --tokens-k, --tokens-temperature and --tokens-likeness to one value. These are not tuned,
and are stored as given: --tokens-lambda-star, --tokens-min-similarity, --tokens-lambda-max,
--tokens-guard, --phrases-k, --phrases-min-similarity, --phrases-threshold, --phrases-segmentation,
--retrieval-lambda-max.
""",
    shown=SHOWN - {"--trust", "--glossary", "--untuned", "--nbest", "--replace-unk"},
)
def tune(
    rest: list[str],
    data_bin: Path,
    output: Optional[Path] = option(None, "where the chosen options go (with the datastore)", metavar="FILE"),
    subset: str = option("valid", "the held-out pairs", metavar="NAME"),
    also: list[str] = option(
        [],
        "held-out pairs of other domains, which are to lose nothing (subset: valid)",
        nargs="+",
        metavar="DATA_BIN[:SUBSET]",
    ),
    combiner: str = option(
        LEARNED, "what decides the weights: learned trust, or fixed, the settings", choices=(LEARNED, FIXED)
    ),
    decode: int = count_option(8, "how many settings to decode with (--combiner fixed)"),
    prefer: str = option(
        tuning.QUALITY,
        "choose, of what loses least on --also, the best by the mean of BLEU and chrF; what copies least from the text, "
        f"of those with at least half of its gain; or the fastest of those at most {tuning.LEVEL:g} below it",
        choices=tuning.PREFERENCES,
    ),
) -> int:
    check_folders(output=output)
    if any(word.split("=")[0] == "--gen-subset" for word in rest):
        raise ConfigurationError("--gen-subset is for decoding: name the held-out pairs with --subset")
    system = System.of([*rest, "--gen-subset", subset, "--untuned"], data_bin)
    parts = system.task.parts
    if system.cfg.task.trust is not None:
        raise ConfigurationError(
            f"--trust is {system.cfg.task.trust}, but tuning learns it: leave it out, or give --combiner fixed"
        )
    if also and combiner == FIXED:
        raise ConfigurationError(
            "--also is for what is learned, and --combiner is fixed: leave one of them out"
        )
    folder = next(iter(parts.values())).directory if parts else None
    if output is None and folder is not None and not os.access(folder, os.W_OK):
        raise ConfigurationError(
            f"{folder} cannot be written to: give --output FILE, where the options go instead"
        )
    others = other_texts(also, OtherText(data_bin, subset))
    for text in others:
        text.check(system)
    tuned = tuning.tune(system, others, combiner == LEARNED, decode, prefer)
    _print_what_was_tried(tuned, subset)
    path = _keep(tuned, system, output)
    print(f"{path}: {tuned.best.name}")
    return 0


def _keep(tuned: tuning.Tuned, system: System, output: Path | None) -> Path:
    """Write what was chosen, to a file of options or with the datastore; returns the file."""
    trust, parts = tuned.best.ensemble.trust, system.task.parts
    if output is not None:
        words = tuned.options
        if trust is not None:
            file = Path(f"{output}.trust")
            tuned.save_trust(parts, file)
            words += f" --trust {shlex.quote(str(file))}"
        write_text(output, words + "\n")
        print(
            f"{output} is without confidence, which is stored with a datastore: leave --output out to have it"
        )
        return output
    # The datastore from now on is for the model that it was tuned with.
    if trust is not None:
        tuned.save_trust(parts, trust_path(parts))
    confidence = tuned.confidence if isinstance(tuned.confidence, str) else asdict(tuned.confidence)
    path = write_tuned(parts, tuned.settings, tuned.best.ensemble.signature(), trust is not None, confidence)
    known = remembered(path.parent)
    if known is None or not known.options or known.model != system.preprocessing.model:
        remember(system.preprocessing, path.parent)
    return path


def _print_what_was_tried(tuned: tuning.Tuned, subset: str) -> None:
    if tuned.linear:
        print(f"{subset} is small: trust is a linear function of its features")
    print("\n".join(table(tuned.texts)))
    trial, screened = tuned.trial, tuned.screened
    base = trial.scores[BASE]
    third, sentences = (sum(len(one["id"]) for one in each.sample) for each in (screened, trial))
    print(f"a third of {subset}, {third:,} sentences, with all that was tried\n   BLEU   chrF")
    for name, scores in _ranked(screened):
        print(f"{scores.bleu:7.2f}{scores.chrf:7.2f}  {name}")
    print(f"all of {subset}, {sentences:,} sentences, with the finalists, of which --prefer chooses")
    print("\n".join(_trade(trial)))
    if trial.copied:
        print(f"copied: of the subwords, in runs of {STRETCH} and more that the text has")
    if trial.apart:
        apart = [one for each in trial.apart for one in each]
        told = sum(len(one["id"]) for one in apart)
        few = 2 * sum(int(one["ntokens"]) for one in apart) < tuning.LOSS_TOKENS
        remark = "; so little text says little" if few else ""
        print(
            f"other text: what references of {told:,} sentences that trained nothing lose, in nats per token; "
            f"at most {tuning.HARMLESS:g} more than with another finalist{remark}"
        )
    print(f"BLEU {base.bleu_signature}\nchrF {base.chrf_signature}")
    if sentences < FEW_SENTENCES:
        chance = CHANCE / sentences**0.5
        print(f"{sentences:,} sentences are few: differences of {chance:.0f} points or less may be chance")
    if tuned.helps:
        print(f"chosen by --prefer {trial.prefer}: {tuned.best.name}{_given_up(tuned)}")
    print(f"retrieval {tuned.best.ensemble.signature()}")
    tried = len(screened.scores) - 1
    print(
        f"{tuned.scored:,} settings by likelihood, {tried} by {base.metric}, in {tuned.seconds:.0f} s: "
        f"{tuned.seconds / tuned.base_seconds:.1f} times a decoding of {subset} without retrieval"
    )
    if tuned.left_out and tuned.helps:
        print("phrases bring nothing here: their weight is 0, and they are not retrieved")
    if isinstance(tuned.confidence, str):
        print(f"confidence is not calibrated: {tuned.confidence}")
    if not tuned.helps:
        print("nothing is better than the model alone here: the interpolation weights are 0")


def _ranked(trial: tuning.Trial) -> list[tuple[str, TranslationScores]]:
    return sorted(trial.scores.items(), key=lambda item: -item[1].deciding)


def _trade(trial: tuning.Trial) -> list[str]:
    """Write what each finalist gains, copies, loses on other text and takes, and the references copy."""
    copied, losses = trial.copied, trial.losses
    names = ["BLEU", "chrF", *["copied"] * bool(copied), *["other text"] * bool(losses), "tokens/s"]
    rows = [(names, "")]
    for name, scores in _ranked(trial):
        cells = [f"{scores.bleu:.2f}", f"{scores.chrf:.2f}"]
        cells += [f"{copied[name]:.1%}"] if copied else []
        lost = round(losses.get(name, 0.0), 3) + 0.0  # the model alone loses nothing; and no -0.000
        cells += [f"{lost:.3f}"] if losses else []
        rows.append(([*cells, f"{trial.speed(name):,.0f}"], name))
    if copied:
        shown = f"{copied[tuning.REFERENCES]:.1%}"
        rows.append(([shown if name == "copied" else "" for name in names], tuning.REFERENCES))
    widths = [max(7, len(name) + 1) for name in names]
    return [
        "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths)) + f"  {name}"
        for cells, name in rows
    ]


def _given_up(tuned: tuning.Tuned) -> str:
    """Say why the best finalist was not chosen, and what it has more; empty if it was."""
    trial, chosen = tuned.trial, tuned.best.name
    best = max(trial.tried, key=trial.deciding)
    if best.name == chosen:
        return ""
    more, own = trial.scores[best.name], trial.scores[chosen]
    why = "copies less" if trial.prefer == tuning.FAITHFUL else "is faster"
    if best not in trial.harmless(trial.tried):
        why = "loses less on other text"
    gained = f"{more.bleu - own.bleu:+.2f} BLEU, {more.chrf - own.chrf:+.2f} chrF"
    return f", which {why} than the best ({gained}): {best.name}"


@command(
    """\
Translate text, one sentence per line, from standard input or files to standard output.

  fairseq-ccpr translate --datastore datastores/mine < in.txt > out.txt
  fairseq-ccpr translate --path model.pt --datastore datastores/mine --input in.txt.xz --output-format jsonl > out.jsonl

The datastore stores model, languages, dictionaries, subwords and tuned settings. Without a datastore the model translates
alone, with the dictionaries and subwords in its own folder. Any option of fairseq-generate may be given, such as --beam or
--lenpen.

Every input line yields one output line. An empty line yields an empty one. A line that is longer than the
model accepts is divided after a clause or at a space and translated in parts, as standard error tells.
One that cannot be divided yields an empty line, and the exit code 1.

A document keeps its form, and formats and links go to the words that they belong to:

  fairseq-ccpr translate --datastore datastores/mine --input in.docx --output out.docx

Documents are .docx, .odt, .html, .md and .po, and .txt with --output. A sentence without a translation stays as
it was. A run that is interrupted leaves no file. Markdown and PO need the packages of the extra "files".
"""
)
def translate(
    rest: list[str],
    input: list[Path] = option(
        [], "text to translate, plain, .gz or .xz (standard input), or a document", nargs="+", metavar="FILE"
    ),
    output: Optional[Path] = option(None, "where the translation of a document goes", metavar="FILE"),
    output_format: str = option(
        TEXT,
        "text: translations alone; jsonl: with source, score, subwords and their scores",
        choices=(TEXT, JSONL),
    ),
    confidence: bool = option(
        False,
        "how far to rely on each translation, 0 to 1, in a column before it; in jsonl, on each word too",
    ),
    data: Optional[Path] = None,
    buffer_size: int = count_option(
        WINDOW, "sentences read before they are translated in batches of similar lengths"
    ),
    quiet: bool = False,
) -> int:
    document = _document(input, output, plain=output_format == TEXT and not confidence)
    system = System.of(rest, data)
    if confidence:
        system.check_confidence()
    print(described(system), file=sys.stderr)
    if document is not None:
        return _translate_document(system, *document, quiet)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # as the input is read, whatever the locale
    terminal = not input and sys.stdin.isatty()
    at_once = terminal or buffer_size == 1
    lines = chain.from_iterable(map(read_lines, input)) if input else read_standard_input()
    if not at_once:
        first = list(islice(lines, min(IDENTIFIED_LINES, buffer_size)))
        lines = chain(first, lines)
        _tell_unexpected(first, system.task.cfg.source_lang)
    shown = not quiet and sys.stderr.isatty()
    total = sum(1 for path in input for _ in read_lines(path)) if input and shown else None
    told, failed = list[str](), False
    with progress_bar("translations", "sentence", total=total, quiet=quiet or terminal) as bar:
        window = 1 if terminal else buffer_size
        for number, one in enumerate(system.translate(lines, bar.update, window, confidence=confidence), 1):
            known = "" if one.confidence is None else f"{one.confidence:.2f}"
            text = f"{known}\t{one.text}" if confidence else one.text
            print(
                text if output_format == TEXT else json.dumps(asdict(one), ensure_ascii=False), flush=at_once
            )
            if one.fault:
                failed = True
                told.append(f"line {number} has no translation: {one.fault}")
            elif one.parts:
                whole = f"line {number} is longer than the model takes"
                told.append(f"{whole}: it was translated in {len(one.parts)} parts")
    _tell(system, told)
    return int(failed)


def _tell(system: System, told: list[str]) -> None:
    """Tell what is to be known of lines, and of a glossary that was of no use."""
    for sentence in told:
        print(sentence, file=sys.stderr)
    terms = system.task.glossary
    if terms is not None and terms.searched and not terms.found:
        print(
            f"--glossary: no sentence has a term of {terms.path}: its first column is of the language translated from",
            file=sys.stderr,
        )


def _document(input: list[Path], output: Path | None, plain: bool) -> tuple[Document, Path] | None:
    """Open what is to be translated if it is a document, and check where it goes; None for lines of text.

    Args:
        plain: whether translations alone are asked for.
    """
    for path in input:
        if not path.is_file():
            raise ConfigurationError(f"--input: there is no file {path}")
    kinds = [path.suffix.lower() for path in input if path.suffix.lower() in FORMATS]
    if output is None and {*kinds} <= {".txt"}:
        return None
    if not kinds:
        known = f"expected --input FILE of {', '.join(FORMATS)}, found {' '.join(map(str, input)) or 'none'}"
        raise ConfigurationError(f"--output is for documents: {known}; of lines, give > {output}")
    check_folders(output=output)
    if len(input) > 1 or output is None or output.suffix.lower() != kinds[0]:
        alone = f"a document is translated by itself, to --output FILE{kinds[0]}"
        raise ConfigurationError(f"--input {' '.join(map(str, input))}: {alone}")
    if not plain:
        raise ConfigurationError(
            f"--output {output} has translations alone: leave out --output-format and --confidence"
        )
    return open_document(*input), output


def _translate_document(system: System, document: Document, output: Path, quiet: bool) -> int:
    """Translate the sentences of a document, and write the document with them."""
    sentences, marks = with_marks(document.segments)
    faults, parts = list[str](), list[str | Parts]()
    with progress_bar("translations", "sentence", total=len(sentences), quiet=quiet) as bar:
        found = system.translate(sentences, bar.update)
        while some := list(islice(found, WINDOW)):
            faults += [f"'{one.source}' has no translation: {one.fault}" for one in some if one.fault]
            placed = with_markup(system, [[one] for one in some], marks[len(parts) :])
            parts += [best for (best,) in placed]
    with atomic_file(output) as partial:
        document.save(parts, partial)
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def described(system: System) -> str:
    """Say in one line what affects translations."""
    alone = f"none, the model translates alone, precision:{system.task.precision}"
    return f"retrieval signature: {system.signature or alone}"


def _tell_unexpected(lines: list[str], language: str) -> None:
    if 2 * sum("\t" in line for line in lines) > len(lines):
        print(
            "the input has tabs: columns are translated as one sentence; give one of them (cut -f1)",
            file=sys.stderr,
        )
    elif found := look_foreign(lines, language):
        print(
            f"the input looks {language_name(found)}: it is translated from {language_name(language)}",
            file=sys.stderr,
        )


@command(
    """\
Translate sentences with and without retrieval, and write a page for any browser, one file that needs no network. It shows
how much of each token's probability came from the model, the token datastore and the phrase datastore. It lists the
neighbours and phrases that proposed the token, in their sentences, and what the model alone would have written.

  fairseq-ccpr explain data-bin --datastore datastores/mine --output page.html

DATA_BIN is what prepare makes of pairs; Translator.explain, in Python, explains sentences without references.
All other options are those of fairseq-generate --task translation_retrieval. A file of that name is overwritten.
""",
    shown=SHOWN - {"--glossary", "--nbest"},
)
def explain(
    rest: list[str],
    data_bin: Path,
    output: Path = option(help="the page", metavar="FILE"),
    sentences: Optional[int] = count_option(None, "how many, the first of the subset (50)"),
    ids: list[int] = option([], "these sentences, counted from 0", nargs="+", metavar="N"),
    neighbours: int = option(
        16, "shown of each token, at most", within="[0, inf)", needs="at least 0", metavar="N"
    ),
) -> int:
    if ids and sentences is not None:
        raise ConfigurationError("--sentences and --ids exclude each other: give one of them")
    check_folders(output=output)
    done = explain_subset(System.of(rest, data_bin), sentences or 50, ids or None, neighbours)
    done.save(output)
    line = f"{output}: {len(done.sentences):,} of {done.sentences_in_subset:,} of {done.subset}"
    if done.bleu is not None:
        line += f", BLEU of these {done.bleu[BASE]:.2f}, with retrieval {done.bleu[RETRIEVAL]:.2f}"
    print(line)
    return 0


@command(
    """\
Decode a subset with the base model and with retrieval, in turns. Print BLEU, chrF and speed of both, and three
sentences that retrieval improved. All options are those of fairseq-generate --task translation_retrieval:
--tokens-k, --tokens-lambda, --tokens-temperature, --gen-subset, --beam, --max-tokens, --bpe and so on. With
--results-path DIR it writes base.txt, retrieval.txt, source.txt, reference.txt and comparison.json there once both
are decoded. Without --datastore the base model decodes alone.
""",
    shown=SHOWN - {"--nbest", "--replace-unk"},
)
def compare(rest: list[str], data_bin: Path) -> int:
    system = System.of(rest, data_bin)
    decodings, signature = compare_decoding(system), system.signature
    rows = decodings.rows()
    cells = [["system", "BLEU", "chrF", "seconds", "tokens/s", "speed"]]
    for row in rows:
        numbers = [
            f"{row['bleu']:.2f}",
            f"{row['chrf']:.2f}",
            f"{row['seconds']:.1f}",
            f"{row['tokens_per_second']}",
        ]
        cells.append([row["system"], *numbers, f"{row['speed']:.0%}"])
    print(f"{markdown_table(cells)}\n\n{len(decodings.references):,} sentences")
    print(f"BLEU {rows[0]['bleu_signature']}\nchrF {rows[0]['chrf_signature']}")
    if signature is not None:
        print(f"retrieval {signature}")
        if system.confidence is not None:
            worths = measure(decodings, RETRIEVAL, system.confidence)
            print(f"\n{markdown_table(confidence_table(worths))}")
            rows[1]["confidence"] = worths
        print("\nThe three sentences that retrieval brought nearest to their references, by chrF gained:")
        for i in decodings.examples(3):
            print(f"\nsource     {decodings.sources[i]}")
            for name in (BASE, RETRIEVAL):
                print(f"{name:10} {decodings.systems[name].hypotheses[i]}")
            print(f"reference  {decodings.references[i]}")
    if system.cfg.common_eval.results_path is not None:
        folder = Path(system.cfg.common_eval.results_path)
        folder.mkdir(parents=True, exist_ok=True)
        texts = {"source": decodings.sources, "reference": decodings.references}
        texts |= {name: one.hypotheses for name, one in decodings.systems.items()}
        for name, sentences in texts.items():  # in the order of the corpus
            write_text(folder / f"{name}.txt", "".join(f"{sentences[i]}\n" for i in sorted(sentences)))
        found = {"retrieval_signature": signature, "rows": rows}
        write_json(folder / "comparison.json", describe_run(system.device) | found)
    return 0
