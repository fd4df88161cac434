"""Tune-and-reset: train the model for a moment on the pairs most like a sentence, translate it, and take the training back.

python scripts/recipes/tune_and_reset.py MODEL TRAIN.tsv VALID.tsv TEST.tsv OUTPUT
    [--most N] [--datastore DATASTORE OPTION ...]

The pairs are those of TRAIN.tsv whose sources share most words with the sentence (Jaccard similarity). Adam makes a few
updates on all of them together, without dropout. How many of both and which learning rate: what makes references of VALID.tsv
likeliest. Then N sentences of TEST.tsv (300), evenly spaced, are translated one by one by the model alone, by tune-and-reset
and with a datastore, with options as tune prints them. Translations go to OUTPUT. Seconds are the processor's.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairseq_ccpr import Translator
from fairseq_ccpr.cli.command import markdown_table
from fairseq_ccpr.evaluation.test_set import score
from fairseq_ccpr.inference.system import encode, encode_with, length_limit
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.text.resemblance import resemblances
from fairseq_ccpr.text.schemes import scheme_of

PAIRS, RATES, UPDATES = (4, 16), (1e-4, 3e-4), (1, 2, 4)  # what is tried on the validation text
TRIED = 20  # sentences of it
TUNED = "tune-and-reset"
Pairs = list[tuple[str, str]]


class Tuning:
    """Trains the model of a translator, which is one model in fp32, in place, and puts it back."""

    def __init__(self, translator: Translator) -> None:
        (self.model,) = translator.models
        self.task: Any = translator.task
        self.pad = self.task.target_dictionary.pad()
        self._were = [each.detach().clone() for each in self.model.parameters()]

    @torch.no_grad()
    def reset(self) -> None:
        for now, was in zip(self.model.parameters(), self._were):
            now.copy_(was)

    def updates(self, pairs: Pairs, rate: float, count: int) -> Iterator[int]:
        """Train from the original weights on; yields the number of updates after each of them."""
        self.reset()
        batch = self.batch(pairs)
        optimizer = torch.optim.Adam(self.model.parameters(), rate, betas=(0.9, 0.98))
        for number in range(1, count + 1):
            if batch is not None:
                optimizer.zero_grad()
                (self.cost(batch) / batch["ntokens"]).backward()
                optimizer.step()
            yield number

    def batch(self, pairs: Pairs) -> dict[str, Any] | None:
        """Make one batch of the pairs that are no longer than the model takes; None without any."""
        steps, most = (
            (self.task.tokenizer, scheme_of(self.task.bpe).target.bpe),
            length_limit(self.task, [self.model]),
        )
        coded = [
            (encode(one, self.task), encode_with(two, steps, self.task.target_dictionary))
            for one, two in pairs
        ]
        coded = [both for both in coded if max(map(len, both)) <= most]
        data = self.task.pair_dataset(*map(list, zip(*coded))) if coded else None
        return data and data.collater([data[number] for number in range(len(coded))])

    def cost(self, batch: dict[str, Any]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):  # as the fine-tuning that it is compared with
            logits, targets = self.model(**batch["net_input"])[0].float(), batch["target"]
        return torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), targets, ignore_index=self.pad, reduction="sum"
        )


def nearest(sentences: list[str], pairs: Pairs, count: int) -> list[Pairs]:
    found: list[Pairs] = [[] for _ in sentences]
    for first, block in resemblances(sentences, [source for source, _ in pairs]):
        for row, similar in enumerate(block.tocsr(), first):
            best = np.lexsort((similar.indices, -similar.data))[:count]
            found[row] = [pairs[number] for number in similar.indices[best].tolist()]
    return found


def choose(tuning: Tuning, valid: Pairs, train: Pairs) -> tuple[int, float, int]:
    costs, alone, tokens = defaultdict[tuple[int, float, int], float](float), 0.0, 0
    for row, like in zip(valid, nearest([source for source, _ in valid], train, max(PAIRS))):
        tuning.reset()
        if (reference := tuning.batch([row])) is None:
            continue
        alone, tokens = alone + tuning.cost(reference).item(), tokens + reference["ntokens"]
        for pairs, rate in product(PAIRS, RATES):
            for number in tuning.updates(like[:pairs], rate, max(UPDATES)):
                if number in UPDATES:
                    costs[pairs, rate, number] += tuning.cost(reference).item()
    gains = {setting: f"{(alone - cost) / tokens:+.3f}" for setting, cost in costs.items()}
    table = [["pairs", "learning rate", *(f"updates: {count}" for count in UPDATES)]]
    table += [
        [str(p), f"{rate:g}", *(gains[p, rate, n] for n in UPDATES)] for p, rate in product(PAIRS, RATES)
    ]
    print(f"nats gained per token of {len(valid):,} validation sentences\n\n{markdown_table(table)}\n")
    return min(costs, key=costs.__getitem__)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("model", "train", "valid", "test", "output", "--datastore"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--most", type=int, default=300)
    options, words = parser.parse_known_args()
    train, valid, test = (list(read_pairs(path)) for path in (options.train, options.valid, options.test))
    valid, test = (
        rows[:: max(1, len(rows) // most)][:most] for rows, most in ((valid, TRIED), (test, options.most))
    )
    systems = {name: Translator(options.model, device="cpu") for name in ("alone", TUNED)}
    if options.datastore:
        words += ["--path", str(options.model), "--datastore", str(options.datastore), "--cpu", "--beam", "5"]
        systems["datastore"] = Translator.of(words)
        print(systems["datastore"].signature)
    tuning = Tuning(systems[TUNED])
    pairs, rate, updates = choose(tuning, valid, train)
    sources, references = ([row[side] for row in test] for side in (0, 1))
    start = time.process_time()
    near = nearest(sources, train, pairs)
    seconds = dict.fromkeys(systems, 0.0) | {TUNED: time.process_time() - start}
    texts: dict[str, list[str]] = {name: [] for name in systems}
    for source, like in zip(sources, near):
        for name, system in systems.items():
            start = time.process_time()
            if name == TUNED:
                list(tuning.updates(like, rate, updates))
            texts[name] += [one.text for one in system.translate([source])]
            seconds[name] += time.process_time() - start
    table = [[f"{len(test):,} sentences", "BLEU", "chrF", "seconds per sentence"]]
    language = systems["alone"].task.cfg.target_lang
    for name, of in ((name, score(lines, references, language)) for name, lines in texts.items()):
        table.append([name, f"{of.bleu:.2f}", f"{of.chrf:.2f}", f"{seconds[name] / len(test):.3f}"])
    print(f"{pairs} pairs, learning rate {rate:g}, updates: {updates}\n\n{markdown_table(table)}")
    options.output.mkdir(parents=True, exist_ok=True)
    for name, lines in {"source": sources, "reference": references, **texts}.items():
        (options.output / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
