"""Retrieved phrases as text: a table for people, JSON lines, or prompts for a language model that translates."""

from __future__ import annotations

import json

from fairseq_ccpr.decoding.phrase_retriever import QueryPhrase, RetrievedPhrase

CONTEXT = 100  # characters of a context in a prompt, as in figure 2 of the CCPR paper


def as_table(sentence: str, queries: list[QueryPhrase]) -> str:
    """Write a Markdown table, a row for each phrase retrieved."""
    lines = [f"### {sentence}", "", "| phrase | p | retrieved | score | in |", "|---|---|---|---|---|"]
    for query in queries:
        for phrase in query.retrieved:
            cells = [query.string, f"{query.probability:.2f}", phrase.string, f"{phrase.score:.3f}", marked(phrase)]
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([*lines, ""])


def as_json(sentence: str, queries: list[QueryPhrase]) -> str:
    """Write one line of JSON: the sentence, and all that is known of its phrases."""
    phrases = [vars(query) | {"retrieved": [phrase._asdict() for phrase in query.retrieved]} for query in queries]
    return json.dumps({"sentence": sentence, "phrases": phrases}, ensure_ascii=False)


def as_prompt(sentence: str, queries: list[QueryPhrase], source_language: str, target_language: str) -> str:
    """Write a prompt that shows phrases with translations in their contexts, then asks for a translation."""
    lines = []
    for query in queries:
        for phrase in query.retrieved:
            lines.append(f'- "{query.string}" may be "{phrase.string}", as in: {marked(phrase)}')
    hints = ["Phrases that may help, each with a sentence in which it stands in [[ ]]:", *lines, ""] if lines else []
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
