"""`retrieve_phrases.py`: which phrases of a datastore translate those of a text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from fairseq_ccpr.cli.command import HelpFormatter, own_arguments, run
from fairseq_ccpr.cli.phrase_prompt import as_json, as_prompt, as_table
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.decoding.phrase_retriever import SKIP, STOP, PhraseRetriever, Waiting
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.phrase_finder import KINDS, Segmentation, choose_segmentation
from fairseq_ccpr.models.span_encoder import load_phrase_encoder

HELP = """\
For each sentence of the standard input, the phrases in it and, for each, the phrases of the datastore nearest to it, in
their sentences.

  retrieve_phrases.py datastores/mine --encoder ccpr/phrase-encoder/ccpr.pt < source.txt

--format table is for reading, json has a line a sentence with everything, prompt has a prompt a sentence for a language
model that translates, contexts cut to 100 characters, the phrase in [[ ]]. The retrieval signature, which names all that
decides what is retrieved, goes to the standard error.
"""
BATCH = 64  # sentences


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="retrieve_phrases.py", description=HELP, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("datastore", metavar="DIR", type=Path, help="a datastore with a phrase part")
    add("--encoder", required=True, type=Path, metavar="CKPT", help="the phrase encoder it was built with")
    add("--format", choices=("table", "json", "prompt"), default="table", help="of the output")
    add("--k", type=int, default=4, metavar="N", help="different phrases retrieved for each, at most")
    add("--min-similarity", type=float, default=0.0, metavar="S", help="leave out what scores less")
    add(
        "--segmentation",
        metavar=KINDS,
        help="which spans of words are asked for (what the encoder takes for a phrase; with XPR, as in the datastore)",
    )
    add("--threshold", type=float, default=0.9, metavar="P", help="probability above which a span is a phrase")
    add("--max-words", type=int, metavar="N", help="words of a phrase, at most (as in the datastore)")
    add("--source-language", default="German", metavar="NAME", help="as the prompt is to call it")
    add("--target-language", default="English", metavar="NAME", help="as the prompt is to call it")
    add(
        "--store-timeout", type=float, default=Waiting.timeout, metavar="S",
        help="seconds that Milvus may take to answer, all attempts together, where the datastore's keys are there",
    )  # fmt: skip
    add(
        "--store-unreachable", choices=(STOP, SKIP), default=STOP,
        help="what to do when it does not: stop, or skip the phrases of these sentences",
    )  # fmt: skip
    add("--bf16", action="store_true", help="run the encoder in bfloat16, faster where the processor has it")
    add("--cpu", action="store_true", help="use the CPU even where there is a GPU")
    return parser


def retrieve(options: argparse.Namespace) -> int:
    """Read, retrieve, print."""
    device = choose_device(options.cpu)
    datastore, encoder = PhraseDatastore(options.datastore), load_phrase_encoder(options.encoder)
    encoder.context.bf16 = options.bf16
    built = datastore.section.segmentation
    kind = choose_segmentation(options.segmentation, encoder, built["kind"])
    most = built["max_words"] if options.max_words is None else options.max_words
    segmentation = Segmentation(kind, options.threshold, most)
    waiting = Waiting(options.store_timeout, options.store_unreachable)
    retriever = PhraseRetriever(datastore, encoder, segmentation, options.k, options.min_similarity, device, waiting)
    print(f"retrieval signature: {retriever.signature()}", file=sys.stderr)
    lines = _read_input()
    while sentences := list(islice(lines, BATCH)):
        for sentence, queries in zip(sentences, retriever.retrieve(sentences)):
            if options.format == "table":
                print(as_table(sentence, queries))
            elif options.format == "json":
                print(as_json(sentence, queries))
            else:
                print(as_prompt(sentence, queries, options.source_language, options.target_language))
    if retriever.too_long:
        print(f"{retriever.too_long:,} sentences longer than the encoder takes have no phrases", file=sys.stderr)
    retriever.check_found("the input")
    return 0


def _read_input() -> Iterator[str]:
    """The lines of the standard input."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise ConfigurationError(f"the standard input, line {number}: the bytes are not UTF-8") from None


def main() -> None:
    """Parse, retrieve, print."""
    options = make_parser().parse_args(own_arguments())
    run("retrieve_phrases.py", lambda: retrieve(options))


if __name__ == "__main__":
    main()
