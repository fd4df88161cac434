"""`fairseq-ccpr evaluate retrieved`: how much of what phrase datastores retrieve is in the reference translations."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional

from fairseq_ccpr.cli.command import check_folder, command, markdown_table, named, write_results
from fairseq_ccpr.cli.retrieve import ReadPhrases, open_phrases
from fairseq_ccpr.common_options import count_option, cpu_option, json_option, quiet_option
from fairseq_ccpr.datastore.phrase import bytes_per_entry
from fairseq_ccpr.decoding.options import PhraseSearchSettings
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever, find_encoder, query_segmentation
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.lab.accuracy.retrieved_phrases import (
    count_held,
    count_retrieved,
    make_references,
    read_outputs,
    read_text,
)
from fairseq_ccpr.lab.accuracy.retrieved_report import RetrievedReport, StoreResult, report, retrieved_table
from fairseq_ccpr.models.phrase_finder import PhraseFinder, Segmentation, choose_segmentation
from fairseq_ccpr.models.span_encoder import load_phrase_encoder
from fairseq_ccpr.settings import option
from fairseq_ccpr.storage import fingerprint

HELP = """\
Compare what phrase datastores retrieve for a text with its reference translations. Retrieval is that of decoding and of
fairseq-ccpr retrieve, with the same options for all datastores; options not given are as tuned for the first.

  fairseq-ccpr evaluate retrieved --source test.de --target test.en --datastore mono=datastores/mono bitext=datastores/bitext

For the first string of each query phrase, and for the first --phrase-k, each string once per sentence and without those of
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
"""


@dataclass
class Options:
    """The command's options."""

    source: Path = option(help="sentences, one per line, plain, .gz or .xz", metavar="F")
    target: Path = option(help="their reference translations, line by line", metavar="F")
    datastore: list[str] = option(
        help="datastores with a phrase part; the first is the baseline", nargs="+", metavar="[NAME=]DIR"
    )
    hypotheses: list[str] = option(
        [], "translations of the sentences, line by line: how much of what was retrieved they have", nargs="+",
        metavar="[NAME=]FILE",
    )  # fmt: skip
    reference_threshold: float = option(
        Segmentation.threshold, "probability above which words of a reference are a phrase", within="[0, 1)",
        needs="a probability in [0, 1)", metavar="P",
    )  # fmt: skip
    entries: Optional[int] = option(None, "use so many entries of each datastore (all)", metavar="N")
    samples: int = count_option(1000, "bootstrap samples")
    json: Optional[Path] = json_option()
    cpu: bool = cpu_option()
    quiet: bool = quiet_option()


def evaluate(options: Options, read_phrases: ReadPhrases) -> int:
    """Read, retrieve, print."""
    check_folder("--json", options.json)
    opened = {name: open_phrases(Path(word)) for name, word in named(options.datastore, "datastores").items()}
    stores = {name: store for name, (store, _) in opened.items()}
    first, tuned = next(iter(opened.values()))
    settings = read_phrases(tuned)
    used = {name: store.sample(n) if (n := options.entries) is not None else store for name, store in stores.items()}
    queries = {
        name: query_segmentation(store, settings.threshold, settings.segmentation) for name, store in stores.items()
    }
    encoder = load_phrase_encoder(find_encoder(first, settings.encoder), bf16=settings.bf16)
    for store in stores.values():
        store.check_encoder(encoder.fingerprint())  # before any work is done
    pairs, skipped = read_text(options.source, options.target)
    written = named(options.hypotheses, "translations")
    outputs = read_outputs([Path(word) for word in written.values()], options.source, options.target)
    device = choose_device(options.cpu)
    finder = PhraseFinder(
        encoder.to(device), Segmentation(choose_segmentation(None, encoder), options.reference_threshold)
    )
    references, too_long = make_references(finder, [target for _, target in pairs], options.quiet)
    sources, tops = [source for source, _ in pairs], sorted({1, settings.k})

    def ask(name: str) -> StoreResult:
        store = used[name]
        retriever = PhraseRetriever(store, encoder, queries[name], settings.k, settings.min_similarity, device)
        counts = count_retrieved(retriever, sources, references, tops, outputs, name, options.quiet)
        retriever.check_found(options.source)
        parts = bytes_per_entry(stores[name].section)
        held = count_held(store, references)
        return StoreResult(
            store.section.size, parts, retriever.phrases, retriever.too_long, counts, held, retriever.signature()
        )

    done = report({name: ask(name) for name in stores}, tops, list(written), skipped, too_long, options.samples)
    line = _signature(options, finder.segmentation, [Path(word) for word in written.values()])
    _print(done, line)
    if options.json:
        write_results(options.json, asdict(done) | {"signature": line})
    return 0


def _signature(options: Options, segmentation: Segmentation, outputs: list[Path]) -> str:
    """Name what decides the numbers besides the retrieval of each datastore."""
    text = fingerprint.short(fingerprint.of_files([options.source, options.target]))
    phrases = f"{segmentation.kind}>{segmentation.threshold}<={segmentation.max_words}words"
    of_outputs = f"|hypotheses:{fingerprint.short(fingerprint.of_files(outputs))}" if outputs else ""
    return f"text:{text}|references:{phrases}|samples:{options.samples}{of_outputs}"


def _print(done: RetrievedReport, signature: str) -> None:
    print("per cent, but for the first rows and strings per sentence\n")
    print(markdown_table(retrieved_table(done)) + "\n")
    print(f"{done.sentences:,} sentences; {done.reference_phrases:.1f} phrases a reference")
    if done.skipped:
        print(f"{done.skipped:,} lines with an empty side were left out")
    for count, what in ((done.too_long, "sentences"), (done.references_too_long, "references")):
        if count:
            print(f"{count:,} {what} longer than the encoder reads were read in windows")
    print(signature)
    for store in done.stores:
        print(f"{store['store']} {store['signature']}")


main = command(HELP, evaluate, Options, tuned=(PhraseSearchSettings,))
