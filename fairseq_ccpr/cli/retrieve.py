"""`fairseq-ccpr retrieve`: which phrases of a datastore translate those of a text, as tables, JSON or prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Optional

from fairseq_ccpr.cli.command import command
from fairseq_ccpr.datastore.learned import LearnedStore
from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.datastore.tuned import Parts, read_tuned
from fairseq_ccpr.decoding.learned_memory import PhraseSegment, why_not_learned
from fairseq_ccpr.decoding.options import PhraseSearchSettings, StoreSettings
from fairseq_ccpr.decoding.phrase_retriever import (
    PhraseRetriever,
    QueryPhrase,
    RetrievedPhrase,
    load_encoder,
    query_segmentation,
)
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.search import TIMEOUT
from fairseq_ccpr.settings import option
from fairseq_ccpr.text.pairs import read_standard_input

RETRIEVED_TOGETHER = 64  # sentences
CONTEXT = 100  # characters of a context in a prompt, as in figure 2 of the CCPR paper
TABLE, JSONL, PROMPT = "table", "jsonl", "prompt"


@command("""\
For each sentence of standard input, print its phrases and, for each of them, the nearest phrases of the datastore in their
sentences: those that the decoder retrieves. Options and their defaults are those of decoding.

  fairseq-ccpr retrieve datastores/mine < source.txt

--output-format table is for reading; jsonl has one line per sentence with everything; prompt has one prompt per sentence for
a language model that translates, with contexts cut to 100 characters and the phrase in [[ ]]. The retrieval signature, which
names everything that affects the result, goes to standard error.
""")
def retrieve(
    datastore: Path = option(help="a datastore with a phrase part", positional=True, metavar="DIR"),
    output_format: str = option(TABLE, "what is printed", choices=(TABLE, JSONL, PROMPT)),
    source_language: Optional[str] = option(None, "what a prompt calls it, such as German", metavar="NAME"),
    target_language: Optional[str] = option(None, "what a prompt calls it, such as English", metavar="NAME"),
    bf16: bool = False,
    cpu: bool = False,
    *,
    waiting: StoreSettings,
    read_phrases: Callable[[Mapping[str, Any]], PhraseSearchSettings],
) -> int:
    languages = [name for name in (source_language, target_language) if name]
    if output_format == PROMPT and len(languages) < 2:
        raise ConfigurationError(
            f"--output-format {PROMPT} names the languages: give --source-language and --target-language, such as German"
        )
    if output_format != PROMPT and languages:
        raise ConfigurationError(
            f"--source-language and --target-language are for --output-format {PROMPT}: leave them out"
        )
    device, (phrases, tuned) = choose_device(cpu), open_phrases(datastore, waiting.timeout)
    settings = read_phrases(tuned)
    encoder = load_encoder(phrases, settings.encoder, bf16)
    segmentation = query_segmentation(phrases, settings.threshold, settings.segmentation)
    retriever = PhraseRetriever(
        phrases, encoder, segmentation, settings.k, settings.min_similarity, device, waiting
    )
    learned = None
    if Manifest.read(datastore).token is not None and not why_not_learned(datastore, phrases):
        learned = PhraseSegment(LearnedStore(TokenDatastore(datastore)), phrases, device).update()
    print(f"retrieval signature: {retriever.signature(learned=learned)}", file=sys.stderr)
    lines = read_standard_input()
    while sentences := list(islice(lines, RETRIEVED_TOGETHER)):
        for sentence, queries in zip(sentences, retriever.retrieve(sentences, learned), strict=True):
            if output_format == TABLE:
                print(as_table(sentence, queries))
            elif output_format == JSONL:
                print(as_json(sentence, queries))
            else:
                print(as_prompt(sentence, queries, *languages))
    if retriever.too_long:
        print(
            f"{retriever.too_long:,} sentences longer than the encoder reads were read in windows",
            file=sys.stderr,
        )
    retriever.check_found("the input")
    return 0


def open_phrases(datastore: Path, timeout: float = TIMEOUT) -> tuple[PhraseDatastore, dict[str, Any]]:
    """Open the phrase part of a datastore, and read which settings of phrases tuning left for the whole of it."""
    phrases = PhraseDatastore(datastore, timeout)
    parts: Parts = {"phrase": phrases}
    if Manifest.read(datastore).token is not None:
        parts = {"token": TokenDatastore(datastore), **parts}
    return phrases, read_tuned(parts).get(PhraseSearchSettings.PREFIX, {})


def as_table(sentence: str, queries: list[QueryPhrase]) -> str:
    """Write a Markdown table, a row for each phrase retrieved."""
    lines = [f"### {sentence}", "", "| phrase | p | retrieved | score | in |", "|---|---|---|---|---|"]
    for query in queries:
        for phrase in query.retrieved:
            cells = [
                query.string,
                f"{query.probability:.2f}",
                phrase.string,
                f"{phrase.score:.3f}",
                marked(phrase),
            ]
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([*lines, ""])


def as_json(sentence: str, queries: list[QueryPhrase]) -> str:
    """Write one line of JSON: the sentence, and all that is known of its phrases."""
    phrases = [
        vars(query) | {"retrieved": [phrase._asdict() for phrase in query.retrieved]} for query in queries
    ]
    return json.dumps({"sentence": sentence, "phrases": phrases}, ensure_ascii=False)


def as_prompt(sentence: str, queries: list[QueryPhrase], source_language: str, target_language: str) -> str:
    """Write a prompt that shows phrases with translations in their contexts, then asks for a translation."""
    lines = []
    for query in queries:
        for phrase in query.retrieved:
            lines.append(f'- "{query.string}" may be "{phrase.string}", as in: {marked(phrase)}')
    hints = (
        ["Phrases that may help, each with a sentence in which it stands in [[ ]]:", *lines, ""]
        if lines
        else []
    )
    asked = f"Translate from {source_language} to {target_language}."
    return "\n".join([asked, "", *hints, f"{source_language}: {sentence}", f"{target_language}:", ""])


def marked(phrase: RetrievedPhrase, most: int = CONTEXT) -> str:
    """Mark the phrase with [[ ]] in its sentence, cut to `most` characters around it, the phrase itself never.

    >>> marked(RetrievedPhrase(0, "the cat", "Here the cat sat.", 5, 12, 0.9))
    'Here [[the cat]] sat.'
    >>> marked(RetrievedPhrase(0, "the cat", "Here the cat sat.", 5, 12, 0.9), most=11)
    '...e [[the cat]] s...'
    """
    room = max(0, most - (phrase.end - phrase.start))
    before = min(phrase.start, max(room // 2, room - (len(phrase.sentence) - phrase.end)))
    after = min(len(phrase.sentence) - phrase.end, room - before)
    start, end = phrase.start - before, phrase.end + after
    left = "..." * (start > 0) + phrase.sentence[start : phrase.start]
    right = phrase.sentence[phrase.end : end] + "..." * (end < len(phrase.sentence))
    return f"{left}[[{phrase.string}]]{right}"
