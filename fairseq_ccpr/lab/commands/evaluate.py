"""What evaluates: `fairseq-ccpr evaluate systems`, `keys`, `phrases`, `types`, `retrieved` and `alignment`; reports."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, Optional

import numpy as np
from sacrebleu.metrics import BLEU

from fairseq_ccpr.cli.command import check_folders, command, markdown_table, named
from fairseq_ccpr.cli.retrieve import open_phrases
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.options import PhraseSearchSettings
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever, find_encoder, query_segmentation
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError, installing
from fairseq_ccpr.evaluation.test_set import bleu_tokenizer
from fairseq_ccpr.lab.accuracy import phrase_accuracy, retrieved, type_accuracy
from fairseq_ccpr.lab.accuracy.alignment_error import measure, read_gold
from fairseq_ccpr.lab.accuracy.phrase_accuracy import score_system
from fairseq_ccpr.lab.accuracy.phrase_benchmark import PhraseBenchmarkSettings, make_benchmark
from fairseq_ccpr.lab.accuracy.phrase_systems import load_system
from fairseq_ccpr.lab.accuracy.retrieval_accuracy import (
    BANDS,
    OVERALL,
    RAW,
    as_table,
    cluster_points,
    evaluate_retrieval,
    key_sets,
)
from fairseq_ccpr.lab.accuracy.significance import SystemsComparison, compare_systems
from fairseq_ccpr.lab.accuracy.type_accuracy import ORTHOGONAL, load_type_system
from fairseq_ccpr.lab.commands.report import EncoderOptions, report
from fairseq_ccpr.lab.plots import draw_clusters, draw_precision, draw_types
from fairseq_ccpr.lab.sentence_encoders import MUSE
from fairseq_ccpr.lab.speed.phrase_speed import bytes_per_entry
from fairseq_ccpr.lab.xpr.lexicon import Lexicon
from fairseq_ccpr.models.phrase_encoder import PhraseEncoder, load_phrase_encoder
from fairseq_ccpr.models.phrase_finder import LEARNED, PhraseFinder, Segmentation, choose_segmentation
from fairseq_ccpr.phrases.alignment import ALIGNERS, ENCODER, AlignerOptions, SentencePair
from fairseq_ccpr.phrases.pair_build import ExtractionSettings, usable_pairs
from fairseq_ccpr.settings import count_option, option, signature
from fairseq_ccpr.storage.fingerprint import of_files, of_strings, short
from fairseq_ccpr.text.languages import identify
from fairseq_ccpr.text.pairs import TextPairs, read_lines, tell_skipped
from fairseq_ccpr.text.resemblance import NEAR, highest_resemblance
from fairseq_ccpr.text.words import word_spans

IDENTIFYING = 100  # lines of a reference whose language is identified
SAMPLES = 1000  # of the bootstrap
QUERIES_OF_BAND = 1000  # of a band of token frequency, at most
SEED = 1  # of the entries that are drawn
REFERENCE_THRESHOLD = Segmentation.threshold  # probability above which words of a reference are a phrase


@command("""\
BLEU, chrF, chrF++ and TER of any number of translations of one test set, each compared with the first by paired bootstrap
resampling as in sacrebleu: the difference, its 95% interval, and p, the probability of a difference as large between equal
systems. --json has BLEU's brevity penalty and the length by the reference's, too.

  fairseq-ccpr evaluate systems reference.txt base=base.txt knn=knn.txt clknn=clknn.txt
  fairseq-ccpr evaluate systems reference.txt base=base.txt knn=knn.txt --unlike train.tsv

The second command adds the scores of the sentences that have no near-duplicate in the training text.

Files are detokenised text, one sentence per line, plain, .gz or .xz, such as fairseq-ccpr compare --results-path writes.
""")
def evaluate_systems(
    reference: Path = option(help="reference translation", positional=True, metavar="REFERENCE"),
    systems: list[str] = option(
        help="translations; the first is the baseline", positional=True, nargs="+", metavar="[NAME=]FILE"
    ),
    unlike: Optional[Path] = option(
        None,
        "score again without sentences whose reference has a near-duplicate in this text, TSV of sentence pairs or target "
        f"sentences: with a word-set Jaccard similarity of {NEAR} or more",
        metavar="TEXT",
    ),
    more_references: list[Path] = option(
        [], "further references of the same sentences", nargs="+", metavar="FILE"
    ),
    target_lang: str = option(
        "",
        "language of the translations, which BLEU's tokenizer is chosen for (identified by the reference)",
        flags=("-t",),
        metavar="LANG",
    ),
    tokenize: Optional[str] = option(
        None,
        "tokenizer of sacrebleu for BLEU, such as flores200 (the language's)",
        choices=tuple(BLEU.TOKENIZERS),
    ),
    samples: int = count_option(SAMPLES, "bootstrap samples"),
    json: Optional[Path] = None,
) -> int:
    references = [_read(path) for path in (reference, *more_references)]
    texts = {name: _read(Path(path)) for name, path in named(systems, "systems").items()}
    for name, lines in (*texts.items(), *zip(map(str, more_references), references[1:])):
        if len(lines) != len(references[0]):
            raise ConfigurationError(
                f"'{name}' has {len(lines):,} lines, but {reference} has {len(references[0]):,}: "
                "give translations of the same sentences"
            )
    tokenizer = tokenize or bleu_tokenizer(target_lang or identify(" ".join(references[0][:IDENTIFYING])))
    try:
        comparison = compare_systems(texts, references, samples, tokenizer)
    except (RuntimeError, ImportError, OSError) as error:  # as sacrebleu has it
        raise ConfigurationError(
            f"--tokenize {tokenizer} is not installed: {' '.join(str(error).split())}"
        ) from None
    print(_compared(comparison))
    print(f"\n{len(references[0]):,} sentences; p against {next(iter(texts))}, {samples:,} bootstrap samples")
    results = asdict(comparison)
    if unlike is not None:
        targets = [line.split("\t")[1] if "\t" in line else line for line in _read(unlike)]
        rest = np.flatnonzero(highest_resemblance(references[0], targets) < NEAR).tolist()
        if not rest:
            raise ConfigurationError(
                f"--unlike {unlike}: every reference has a near-duplicate there, so there is nothing to score; is it the "
                "test set?"
            )
        chosen = {name: [lines[i] for i in rest] for name, lines in texts.items()}
        apart = compare_systems(
            chosen, [[lines[i] for i in rest] for lines in references], samples, tokenizer
        )
        print(f"\n{_compared(apart)}\n\n{len(rest):,} sentences without a near-duplicate in {unlike}")
        results["unlike"] = {"text": unlike.name, "below": NEAR, "sentences": len(rest), "rows": apart.rows}
    notes = (f"{metric} {described}" for metric, described in comparison.signatures.items())
    return report({}, notes, json, results)


def _read(path: Path) -> list[str]:
    try:
        return list(read_lines(path))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read ({error.strerror})") from None


def _compared(comparison: SystemsComparison) -> str:
    metrics = list(comparison.signatures)
    table: list[list[str]] = [
        ["system", *(f"{m}{what}" for m in metrics for what in ("", " difference", " p"))]
    ]
    for row in comparison.rows:
        cells = [row["system"]]
        for metric in metrics:
            difference, interval, p = (row[f"{metric} {what}"] for what in ("difference", "interval", "p"))
            beside = (
                ["", ""]
                if p is None
                else [f"{difference:+.2f} [{interval[0]:+.2f}, {interval[1]:+.2f}]", f"{p:.4g}"]
            )
            cells += [f"{row[metric]:.2f}", *beside]
        table.append(cells)
    return markdown_table(table)


@command("""\
Precision@k (fraction of the k nearest neighbours with the right token) and any-hit@k (whether one has it) of raw
keys, of raw keys after PCA, and of any number of datastores that --adapter made of them.

  fairseq-ccpr build tokens data-bin ... --output datastores/raw
  fairseq-ccpr build tokens data-bin ... --output datastores/clknn --adapter clknn --raw-datastore datastores/raw
  fairseq-ccpr build tokens data-bin ... --output datastores/valid --subset valid
  fairseq-ccpr evaluate keys datastores/raw clknn=datastores/clknn --held-out datastores/valid --plots accuracy

Queries are random tokens of --held-out, text that no adapter has seen. Without it they are random entries, on which adapters
may have been trained; neighbours from their own sentences are left out. Each band of token frequency has its own queries;
tokens that occur fewer than 10 times are in the first band only. All search is exact.
""")
def evaluate_keys(
    raw: Path = option(help="datastore of --adapter none", positional=True, metavar="RAW"),
    projected: list[str] = option(
        [], "datastores of --adapter clknn or FILE", positional=True, nargs="*", metavar="[NAME=]DIR"
    ),
    held_out: Optional[Path] = option(
        None, "raw datastore of held-out text (fairseq-ccpr build tokens --subset valid)", metavar="DIR"
    ),
    k: int = count_option(64, "the most neighbours"),
    json: Optional[Path] = None,
    plots: Optional[Path] = option(
        None, "folder for pictures: curves by token frequency, and clusters", metavar="DIR"
    ),
    quiet: bool = False,
) -> int:
    check_folders(json=json)
    folders = named([f"{RAW}={raw}", *projected], "kinds of keys")
    stores = {name: TokenDatastore(Path(folder)) for name, folder in folders.items()}
    sets = key_sets(stores[RAW], {name: store for name, store in stores.items() if name != RAW})
    queries = TokenDatastore(held_out) if held_out else None
    accuracy = evaluate_retrieval(sets, stores[RAW], queries, QUERIES_OF_BAND, k, SEED, quiet)
    signatures = (
        f"{name} {store.directory} store:{short(store.keys_fingerprint)}|entries:{store.section.size}|seed:{SEED}"
        for name, store in {**stores, **({"queries": queries} if queries else {})}.items()
    )
    report({"precision@k / any-hit@k, per cent": as_table(accuracy)}, signatures, json, asdict(accuracy))
    if plots:
        plots.mkdir(parents=True, exist_ok=True)
        for band, stem in zip((OVERALL, *BANDS), ("overall", "high", "middle", "low")):
            if band in accuracy.precision:
                draw_precision(
                    accuracy.precision[band], plots / f"precision-{stem}.png", band, "precision@k, %"
                )
        panels = cluster_points(sets, stores[RAW], SEED)
        if panels:
            draw_clusters(panels, len(panels) // len(sets), plots / "clusters.png")
    return 0


@command(f"""\
acc@1 of phrase retrieval: the fraction of gold phrases whose translation, in its sentence, is the nearest entry of an index.
The index holds all gold targets and phrases of --distractors, the same for every system. Each target sentence contributes
one gold pair, always the same one: a sentence encoder gives all phrases of a sentence one vector, and could not tell them
apart. --whole-sentences adds all other phrases of the answers' sentences to the index, so that exactly the right words
must be found.

  fairseq-ccpr evaluate phrases --gold gold.tsv.xz --distractors mono.en.txt.xz \\
    --encoder raw=encoders/xlmr muse cpr=cpr/phrase-encoder/ccpr.pt ccpr=ccpr/phrase-encoder/ccpr.pt

--encoder accepts any number of systems; the kind of each decides what its vectors are:

  CKPT   checkpoint of fairseq-train --task phrase_contrast: its phrase vectors (CCPR, CPR)
  DIR    directory of fairseq-ccpr convert: states of the last layer at the phrase's first and last subword, length 1
  muse   multilingual universal sentence encoder: the vector of the phrase's sentence ({installing("muse")})

Each cell of the table has two numbers: how often the gold entry itself comes first, and how often any entry with its string
does. Ties count as errors; "tied" shows how often the gold entry shared the first place. Below the average of the sets are
its 95% interval and p, the probability of a difference to the first system as large between equal systems (paired
bootstrap). A second table has the same by the length of the phrases; its last row is all those of several words.

For phrases of a dictionary, which have no sentence of their own, see fairseq-ccpr evaluate types.

--same-string 0 4 16 tests whether context tells the same words apart: the index then has that many other occurrences of each
gold target in the distractor text, and otherwise only phrases with other strings.

A gold line has seven columns with tabs between them: set, source sentence, target sentence, span of the source phrase
(10-17: in characters, end exclusive), span of the target phrase, source phrase, target phrase.
""")
def evaluate_phrases(
    settings: PhraseBenchmarkSettings,
    encoder: list[str] = option(
        help=f"CKPT, DIR or {MUSE}; the first is the baseline", nargs="+", metavar="[NAME=]SYSTEM"
    ),
    *,
    common: EncoderOptions,
) -> int:
    settings.check()
    check_folders(json=common.json)
    words, device, finder = named(encoder, "systems"), choose_device(common.cpu), None
    kind = settings.segmentation
    if kind == LEARNED:
        path = next((Path(system) for system in words.values() if Path(system).is_file()), None)
        if path is None:
            raise ConfigurationError(
                "--segmentation learned is that of a phrase encoder: give one as --encoder CKPT"
            )
        finder = PhraseEncoder.load(path).to(device)
        kind += f":{short(finder.fingerprint())}>{settings.threshold}"
    systems = {name: load_system(word, device, common.bf16) for name, word in words.items()}
    benchmark = make_benchmark(settings, list(systems.values()), finder, common.quiet)
    scores = {name: score_system(system, benchmark, name, common.quiet) for name, system in systems.items()}
    done = phrase_accuracy.report(benchmark, scores, settings.same_string, SAMPLES)
    line = signature({
        "gold": short(of_files([settings.gold])), "sets": ",".join(done["queries"]),
        "queries": sum(done["queries"].values()),
        "text": short(of_files(settings.distractors)), "segmentation": kind, "max-words": settings.max_words,
        "whole-sentences": "yes" if settings.whole_sentences else "no", "entries": done["entries"],
        "bf16": "yes" if common.bf16 else "no",
        **{f"encoder {name}": short(one.fingerprint) for name, one in systems.items()},
    })  # fmt: skip
    distractors = done["entries"] - done["gold_targets"]
    notes = [
        f"{done['entries']:,} index entries: {done['gold_targets']:,} gold targets, {distractors:,} phrases of other text"
    ]
    if done["left_out"]:
        notes.append(
            f"{done['left_out']:,} gold pairs were left out: a system's subwords, or its longest text, do not allow them"
        )
    results = done | {"signature": line}
    return report(phrase_accuracy.tables(done), [*notes, line], common.json, results, device)


@command(f"""\
acc@1 of phrases of a dictionary, in both directions: the fraction whose nearest phrase of the other language is a
translation. Any of several translations counts; ties count as errors.

  fairseq-ccpr evaluate types --data de-en=lexicon/de-en/test --sentences 0 1 4 32 \\
    --encoder raw=encoder map={ORTHOGONAL}encoder {MUSE} xpr=xpr/phrase-encoder/xpr.pt --train lexicon/de-en/train

--encoder accepts any number of systems; the kind of each decides what a phrase's vector is:

  CKPT            fairseq-train --task phrase_lexicon (XPR): the mean over sentences of its states, projected; or
                  --task phrase_contrast (CCPR): the mean of its vectors
  DIR             directory of fairseq-ccpr convert: the mean of its states, without training
  {ORTHOGONAL}DIR  the same, source vectors turned by an orthogonal matrix learned from the pairs of --train
  {MUSE}            multilingual universal sentence encoder: of the phrase (--sentences 0), or the mean of its sentences

The setting says what a system was trained on: unsupervised, supervised (this language pair), zero-shot (another one),
multilingual (this one and others); other, where it learned from something else.
""")
def evaluate_types(
    data: list[str] = option(
        help="parts of fairseq-ccpr lexicon, such as test", nargs="+", metavar="[NAME=]DIR"
    ),
    encoder: list[str] = option(
        help=f"CKPT, DIR, {ORTHOGONAL}DIR or {MUSE}", nargs="+", metavar="[NAME=]SYSTEM"
    ),
    train: list[Path] = option([], f"parts that {ORTHOGONAL}DIR learns from", nargs="+", metavar="DIR"),
    sentences: list[int] = option(
        [32],
        "example sentences of a phrase, at most; 0 is the phrase alone",
        nargs="+",
        metavar="M",
        within="[0, inf)",
        needs="a number from 0, such as 0 1 4 32,",
    ),
    layers: Optional[list[int]] = option(
        None, "layers of Transformers (the last, or that of the checkpoint)", nargs="+", metavar="L"
    ),
    plot: Optional[Path] = None,
    *,
    common: EncoderOptions,
) -> int:
    check_folders(json=common.json, plot=plot)
    lexicons = {name: Lexicon(word) for name, word in named(data, "lexicons").items()}
    pairs, chosen = [Lexicon(word) for word in train], sorted(set(layers or ())) or None
    device = choose_device(common.cpu)
    systems = {
        name: load_type_system(word, chosen, pairs, device, common.bf16)
        for name, word in named(encoder, "systems").items()
    }
    results = type_accuracy.evaluate_types(systems, lexicons, sorted(set(sentences)), not common.quiet)
    line = signature({
        **{f"data {name}": short(of_strings(file["sha256"] for _, file in sorted(lexicon.manifest.files.items())))
           for name, lexicon in lexicons.items()},
        "bf16": "yes" if common.bf16 else "no",
        **{f"encoder {name}": short(system.fingerprint) for name, system in systems.items()},
    })  # fmt: skip
    notes = []
    for name, lexicon in lexicons.items():
        phrases = " and ".join(f"{count:,}" for count in lexicon.manifest.phrases)
        notes.append(f"{name}: {lexicon.manifest.pairs:,} pairs of {phrases} phrases")
    tables = {"acc@1, per cent": type_accuracy.accuracy_rows(results)}
    report(
        tables,
        [*notes, line],
        common.json,
        {"results": [one.as_json() for one in results], "signature": line},
        device,
    )
    if plot:
        draw_types(results, plot)
    return 0


@command("""\
Compare what phrase datastores retrieve for a text with its reference translations. Retrieval is that of decoding and of
fairseq-ccpr retrieve, with the same options for all datastores; options not given are as tuned for the first.

  fairseq-ccpr evaluate retrieved --source test.de --target test.en --datastore mono=datastores/mono bitext=datastores/bitext

For the first string of each query phrase, and for the first --phrases-k, each string once per sentence and without those of
punctuation alone:

  precision                  of the strings, how many are in the reference, case-sensitive, as whole words
  coverage                   of the reference's words, how many are inside such a string
  coverage by several words  the same, inside one of several words
  reference phrases          of the phrases that the encoder finds in the reference, the same for every datastore, how many
                             are among the strings

"held" is what all strings of the datastore together cover, of up to 7 words: no retrieval could cover more. "by chance"
compares the same strings with the reference of another sentence, half of the text away. Each figure is followed by its
difference to the first datastore, the 95% interval of the difference, and p, the probability of one as large between equal
datastores (paired bootstrap over sentences).

--hypotheses names translations of the sentences, such as those that fairseq-ccpr compare --results-path writes. "and in base"
is the fraction of the reference's words inside a string that is retrieved, right, and written in base's translation. Phrases
contributed what decoding with them has beyond the model alone.

  fairseq-ccpr evaluate retrieved ... --hypotheses base=results/base.txt phrases=results/retrieval.txt

--entries compares datastores at equal size: that many entries of each, of random sentences, searched exactly.
""")
def evaluate_retrieved(
    source: Path = option(help="sentences, one per line, plain, .gz or .xz", metavar="F"),
    target: Path = option(help="their reference translations, line by line", metavar="F"),
    datastore: list[str] = option(
        help="datastores with a phrase part; the first is the baseline", nargs="+", metavar="[NAME=]DIR"
    ),
    hypotheses: list[str] = option(
        [],
        "translations of the sentences, line by line: how much of what was retrieved they have",
        nargs="+",
        metavar="[NAME=]FILE",
    ),
    entries: Optional[int] = option(None, "use so many entries of each datastore (all)", metavar="N"),
    json: Optional[Path] = None,
    bf16: bool = False,
    cpu: bool = False,
    quiet: bool = False,
    *,
    read_phrases: Callable[[Mapping[str, Any]], PhraseSearchSettings],
) -> int:
    check_folders(json=json)
    opened = {name: open_phrases(Path(word)) for name, word in named(datastore, "datastores").items()}
    stores = {name: store for name, (store, _) in opened.items()}
    first, tuned = next(iter(opened.values()))
    settings = read_phrases(tuned)
    used = {name: store.sample(entries) if entries is not None else store for name, store in stores.items()}
    queries = {
        name: query_segmentation(store, settings.threshold, settings.segmentation)
        for name, store in stores.items()
    }
    encoder = load_phrase_encoder(find_encoder(first, settings.encoder), bf16=bf16)
    for store in stores.values():
        store.check_encoder(encoder.fingerprint())  # before any work is done
    written = {name: Path(word) for name, word in named(hypotheses, "translations").items()}
    pairs, outputs, skipped = retrieved.read_text(source, target, list(written.values()))
    device = choose_device(cpu)
    segmentation = Segmentation(choose_segmentation(None, encoder), REFERENCE_THRESHOLD)
    finder = PhraseFinder(encoder.to(device), segmentation)
    references, too_long = retrieved.make_references(finder, [reference for _, reference in pairs], quiet)
    sources, tops = [sentence for sentence, _ in pairs], sorted({1, settings.k})

    def ask(name: str) -> retrieved.StoreResult:
        store = used[name]
        retriever = PhraseRetriever(
            store, encoder, queries[name], settings.k, settings.min_similarity, device
        )
        counts = retrieved.count_retrieved(retriever, sources, references, tops, outputs, name, quiet)
        retriever.check_found(source)
        parts = bytes_per_entry(stores[name].section)
        held = retrieved.count_held(store, references)
        return retrieved.StoreResult(
            store.section.size,
            parts,
            retriever.phrases,
            retriever.too_long,
            counts,
            held,
            retriever.signature(),
        )

    done = retrieved.report(
        {name: ask(name) for name in stores}, tops, list(written), skipped, too_long, SAMPLES
    )
    rule = f"{segmentation.kind}>{segmentation.threshold}<={segmentation.max_words}words"
    line = f"text:{short(of_files([source, target]))}|references:{rule}|samples:{SAMPLES}"
    line += f"|hypotheses:{short(of_files(list(written.values())))}" if written else ""
    notes = [f"{done['sentences']:,} sentences; {done['reference_phrases']:.1f} phrases a reference"]
    if skipped:
        notes.append(f"{skipped:,} lines with an empty side were left out")
    for count, what in ((done["too_long"], "sentences"), (too_long, "references")):
        if count:
            notes.append(f"{count:,} {what} longer than the encoder reads were read in windows")
    notes += [line, *(f"{row['store']} {row['signature']}" for row in done["stores"])]
    tables = {
        "per cent, but for the first rows and strings per sentence": retrieved.retrieved_table(done["stores"])
    }
    return report(tables, notes, json, done | {"signature": line}, device)


@command("""\
Alignment error rate (AER), precision and recall of aligners on sentences that were aligned by hand.

  fairseq-ccpr evaluate alignment gold.text gold.links --train pairs.tsv --aligners eflomal fast-align
  fairseq-ccpr evaluate alignment gold.text gold.links --aligners encoder --encoder encoders/mine --encoder-layers 7 8 9

GOLD_TEXT has one sentence pair per line, 'source ||| target', tokenised; GOLD_LINKS their links, counted from 1: 1-2 is
a sure link, 1p2 a possible one. The aligners are trained on --train and on the text of the gold sentences; encoder is not
trained.
""")
def evaluate_alignment(
    text: Path = option(help="sentence pairs", positional=True, metavar="GOLD_TEXT"),
    links: Path = option(help="links, line by line", positional=True, metavar="GOLD_LINKS"),
    train: Optional[Path] = option(None, "sentence pairs to learn from", metavar="TSV"),
    train_count: Optional[int] = count_option(None, "only the first N of them (all)"),
    aligners: list[str] = option(
        [name for name in ALIGNERS if name != ENCODER],
        f"any of {', '.join(ALIGNERS)}",
        choices=tuple(ALIGNERS),
        nargs="+",
        metavar="NAME",
    ),
    encoder: Optional[Path] = option(
        None, "of the aligner encoder, made by fairseq-ccpr convert", metavar="DIR"
    ),
    encoder_layers: list[int] = option([], "layers to compare (the one it takes)", nargs="+", metavar="N"),
    json: Optional[Path] = None,
    quiet: bool = False,
) -> int:
    check_folders(json=json)
    if ENCODER not in aligners and (encoder or encoder_layers):
        raise ConfigurationError(
            "--encoder and --encoder-layers need --aligners encoder: add it, or leave them out"
        )
    gold = read_gold(text, links)
    training: list[SentencePair] = []
    if train is not None:
        skipped, most = Counter[str](), ExtractionSettings.max_words
        training = list(islice(usable_pairs(TextPairs(pairs=train), word_spans, most, skipped), train_count))
        tell_skipped(f"--train {train}", skipped)
        if not training:
            raise ConfigurationError(
                f"{train} has no sentence pair of up to {most} words: there is nothing to learn from"
            )
    elif set(aligners) != {ENCODER}:
        raise ConfigurationError(
            "give --train, sentence pairs to learn from: only the aligner encoder needs none"
        )
    rows = [["aligner", "symmetrisation", "AER", "precision", "recall", "seconds of training"]]
    results: list[dict[str, Any]] = []
    made: list[tuple[str, int | None]] = []
    for kind in aligners:
        made += (
            [(kind, layer) for layer in encoder_layers]
            if kind == ENCODER and encoder_layers
            else [(kind, None)]
        )
    parts: dict[str, object] = {"gold": short(of_files([text, links])), "pairs": len(training)}
    parts |= {"text": short(of_files([train]))} if train else {}
    for kind, layer in made:
        name = kind if layer is None else f"{kind}, layer {layer}"
        aligner = ALIGNERS[kind](AlignerOptions(ExtractionSettings.symmetrization, encoder, layer))
        parts |= {what: short(digest) for what, digest in aligner.fingerprints().items()}
        start = time.perf_counter()
        aligner.train([*training, *(pair.pair for pair in gold)], not quiet)
        seconds = time.perf_counter() - start
        counts = measure(aligner, gold)
        found = {"error_rate": counts.error_rate, "precision": counts.precision, "recall": counts.recall}
        results.append(
            {"aligner": name, "symmetrization": aligner.symmetrization, **found, "seconds": seconds}
        )
        numbers = (f"{number:.3f}" for number in found.values())
        rows.append([name, aligner.symmetrization, *numbers, f"{seconds:.0f}"])
    line = signature(parts)
    title = f"{len(gold):,} gold sentence pairs, {len(training):,} to learn from"
    device = choose_device(cpu=ENCODER not in aligners)
    return report({title: rows}, [line], json, {"results": results, "signature": line}, device)
