"""The gain of a memory while a text is translated and corrected, sentence by sentence: translate, see reference, learn it.

python scripts/recipes/learn_stream.py DATASTORE PAIRS.tsv [--most N] [--replace] [--results FOLDER] [NAME=VALUE ...]

DATASTORE is copied first, and stays as it is; fairseq-ccpr build memory makes an empty one. NAME=VALUE are options of
decoding, such as tokens_k=4. Three systems translate the text:

    alone    the model with DATASTORE as it is
    stream   with the pairs before the sentence learned as well
    others   with all other pairs of the text learned: what a memory of it could give

With --replace, each sentence is corrected twice: its translation is learned as it is, and then replaced by the reference.

Printed are BLEU and chrF of each tenth of the text; the part of the gain of `others` over `alone` that `stream` has; the
recall of words of the references that `alone` does not write, by how often the text had them before (R0, R1, R2+).
--results writes all that and the translations to stream.json.
"""

import json
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import asdict
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from fairseq_ccpr import Translator
from fairseq_ccpr.cli.command import markdown_table
from fairseq_ccpr.evaluation.test_set import score
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.timing import progress_over

ALONE, STREAM, OTHERS = SYSTEMS = "alone", "stream", "others"


def main() -> None:
    words = sys.argv[1:]
    if len(words) < 2:
        sys.exit(__doc__.strip())
    given = {name: words.pop(words.index(name) + 1) for name in ("--most", "--results") if name in words}
    store, pairs, *named = (word for word in words if word not in given)
    replace = "--replace" in named
    options: dict[str, Any] = dict(word.split("=", 1) for word in named if word != "--replace")
    most = int(given["--most"]) if "--most" in given else None
    rows = list(islice(read_pairs(Path(pairs)), most))
    with tempfile.TemporaryDirectory() as folder:
        texts, signature, language = translate(
            Path(shutil.copytree(store, Path(folder) / "store")), rows, options, replace
        )
    print(signature)
    references = [reference for _, reference in rows]
    print(markdown_table([["sentences", *(f"{one}, {name}" for name in ("BLEU", "chrF") for one in SYSTEMS)],
                          *tenths(texts, references, language)]))  # fmt: skip
    scores = {name: score(texts[name], references, language) for name in SYSTEMS}
    gained, could = (scores[name].bleu - scores[ALONE].bleu for name in (STREAM, OTHERS))
    share = f", {gained / could:.0%} of that" if could > 0 else ""
    print(f"all other pairs gain {could:+.2f} BLEU, the stream {gained:+.2f}{share}")
    words_found = {name: recall(texts[ALONE], texts[name], references) for name in (STREAM, OTHERS)}
    for kind in sorted(words_found[STREAM]):
        found = ", ".join(f"{name} {some[kind][0] / some[kind][1]:.1%}" for name, some in words_found.items())
        print(f"{kind}: {found} of {words_found[STREAM][kind][1]:,} words")
    if "--results" in given:
        results = Path(given["--results"])
        results.mkdir(parents=True, exist_ok=True)
        shown = {"signature": signature, "scores": {name: asdict(one) for name, one in scores.items()},
                 "recall": words_found, "translations": texts}  # fmt: skip
        (results / "stream.json").write_text(
            json.dumps(shown, ensure_ascii=False, indent=1), encoding="utf-8"
        )


def translate(
    store: Path, rows: list[tuple[str, str]], options: dict[str, Any], replace: bool
) -> tuple[dict[str, list[str]], str, str]:
    """Translate with all systems; returns translations, signature and target language."""
    sources = [source for source, _ in rows]
    translator = Translator(datastore=store, **options)
    texts = {ALONE: [one.text for one in translator.translate(sources)]}
    ids: list[int] = []
    texts[STREAM] = []
    for source, reference in progress_over(rows, STREAM, "pair", lambda _: 1):
        texts[STREAM].extend(one.text for one in translator.translate([source]))
        if replace:
            translator.learn(source, texts[STREAM][-1])
        ids.append(translator.learn(source, reference).id)
    signature = str(translator.signature)
    times = Counter(
        ids
    )  # a pair that the text has several times is learned once, and is among the others of itself
    texts[OTHERS] = []
    for (source, reference), number in zip(rows, ids):
        if times[number] == 1:
            for draft in translator.forget(number):
                translator.forget(draft.id)
        texts[OTHERS].extend(one.text for one in translator.translate([source]))
        translator.learn(source, reference)
    return texts, signature, translator.task.cfg.target_lang


def tenths(texts: dict[str, list[str]], references: list[str], language: str) -> list[list[object]]:
    ends = [len(references) * tenth // 10 for tenth in range(11)]
    parts: list[slice[Any, Any, Any]] = [slice(a, b) for a, b in pairwise(ends) if b > a] + [slice(None)]
    rows: list[list[object]] = []
    for part in parts:
        scores = [score(texts[name][part], references[part], language) for name in SYSTEMS]
        name = f"{part.start + 1} to {part.stop}" if part.stop else "all"
        rows.append([name, *(one.bleu for one in scores), *(one.chrf for one in scores)])
    return rows


def recall(alone: list[str], written: list[str], references: list[str]) -> dict[str, tuple[int, int]]:
    seen: Counter[str] = Counter()
    counts: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for plain, text, reference in zip(alone, written, references):
        words = set(reference.split())
        for word in words - set(plain.split()):
            name = f"R{min(seen[word], 2)}{'+' * (seen[word] > 1)}"
            found, count = counts[name]
            counts[name] = found + (word in text.split()), count + 1
        seen.update(words)
    return dict(counts)


if __name__ == "__main__":
    main()
