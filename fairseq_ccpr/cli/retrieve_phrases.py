"""`retrieve_phrases.py`: which phrases of a datastore translate those of a text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from fairseq_ccpr.cli.command import HelpFormatter, own_arguments, run
from fairseq_ccpr.cli.phrase_prompt import as_json, as_prompt, as_table
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.decoding.options import HOW_PHRASES_COUNT, PhraseSettings, StoreSettings
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever, find_encoder, query_segmentation
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.span_encoder import load_phrase_encoder
from fairseq_ccpr.settings import add_options, read_options

HELP = """\
For each sentence of the standard input, the phrases in it and, for each, the phrases of the datastore nearest to it, in
their sentences: by default those that the decoder retrieves.

  retrieve_phrases.py datastores/mine < source.txt

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
    add("--format", choices=("table", "json", "prompt"), default="table", help="of the output")
    add_options(parser, PhraseSettings, without=HOW_PHRASES_COUNT)
    add("--max-words", type=int, metavar="N", help="words of a phrase, at most (as in the datastore)")
    add("--source-language", default="German", metavar="NAME", help="as the prompt is to call it")
    add("--target-language", default="English", metavar="NAME", help="as the prompt is to call it")
    add_options(parser, StoreSettings)
    add("--cpu", action="store_true", help="use the CPU even where there is a GPU")
    return parser


def retrieve(options: argparse.Namespace) -> int:
    """Read, retrieve, print."""
    device = torch.device("cuda" if torch.cuda.is_available() and not options.cpu else "cpu")
    settings, datastore = read_options(PhraseSettings, options), PhraseDatastore(options.datastore)
    encoder = load_phrase_encoder(find_encoder(datastore, settings.encoder), bf16=settings.bf16)
    segmentation = query_segmentation(datastore, settings.threshold, settings.segmentation)
    if options.max_words is not None:
        segmentation = replace(segmentation, max_words=options.max_words)
    waiting = read_options(StoreSettings, options)
    retriever = PhraseRetriever(datastore, encoder, segmentation, settings.k, settings.min_similarity, device, waiting)
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
