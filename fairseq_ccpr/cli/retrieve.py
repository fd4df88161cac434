"""`fairseq-ccpr retrieve`: which phrases of a datastore translate those of a text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import ClassVar, Optional

from fairseq_ccpr.cli.command import command
from fairseq_ccpr.cli.phrase_prompt import as_json, as_prompt, as_table
from fairseq_ccpr.common_options import cpu_option
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.decoding.options import PhraseSearchSettings, StoreSettings
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever, find_encoder, query_segmentation
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.span_encoder import load_phrase_encoder
from fairseq_ccpr.settings import option

HELP = """\
For each sentence of the standard input, the phrases in it and, for each, the phrases of the datastore nearest to it, in
their sentences: by default those that the decoder retrieves.

  fairseq-ccpr retrieve datastores/mine < source.txt

--format table is for reading, json has a line a sentence with everything, prompt has a prompt a sentence for a language
model that translates, contexts cut to 100 characters, the phrase in [[ ]]. The retrieval signature, which names all that
decides what is retrieved, goes to the standard error.
"""
BATCH = 64  # sentences


@dataclass
class Options:
    """The command's options beside those of retrieval."""

    datastore: Path = option(help="a datastore with a phrase part", positional=True, metavar="DIR")
    format: str = option("table", "of the output", choices=("table", "json", "prompt"))
    max_words: Optional[int] = option(None, "words of a phrase, at most (as in the datastore)", metavar="N")
    source_language: str = option("German", "as the prompt is to call it", metavar="NAME")
    target_language: str = option("English", "as the prompt is to call it", metavar="NAME")
    cpu: bool = cpu_option()


@dataclass(frozen=True)
class ShownPhrases(PhraseSearchSettings):
    """The decoder's own settings, their options without the prefix; scores of any encoder may be shown."""

    PREFIX: ClassVar[str] = ""

    min_similarity: float = option(PhraseSearchSettings.min_similarity, "leave out what scores less", metavar="S")


def retrieve(options: Options, settings: ShownPhrases, waiting: StoreSettings) -> int:
    """Read, retrieve, print."""
    device, datastore = choose_device(options.cpu), PhraseDatastore(options.datastore)
    encoder = load_phrase_encoder(find_encoder(datastore, settings.encoder, "--encoder"), bf16=settings.bf16)
    segmentation = query_segmentation(datastore, settings.threshold, settings.segmentation)
    if options.max_words is not None:
        segmentation = replace(segmentation, max_words=options.max_words)
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
    """Return the lines of the standard input."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise ConfigurationError(f"the standard input, line {number}: the bytes are not UTF-8") from None


main = command(HELP, retrieve, Options, ShownPhrases, StoreSettings)
