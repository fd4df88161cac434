"""Building datastores: `fairseq-ccpr build tokens`, `build phrases`, `build text`, `build monolingual`, `build memory`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from fairseq_ccpr.building.adapter_build import build_projected_datastore
from fairseq_ccpr.building.part import launched
from fairseq_ccpr.building.phrase_build import PhraseBuildSettings, build_phrase_datastore
from fairseq_ccpr.building.text_build import Vocabulary, build_text_part
from fairseq_ccpr.building.text_files import Lines
from fairseq_ccpr.building.token_build import (
    NO_ADAPTER,
    TokenBuildSettings,
    build_token_datastore,
    write_empty_store,
)
from fairseq_ccpr.cli.command import MODEL, command
from fairseq_ccpr.datastore.manifest import TextSection
from fairseq_ccpr.datastore.parts import GRAMS
from fairseq_ccpr.datastore.preprocessing import remember, remembered
from fairseq_ccpr.datastore.token import UNKNOWN_SYMBOL, TokenDatastore
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.inference.back_translation import back_translate, refuse_begun, tell_left_out
from fairseq_ccpr.inference.resources import preprocessing_for_build
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.models.key_layer import KEY_LAYERS
from fairseq_ccpr.settings import option
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.fingerprint import short
from fairseq_ccpr.text.languages import tell_foreign


@command("""\
Build a token datastore: force-decode the sentence pairs of DATA_BIN with a trained model, and store one entry per target
token. The decoder's state is its key, the token its value.

  fairseq-ccpr build tokens data-bin --path model.pt --output datastores/mine

The datastore stores model, languages, dictionaries and subwords, so that later commands need no such options.

--adapter clknn also trains a small network on those states with a contrastive loss (CLKNN), and stores its outputs as
keys: narrower, and trained to find the right token. Decoding needs no further options.

--monolingual builds from text of the target language alone. A model of the opposite direction translates each sentence back,
and these pairs take the place of those of DATA_BIN, whose subwords and dictionaries are used:

  fairseq-ccpr build tokens data-bin --path model.pt --output mine --monolingual mono.txt --reverse-model reverse.pt

The folder back-translations of the datastore keeps the pairs: a table, pairs.tsv, and a DATA_BIN. Lines that are empty, too
long for the reverse model, or translated with nothing are left out and counted. fairseq-ccpr merge joins such a datastore
with one of pairs.

Run the same command again to resume an interrupted build. On a finished datastore, another --index rebuilds only the index.
Several processes share the work: torchrun --nproc-per-node 4 -m fairseq_ccpr build tokens ...

--store moves the keys to Milvus and keeps the rest in the folder, which is used as before; see fairseq-ccpr build phrases -h.
""")
def build_tokens(settings: TokenBuildSettings) -> int:
    settings.check()
    preprocessing = preprocessing_for_build(
        settings.data_bin, Path(settings.path), settings.source_lang, settings.target_lang
    )
    settings = replace(settings, source_lang=preprocessing.source_lang, target_lang=preprocessing.target_lang)
    start = time.monotonic()
    with launched(settings.output) as processes:
        for text in settings.monolingual if processes.first else ():
            tell_foreign(text, preprocessing.target_lang)
        if settings.monolingual:
            settings = replace(settings, pseudo_pairs=back_translate(settings, preprocessing, processes))
        else:
            refuse_begun(settings.output)
        build = build_token_datastore if settings.adapter == NO_ADAPTER else build_projected_datastore
        section, left_out = build(settings, processes)
        if processes.first:
            remember(preprocessing, settings.output)
            print(
                f"{settings.output}: {section.size:,} entries of width {section.dimension}, index "
                f"{section.index}, model {short(section.fingerprints['model'])}, "
                f"{time.monotonic() - start:.0f} s"
            )
            if len(section.subsets) > 1:
                print(
                    "subsets: "
                    f"{', '.join(f'{name} {count:,} sentences' for name, count in section.subsets.items())}"
                )
            if settings.pseudo_pairs and (report := tell_left_out(settings.pseudo_pairs.left_out)):
                print(report)
            if left_out:
                print(f"{left_out:,} sentences longer than the model takes were left out")
            if unknown := TokenDatastore(settings.output).count_unknown():
                print(
                    f"{unknown:,} entries are of unknown tokens ({UNKNOWN_SYMBOL}), which decoding passes "
                    "over"
                )
    return 0


@command("""\
Build a phrase datastore from text of the target language alone: find the phrases of each sentence with a trained phrase
encoder and keep a vector of each and its place.

  fairseq-ccpr build phrases mono.en.txt --encoder ccpr/phrase-encoder/ccpr.pt --output datastores/mine
  fairseq-ccpr build phrases mono.en.txt --encoder xpr/phrase-encoder/xpr.pt --segmentation lexicon:dictionary.tsv \\
    --output datastores/types

With a CCPR encoder each phrase of each sentence is an entry. With an XPR encoder each string is one, its vector the mean
over all its sentences, of which the first is kept. XPR cannot tell phrases from other words, so give it a lexicon: FILE lists
phrases, one per line or separated by tabs. A dictionary of both languages serves for source sentences as well.

The text has a sentence per line, plain, .gz or .xz; the same sentence counts once. The output may hold a token part
already. Run the same command again to resume an interrupted build.

  fairseq-ccpr build phrases mono.en.txt --encoder ccpr.pt --output datastores/mine --store http://localhost:19530

--store moves the keys to Milvus and keeps the rest in the folder, which is used as before. Credentials, user:password or
an API key, are taken from the URI or, better, from the environment variable MILVUS_TOKEN, where decoding looks for them too.
""")
def build_phrases(settings: PhraseBuildSettings) -> int:
    settings.check()
    start = time.monotonic()
    if known := remembered(settings.output):  # of its other parts
        for text in settings.text:
            tell_foreign(text, known.target_lang)
    with launched(settings.output) as processes:
        report = build_phrase_datastore(settings, processes)
    if report is None:
        return 0
    section, lines = report.section, report.lines
    speed = f" ({report.encoded / report.seconds:.0f} sentences/s)" if report.encoded else ""
    print(
        f"{settings.output}: {section.size:,} phrases of {section.sentences:,} sentences "
        f"({section.size / section.sentences:.1f} per sentence), width {section.dimension}, index "
        f"{section.index}, encoder {short(section.fingerprints['encoder'])}, {time.monotonic() - start:.0f} "
        f"s{speed}"
    )
    _print_left_out(lines)
    if report.too_long:
        print(f"{report.too_long:,} sentences longer than the encoder reads were read in windows")
    return 0


def _print_left_out(lines: Lines) -> None:
    if lines.empty or lines.repeated:
        print(f"{lines.empty:,} empty lines and {lines.repeated:,} repeated sentences were left out")


@command(
    """\
Build a text memory from text of the target language alone: count which subwords follow which. Beam search then weighs what
the text would say next against what is general, before tokens and phrases vote.

  fairseq-ccpr build text mono.en.txt --path model.pt --against general.en.txt --output datastores/mine

It takes seconds, needs no encoder, and works alone or alongside tokens and phrases. --against names general text of the
target language, such as the model's own training text; without it, what is frequent everywhere is rewarded, too.

The text has a sentence per line, plain, .gz or .xz; the same sentence counts once. Run the same command again to resume an
interrupted build.
""",
    shown=MODEL,
)
def build_text(
    rest: list[str],
    text: list[Path],
    against: list[Path],
    output: Path = option(help="the datastore: a new folder, or one to add to", metavar="DIR"),
    data: Optional[Path] = None,
    quiet: bool = False,
) -> int:
    start = time.monotonic()
    system = System.of(rest, data)
    with launched(output) as processes:  # to count is the work of one
        counted = _count_text(system, text, against, output, quiet) if processes.first else None
        processes.barrier()
    if counted is None:
        return 0
    section, lines, unknown = counted
    size = sum(file["bytes"] for file in section.files.values())
    general = f", against {section.general:,} of general text" if section.general else ""
    print(
        f"{output}: {section.sentences:,} sentences of {section.size:,} tokens{general}, "
        f"{section.tables[GRAMS][0]:,} n-grams up to {section.order}, {size / section.size:.0f} bytes per "
        f"token, {time.monotonic() - start:.0f} s"
    )
    _print_left_out(lines)
    if unknown:
        print(f"{100 * unknown:.1f}% of the subwords are unknown to the model")
    if not section.general:
        print("there are no general counts: built with --against TEXT, translations are better")
    return 0


def _count_text(
    system: System, text: list[Path], against: list[Path], output: Path, quiet: bool
) -> tuple[TextSection, Lines, float]:
    dictionary, tags, language = (
        system.task.target_dictionary,
        system.task.tags,
        system.preprocessing.target_lang,
    )
    vocabulary = Vocabulary(
        system.target_encoder(),
        len(dictionary),
        tags.end_of(dictionary),
        dictionary.unk(),
        fingerprint.of_strings(dictionary.symbols),
        language if tags.languages else None,
    )
    for path in [*text, *against]:
        tell_foreign(path, language)
    counted = build_text_part(text, against, output, vocabulary, quiet)
    if (known := remembered(output)) is None or not known.options:  # or it has what its tokens need
        remember(system.preprocessing, output)
    return counted


@command(
    """\
Build all that target-language text alone gives, into one datastore: a text memory; phrases, with --encoder; and the tokens of
its back-translations, with --reverse-model. fairseq-ccpr tune then decides how far each is trusted.

  fairseq-ccpr build monolingual mono.en.txt --path model.pt --against general.en.txt --encoder ccpr.pt \\
    --reverse-model reverse/model.pt --data data-bin --output datastores/mine

It runs build text, build phrases and build tokens --monolingual, which have more options each. Run the same command again to
resume an interrupted build; to add one part to a datastore, give the text again and what that part needs.
""",
    shown=MODEL,
)
def build_monolingual(
    rest: list[str],
    text: list[Path],
    against: list[Path],
    path: Path = option(help="checkpoint of the model", metavar="MODEL"),
    output: Path = option(help="the datastore: a new folder, or one to add to", metavar="DIR"),
    encoder: Optional[Path] = None,
    reverse_model: Optional[Path] = option(
        None,
        "build tokens from pairs that this model, of the opposite direction, translates back",
        metavar="CKPT",
    ),
    data: Optional[Path] = None,
    bf16: bool = False,
    cpu: bool = False,
    quiet: bool = False,
) -> int:
    if not encoder and not reverse_model:
        raise ConfigurationError(
            "there is nothing to build but the text memory: give --encoder or --reverse-model, or use "
            "fairseq-ccpr build text"
        )
    if reverse_model and not data:
        raise ConfigurationError(
            "--reverse-model needs --data DATA_BIN, a folder that fairseq-ccpr prepare made"
        )
    common: dict[str, Any] = {"output": output, "cpu": cpu, "quiet": quiet}
    tokens = None
    if data and reverse_model:
        tokens = TokenBuildSettings(data, str(path), monolingual=text, reverse_model=reverse_model, **common)
        tokens.check()  # before the others are built
    words = ["--path", str(path), *(["--cpu"] if cpu else []), *rest]
    build_text.work(words, text, against, output, data, quiet)
    if encoder:
        build_phrases.work(PhraseBuildSettings(text, encoder, bf16=bf16, **common))
    if tokens:
        build_tokens.work(tokens)
    return 0


@command(
    """\
Make an empty token datastore: fairseq-ccpr learn adds sentence pairs, one or many at a time, each of which counts from the
next translation on.

  fairseq-ccpr build memory --path model.pt --output datastores/mine

It stores model, languages, dictionaries and subwords. If there is text of the domain, build from that instead (fairseq-ccpr
build tokens), and learn in addition. A datastore of phrases alone, which cannot learn without tokens, gets an empty token
part.
""",
    shown=MODEL,
)
def build_memory(
    rest: list[str],
    output: Path = option(
        help="the datastore: a folder that does not exist, or one of phrases alone", metavar="DIR"
    ),
    key_layer: str = option(KEY_LAYERS[0], "the decoder state that becomes the key", choices=KEY_LAYERS),
    data: Optional[Path] = None,
) -> int:
    system = System.of(rest, data)
    task = system.task
    symbols, languages = task.target_dictionary.symbols, task.tags.languages
    section = write_empty_store(system.models, task.source_dictionary, symbols, key_layer, languages, output)
    remember(system.preprocessing, output)
    print(f"{output}: nothing yet, for entries of width {section.dimension}; fairseq-ccpr learn adds to it")
    return 0
