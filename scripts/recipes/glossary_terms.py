"""How many terms of a glossary a model writes: alone, with --glossary, and with fairseq's --constraints.

python scripts/recipes/glossary_terms.py MODEL PAIRS.tsv TRAINING.tsv [SENTENCES]

The glossary is drawn from word alignments of PAIRS.tsv, which are learned with TRAINING.tsv: source words of 4 letters or
more that are there 2 to 20 times, with the word that most of their links go to. An occurrence counts where the reference has
it as well; --constraints is given just those. The three translate the same sentences, some at a time in turns; speed is by
processor time, so that other programs change it little.
"""

import copy
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from fairseq.token_generation_constraints import pack_constraints

from fairseq_ccpr import Translator
from fairseq_ccpr.cli.command import markdown_table
from fairseq_ccpr.evaluation.test_set import score
from fairseq_ccpr.inference.system import Translation, batches_of, encode
from fairseq_ccpr.lab.accuracy.alignment_error import aligned_words
from fairseq_ccpr.phrases.alignment import SentencePair
from fairseq_ccpr.text.glossary import Glossary
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.text.words import word_spans

LETTERS, TIMES, SHARE = 4, range(2, 21), 0.5
TURN = 50  # sentences that one translates before the next does

Rows = list[tuple[str, str]]
Wanted = list[list[list[str]]]  # of each sentence and occurrence the variants that the reference has
Translate = Callable[[Rows, Wanted], list[str]]


def main() -> None:
    if len(sys.argv) < 4:
        sys.exit(__doc__.strip())
    model, pairs, training, *rest = sys.argv[1:]
    rows = list(islice(read_pairs(Path(pairs)), int(rest[0]) if rest else 300))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "terms.tsv"
        terms = drawn(rows, Path(training))
        path.write_text("".join(f"{source}\t{target}\n" for source, target in terms), encoding="utf-8")
        glossary = Glossary(path)
        wanted = [
            [here for _, _, variants in glossary.find(source) if (here := in_text(variants, reference))]
            for source, reference in rows
        ]
        print(f"{len(terms):,} terms, {sum(map(len, wanted)):,} occurrences in {len(rows):,} sentences")
        plain, helped = Translator(model, device="cpu"), Translator(model, glossary=path, device="cpu")
        signature = helped.signature
    systems: dict[str, Translate] = {
        "model alone": lambda some, _: [one.text for one in plain.translate([source for source, _ in some])],
        "--glossary": lambda some, _: [one.text for one in helped.translate([source for source, _ in some])],
        "--constraints, unordered": lambda some, of: constrained(plain, some, of),
    }
    texts: dict[str, list[str]] = {name: [] for name in systems}
    seconds = dict.fromkeys(systems, 0.0)
    for translate in systems.values():
        translate(rows[:1], wanted[:1])
    for first in range(0, len(rows), TURN):
        some = slice(first, first + TURN)
        for name, translate in systems.items():
            start = time.process_time()
            texts[name] += translate(rows[some], wanted[some])
            seconds[name] += time.process_time() - start
    table = [["", "terms in the output", "BLEU", "sentences per second"]]
    language = plain.task.cfg.target_lang
    table += [row(name, texts[name], rows, wanted, seconds[name], language) for name in systems]
    print(markdown_table(table))
    print(signature)


def drawn(rows: Rows, training: Path) -> Rows:
    own = [SentencePair(source, target, word_spans(source), word_spans(target)) for source, target in rows]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for pair, links in aligned_words(training, own):
        sources, targets = pair.words()[0], [pair.target[start:end] for start, end in pair.target_words]
        for one, two in links:
            if sources[one].isalpha() and len(sources[one]) >= LETTERS and targets[two].isalpha():
                counts[sources[one]][targets[two]] += 1
    terms = []
    for source, of in counts.items():
        target, times = of.most_common(1)[0]
        if of.total() in TIMES and times > SHARE * of.total():
            terms.append((source, target))
    return terms


def in_text(variants: list[str], text: str) -> list[str]:
    words = f" {' '.join(text[start:end] for start, end in word_spans(text))} "
    return [one for one in variants if f" {one} " in words]


def constrained(system: Translator, rows: Rows, wanted: Wanted) -> list[str]:
    """Translate with fairseq's constraints: of each occurrence the first variant that the reference has.

    Where fairseq fails on a batch, its sentences are translated one by one, and one that fails alone without constraints.
    """
    task: Any = system.task
    dictionary = task.target_dictionary
    generation = copy.deepcopy(system.cfg.generation)
    generation.constraints = "unordered"
    generator = task.build_base_generator(system.models, generation)
    terms = [
        [
            dictionary.encode_line(task.bpe.encode(one[0]), append_eos=False, add_if_not_exist=False).long()
            for one in of
        ]
        for of in wanted
    ]
    texts = [""] * len(rows)
    for sample in batches_of([encode(source, task) for source, _ in rows], system.cfg, task):
        places = sample["id"].tolist()
        with torch.no_grad():
            try:
                packed = pack_constraints([terms[place] for place in places])
                found = task.inference_step(generator, system.models, sample, constraints=packed)
            except AssertionError:
                # fairseq gives up where a sentence is at its greatest length and terms are still open.
                found = None
        if found is None and len(places) > 1:
            again = [constrained(system, [rows[place]], [wanted[place]])[0] for place in places]
        elif found is None:
            again = [one.text for one in system.translate([rows[places[0]][0]])]
        else:
            each = zip(places, sample["net_input"]["src_tokens"], found)
            again = [Translation.of(rows[at][0], tokens, of[:1], system).text for at, tokens, of in each]
        for place, text in zip(places, again):
            texts[place] = text
    return texts


def row(name: str, texts: list[str], rows: Rows, wanted: Wanted, seconds: float, language: str) -> list[str]:
    there = [bool(in_text(variants, text)) for text, of in zip(texts, wanted) for variants in of]
    bleu = score(texts, [reference for _, reference in rows], language).bleu
    return [name, f"{100 * sum(there) / len(there):.1f}%", f"{bleu:.2f}", f"{len(rows) / seconds:.1f}"]


if __name__ == "__main__":
    main()
