"""`fairseq-ccpr retrieve`: which phrases of a datastore translate those of a text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Optional

import torch

from fairseq_ccpr.cli.command import command
from fairseq_ccpr.cli.phrase_prompt import as_json, as_prompt, as_table
from fairseq_ccpr.common_options import cpu_option
from fairseq_ccpr.datastore.learned import LearnedStore
from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.datastore.tuned import Parts, read_tuned
from fairseq_ccpr.decoding.learned_memory import LearnedPhrases, PhraseSegment, why_not_learned
from fairseq_ccpr.decoding.options import PhraseSearchSettings, StoreSettings
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever, find_encoder, query_segmentation
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.span_encoder import load_phrase_encoder
from fairseq_ccpr.settings import option
from fairseq_ccpr.text.pairs import read_standard_input

HELP = """\
For each sentence of standard input, print its phrases and, for each of them, the nearest phrases of the datastore in their
sentences: those that the decoder retrieves. Options and their defaults are those of decoding, but phrases are always found
with the phrase encoder: a query head (--phrase-queries) needs the translation model.

  fairseq-ccpr retrieve datastores/mine < source.txt

--output-format table is for reading; jsonl has one line per sentence with everything; prompt has one prompt per sentence for
a language model that translates, with contexts cut to 100 characters and the phrase in [[ ]]. The retrieval signature, which
names everything that affects the result, goes to standard error.
"""
BATCH = 64  # sentences
TABLE, JSONL, PROMPT = "table", "jsonl", "prompt"

ReadPhrases = Callable[[Mapping[str, Any]], PhraseSearchSettings]


@dataclass
class Options:
    """The command's options besides the retrieval options."""

    datastore: Path = option(help="a datastore with a phrase part", positional=True, metavar="DIR")
    output_format: str = option(TABLE, "what is printed", choices=(TABLE, JSONL, PROMPT))
    source_language: Optional[str] = option(None, "what a prompt calls it, such as German", metavar="NAME")
    target_language: Optional[str] = option(None, "what a prompt calls it, such as English", metavar="NAME")
    max_words: Optional[int] = option(None, "words of a phrase, at most (as in the datastore)", metavar="N")
    cpu: bool = cpu_option()


def retrieve(options: Options, waiting: StoreSettings, read_phrases: ReadPhrases) -> int:
    """Read, retrieve, print."""
    source_language, target_language = _languages(options)
    device, (datastore, tuned) = choose_device(options.cpu), open_phrases(options.datastore)
    settings = read_phrases(tuned)
    encoder = load_phrase_encoder(find_encoder(datastore, settings.encoder), bf16=settings.bf16)
    segmentation = query_segmentation(datastore, settings.threshold, settings.segmentation)
    if options.max_words is not None:
        segmentation = replace(segmentation, max_words=options.max_words)
    retriever = PhraseRetriever(datastore, encoder, segmentation, settings.k, settings.min_similarity, device, waiting)
    learnt = learnt_beside(datastore, device)
    print(f"retrieval signature: {retriever.signature(learnt=learnt)}", file=sys.stderr)
    lines = read_standard_input()
    while sentences := list(islice(lines, BATCH)):
        for sentence, queries in zip(sentences, retriever.retrieve(sentences, learnt), strict=True):
            if options.output_format == TABLE:
                print(as_table(sentence, queries))
            elif options.output_format == JSONL:
                print(as_json(sentence, queries))
            else:
                print(as_prompt(sentence, queries, source_language, target_language))
    if retriever.too_long:
        print(f"{retriever.too_long:,} sentences longer than the encoder reads were read in windows", file=sys.stderr)
    retriever.check_found("the input")
    return 0


def open_phrases(datastore: Path) -> tuple[PhraseDatastore, dict[str, Any]]:
    """Open the phrase part of a datastore, and read which settings of phrases tuning left for the whole of it.

    Raises:
        DatastoreError: it has no phrase part, or is none.
    """
    phrases = PhraseDatastore(datastore)
    parts: Parts = {"phrase": phrases}
    if Manifest.read(datastore).token is not None:
        parts = {"token": TokenDatastore(datastore), **parts}
    return phrases, read_tuned(parts).get(PhraseSearchSettings.PREFIX, {})


def learnt_beside(phrases: PhraseDatastore, device: torch.device) -> LearnedPhrases | None:
    """Return the phrases learnt alongside a datastore; None if none can be.

    Raises:
        DatastoreError: what was learnt belongs to something else.
    """
    directory = phrases.directory
    if Manifest.read(directory).token is None or why_not_learned(directory, phrases):
        return None
    return PhraseSegment(LearnedStore(TokenDatastore(directory)), phrases, device).update()


def _languages(options: Options) -> tuple[str, str]:
    """Return the names of the languages, which prompts have, and nothing else does."""
    given = options.source_language, options.target_language
    if options.output_format == PROMPT:
        if not all(given):
            raise ConfigurationError(
                f"--output-format {PROMPT} names the languages: give --source-language and --target-language, such as German"
            )
    elif any(given):
        raise ConfigurationError(
            f"--source-language and --target-language are for --output-format {PROMPT}: leave them out"
        )
    return given[0] or "", given[1] or ""


main = command(HELP, retrieve, Options, StoreSettings, tuned=(PhraseSearchSettings,))
