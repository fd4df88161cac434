"""Rivals that build nothing: when a sentence comes, they read the pairs most like it. Tune-and-reset, SK-MT, subset kNN-MT.

python scripts/recipes/per_sentence.py MODEL TRAIN.tsv VALID.tsv TEST.tsv OUTPUT
    [--most N] [--datastore DATASTORE OPTION ...]

The pairs are those of TRAIN.tsv whose sources share most words with the sentence (Jaccard similarity).

Tune-and-reset trains the model on them for a moment, translates the sentence, and takes the training back. Adam makes a few
updates on all pairs together, without dropout. How many of both and which learning rate: what makes references of VALID.tsv
likeliest.

SK-MT (Dai et al., 2023) makes a datastore of 16 pairs, of which k = 2 neighbours at the squared distances d_1 and d_2 count:
p(y) is their softmax(-d / T), and lambda = max(0, 1 - d_1 / T). Published is T = 100; a second row has the T that makes
references of VALID.tsv likeliest.

Subset kNN-MT (Deguchi et al., 2023) searches the entries of 512 pairs, as published with k = 64, T = 100 and lambda = 0.5.
Here their states are computed when the sentence comes, where the paper has them in a datastore: its seconds do not count.

N sentences of TEST.tsv (300), evenly spaced, are translated singly: by the model alone, by these, and with a datastore and
options as tune prints them. Translations go to OUTPUT, and results.json: scores as of `evaluate systems --unlike TRAIN.tsv`,
p against the first, settings, and seconds of the processor.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr import Neighbours, TokenMemory, TokenRetrievalSettings, Translator
from fairseq_ccpr.cli.command import markdown_table
from fairseq_ccpr.decoding.token_memory import WeightPolicy, confidence_weight, name_of
from fairseq_ccpr.inference.system import encode, encode_with, length_limit
from fairseq_ccpr.lab.accuracy.significance import compare_systems
from fairseq_ccpr.lab.commands.evaluate import SAMPLES
from fairseq_ccpr.lab.commands.report import write_results
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.text.resemblance import NEAR, highest_resemblance, resemblances
from fairseq_ccpr.text.schemes import scheme_of

PAIRS, RATES, UPDATES = (4, 16), (1e-4, 3e-4), (1, 2, 4)  # what is tried on the validation text
TRIED = 20  # sentences of it
MOST, TEMPERATURES = 16, (25.0, 50.0, 100.0, 200.0, 400.0, 800.0)  # of SK-MT
PUBLISHED = TokenRetrievalSettings(k=2, temperature=100.0, confidence=False, likeness=0, guard=False)
TUNED, SK, SUBSET, SUBSET_PAIRS = "tune-and-reset", "SK-MT", "subset kNN-MT", 512
Pairs = list[tuple[str, str]]
System = tuple[
    Any, Callable[[Pairs], object] | None
]  # what translates, and how it reads the pairs like a sentence


class Rival:
    """Reads pairs with a translator's model, which is one model in fp32."""

    def __init__(self, translator: Translator) -> None:
        (self.model,) = translator.models
        self.task: Any = translator.task
        self.pad = self.task.target_dictionary.pad()

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


class Tuning(Rival):
    """Trains the model in place, and puts it back."""

    def __init__(self, translator: Translator) -> None:
        super().__init__(translator)
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

    def cost(self, batch: dict[str, Any]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):  # as the fine-tuning that it is compared with
            logits, targets = self.model(**batch["net_input"])[0].float(), batch["target"]
        return torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), targets, ignore_index=self.pad, reduction="sum"
        )

    def choose(self, valid: Pairs, near: list[Pairs]) -> dict[str, Any]:
        """Find the settings that make the targets of pairs likeliest; prints a table of all."""
        costs, alone, tokens = defaultdict[tuple[int, float, int], float](float), 0.0, 0
        for row, like in zip(valid, near):
            self.reset()
            if (reference := self.batch([row])) is None:
                continue
            alone, tokens = alone + self.cost(reference).item(), tokens + reference["ntokens"]
            for pairs, rate in product(PAIRS, RATES):
                for number in self.updates(like[:pairs], rate, max(UPDATES)):
                    if number in UPDATES:
                        costs[pairs, rate, number] += self.cost(reference).item()
        gains = {setting: f"{(alone - cost) / tokens:+.3f}" for setting, cost in costs.items()}
        table = [["pairs", "learning rate", *(f"updates: {count}" for count in UPDATES)]]
        table += [
            [str(p), f"{rate:g}", *(gains[p, rate, n] for n in UPDATES)] for p, rate in product(PAIRS, RATES)
        ]
        print(f"nats gained per token of {len(valid):,} validation sentences\n\n{markdown_table(table)}\n")
        best = min(costs, key=costs.__getitem__)
        return dict(zip(("pairs", "rate", "updates"), best))


def by_first_distance(scores: Tensor, values: Tensor, model: Any, settings: Any) -> Tensor:
    """Weigh by max(0, 1 - d_1 / T), fp32 [N]; scores are minus squared distances."""
    return (1 + scores[:, 0] / settings.temperature).clamp_min(0)


class SkMt(Rival):
    """Translates with a datastore of a few pairs, which it searches itself: a retriever of fairseq_ccpr.

    With a weight of its own, and other settings than those of SK-MT, it is subset kNN-MT.
    """

    def __init__(
        self,
        translator: Translator,
        weight: WeightPolicy = by_first_distance,
        most: int = MOST,
        **settings: Any,
    ) -> None:
        super().__init__(translator)
        self.most = most  # pairs
        chosen = replace(PUBLISHED, **settings)
        self.system = translator.begin(f"{name_of(weight)} {chosen.temperature:g}")  # an empty datastore
        tokens = self.system.find_memory(TokenMemory)
        assert tokens is not None  # of that datastore
        self.datastore = tokens.retriever.datastore
        self.memory = replace(tokens, retriever=self, settings=chosen, policy=weight, learned=None)
        self.system.ensemble = self.system.task.join(self.system.models, [self.memory])
        self.keys, self.values = torch.empty(0), torch.empty(0, dtype=torch.int64)

    @torch.no_grad()
    def read(self, pairs: Pairs) -> None:
        """Keep the decoder's states of pairs, and their tokens."""
        if (batch := self.batch(pairs[: self.most])) is None:
            self.values = self.values[:0]
            return
        real = batch["target"].ne(self.pad)
        self.keys = self.memory.capture.force_decode(batch["net_input"])[real].float()
        self.values = batch["target"][real]

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Find the nearest entries, as many as there are."""
        found, count = Neighbours.missing(queries, k), min(k, len(self.values))
        if count:
            distances, ids = torch.cdist(queries.float(), self.keys).square().topk(count, largest=False)
            found.ids[:, :count] = ids
            found.scores[:, :count] = -distances
            found.values[:, :count] = self.values[ids]
        return found

    def describe(self) -> dict[str, object]:
        return {"retriever": SK}

    @torch.no_grad()
    def choose(self, valid: Pairs, near: list[Pairs]) -> float:
        """Find the temperature that makes the targets of pairs likeliest; prints a table of all."""
        gains, tokens = dict.fromkeys(TEMPERATURES, 0.0), 0
        for row, like in zip(valid, near):
            self.read(like)
            if (reference := self.batch([row])) is None:
                continue
            assert self.system.ensemble is not None
            text = self.system.ensemble.force_decode(reference)
            tokens += len(text.targets)
            for temperature in TEMPERATURES:
                vote = text.records[TokenMemory.name].vote(
                    self.memory.changed(temperature=temperature), False
                )
                gains[temperature] += (text.mixed([vote]) - text.log_probs).sum().item()
        table = [["T", *(f"{one:g}" for one in gains)]]
        print(markdown_table([*table, ["nats", *(f"{gain / tokens:+.3f}" for gain in gains.values())]]), "\n")
        return max(gains, key=gains.__getitem__)


def nearest(sentences: list[str], pairs: Pairs, count: int) -> list[Pairs]:
    found: list[Pairs] = [[] for _ in sentences]
    for first, block in resemblances(sentences, [source for source, _ in pairs]):
        for row, similar in enumerate(block.tocsr(), first):
            best = np.lexsort((similar.indices, -similar.data))[:count]
            found[row] = [pairs[number] for number in similar.indices[best].tolist()]
    return found


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
    alone, trained = (Translator(options.model, device="cpu") for _ in range(2))
    systems: dict[str, System] = {}
    if options.datastore:
        words += ["--path", str(options.model), "--datastore", str(options.datastore), "--cpu", "--beam", "5"]
        systems["datastore"] = Translator.of(words), None
    systems["alone"] = alone, None
    like_valid = nearest([source for source, _ in valid], train, MOST)
    tuning, published = Tuning(trained), SkMt(alone)
    chosen, temperature = tuning.choose(valid, like_valid), published.choose(valid, like_valid)

    def train_on(like: Pairs) -> None:
        list(tuning.updates(like[: chosen["pairs"]], chosen["rate"], chosen["updates"]))

    systems[TUNED] = trained, train_on
    few = {SK: published}
    if temperature != PUBLISHED.temperature:
        few[f"{SK}, T chosen"] = SkMt(alone, temperature=temperature)
    few[SUBSET] = SkMt(alone, confidence_weight, SUBSET_PAIRS, k=64, lambda_=0.5)
    systems |= {name: (rival.system, rival.read) for name, rival in few.items()}
    sources, references = ([row[side] for row in test] for side in (0, 1))
    texts, seconds = translated(systems, sources, train)
    options.output.mkdir(parents=True, exist_ok=True)
    for name, lines in {"source": sources, "reference": references, **texts}.items():
        (options.output / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    results = compared(texts, references, [target for _, target in train])
    for row in results["rows"]:
        row["seconds"] = round(seconds[row["system"]] / len(test), 3)
    results |= {
        "sentences": len(test),
        "settings": {TUNED: chosen, "T chosen": temperature}
        | {name: asdict(one.memory.settings) for name, one in few.items()},
        "signature": systems["datastore"][0].signature if options.datastore else None,
    }
    write_results(options.output / "results.json", results)
    shown = ("system", "BLEU", "chrF", "seconds")
    table = [list(shown), *([row[name] for name in shown] for row in results["rows"])]
    print(f"{TUNED}: {chosen}; T chosen: {temperature:g}\n\n{markdown_table(table)}")


def translated(
    systems: dict[str, System], sources: list[str], train: Pairs
) -> tuple[dict[str, list[str]], dict[str, float]]:
    """Translate sentences one by one with each system; returns the translations, and seconds of the processor."""
    start = time.process_time()
    near = nearest(sources, train, SUBSET_PAIRS)
    searched = time.process_time() - start
    seconds = {name: searched if read else 0.0 for name, (_, read) in systems.items()}
    texts: dict[str, list[str]] = {name: [] for name in systems}
    for source, like in zip(sources, near):
        for name, (system, read) in systems.items():
            start = time.process_time()
            if read:
                read(like)
            texts[name] += [one.text for one in system.translate([source])]
            seconds[name] += time.process_time() - start
    return texts, seconds


def compared(texts: dict[str, list[str]], references: list[str], train: list[str]) -> dict[str, Any]:
    """Score translations, of all sentences and of those without near-duplicates in a text."""
    rest = np.flatnonzero(highest_resemblance(references, train) < NEAR).tolist()
    some = {name: [lines[i] for i in rest] for name, lines in texts.items()}
    apart = compare_systems(some, [[references[i] for i in rest]], SAMPLES)
    unlike = {"below": NEAR, "sentences": len(rest), "rows": apart.rows}
    return {**asdict(compare_systems(texts, [references], SAMPLES)), "unlike": unlike}


if __name__ == "__main__":
    main()
