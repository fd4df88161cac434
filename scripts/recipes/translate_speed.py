"""Tokens per second of fairseq-ccpr translate, with each system, beside fairseq-generate as it is installed.

python scripts/recipes/translate_speed.py DATA_BIN MODEL TEXT.tsv OUT.json --systems tokens=DIR text=DIR both=DIR:DIR

TEXT.tsv holds pairs of the test set: source, tab, reference. fairseq translates DATA_BIN's test subset, the same sentences,
with its own task, generator and fp32. Every system takes its turn in each repeat, and each figure is the median over the
repeats of its ratio to fairseq in the same one. Seconds are of the clock: fairseq's are those of its generator alone, as
fairseq-generate reports them, ours are those of `translate`, text included. `alone` is the model without a
datastore, `alone fp32` the same in fairseq's precision; a second column compares with `alone`, which is made fast in the
same way. Loads: batches of --max-tokens source subwords, and --single sentences one at a time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from fairseq import checkpoint_utils, options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from fairseq_ccpr.cli.command import markdown_table
from fairseq_ccpr.evaluation.test_set import score
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.lab.commands.report import write_results
from fairseq_ccpr.text.pairs import read_pairs

FAIRSEQ, ALONE, ALONE_FP32 = "fairseq", "alone", "alone fp32"
ONE = "one sentence"


@dataclass
class Row:
    """One system on one load."""

    load: str
    system: str
    tokens_per_second: float
    speed: float  # in proportion to fairseq's
    speed_alone: float  # in proportion to the model alone, made fast in the same way
    bleu: float  # of the sentences of the load
    signature: str


class Fairseq:
    """fairseq-generate, without its printing."""

    def __init__(self, words: Sequence[str]) -> None:
        parsed = options.parse_args_and_arch(options.get_generation_parser(), list(words))
        self.cfg = convert_namespace_to_omegaconf(parsed)
        self.task = tasks.setup_task(self.cfg.task)
        self.task.load_dataset("test")
        self.models, _ = checkpoint_utils.load_model_ensemble([self.cfg.common_eval.path], task=self.task)
        for model in self.models:
            model.prepare_for_inference_(self.cfg)
        self.generator = self.task.build_generator(self.models, self.cfg.generation)

    def translate(
        self, count: int, max_tokens: int | None, to_text: Callable[..., str]
    ) -> tuple[float, int, list[str]]:
        """Return the seconds of generating, the tokens and the translations of the first sentences."""
        dataset = self.task.dataset("test")
        order = [int(i) for i in dataset.ordered_indices() if i < count]
        made = dataset.batch_by_size(order, max_tokens=max_tokens, max_sentences=None if max_tokens else 1)
        seconds, tokens, texts = 0.0, 0, [""] * count
        for batch in made:
            sample = dataset.collater([dataset[i] for i in batch])
            begin = time.perf_counter()
            found = self.task.inference_step(self.generator, self.models, sample)
            seconds += time.perf_counter() - begin
            for i, each in zip(sample["id"].tolist(), found):
                tokens += len(each[0]["tokens"])
                texts[i] = to_text(self.task.target_dictionary, each[0]["tokens"])
        return seconds, tokens, texts


def translate(system: System, sources: Sequence[str], max_tokens: int | None) -> tuple[float, int, list[str]]:
    """Return the seconds, the tokens and the translations of sentences: in batches, or one at a time."""
    system.cfg.dataset.max_tokens = max_tokens or system.cfg.dataset.max_tokens
    begin = time.perf_counter()
    groups: Iterable[Sequence[str]] = [sources] if max_tokens else ([one] for one in sources)
    found = [one for group in groups for one in system.translate(group)]
    seconds = time.perf_counter() - begin
    return seconds, sum(len(one.tokens) + 1 for one in found), [one.text for one in found]


def in_turns(
    runs: Mapping[str, Callable[[], tuple[float, int, list[str]]]], repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[str]]]:
    """Time systems in turns, after once to warm up; returns tokens per second of each repeat, and translations."""
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    texts: dict[str, list[str]] = {}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            seconds, tokens, texts[name] = run()
            if repeat:
                speeds[name].append(tokens / seconds)
    return speeds, texts


def main() -> None:
    """Measure, print the table, and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data_bin")
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--systems", nargs="+", default=[], metavar="NAME=DATASTORE")
    parser.add_argument("--sentences", type=int, default=600)
    parser.add_argument("--single", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, nargs="*", default=[800, 4000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--beam", default="5")
    given = parser.parse_args()
    pairs = list(read_pairs(given.text))[: given.sentences]
    sources, references = [one for one, _ in pairs], [one for _, one in pairs]
    common = ["--path", given.model, "--beam", given.beam]
    known: dict[str, System] = {
        ALONE_FP32: System.of([*common, "--precision", "fp32"], Path(given.data_bin)),
        ALONE: System.of(common, Path(given.data_bin)),
    }
    for word in given.systems:
        name, _, datastore = word.partition("=")
        known[name] = System.of([*common, "--datastore", datastore])
    task = known[ALONE].cfg.task
    fairseq = Fairseq([given.data_bin, *common, "-s", task.source_lang, "-t", task.target_lang, "--cpu"])
    rows: list[Row] = []
    for load in [*given.max_tokens, None]:
        count = len(sources) if load else min(given.single, len(sources))
        runs: dict[str, Callable[[], tuple[float, int, list[str]]]] = {
            FAIRSEQ: partial(fairseq.translate, count, load, known[ALONE].to_text)
        }
        for name, system in known.items():
            runs[name] = partial(translate, system, sources[:count], load)
        speeds, texts = in_turns(runs, given.repeats)
        for name, each in speeds.items():
            ratio, ratio_alone = (
                statistics.median(a / b for a, b in zip(each, speeds[base])) for base in (FAIRSEQ, ALONE)
            )
            label = f"{load} tokens" if load else ONE
            bleu = score(texts[name], references[:count]).bleu
            made = known.get(name)
            signature = (made.signature or f"precision:{made.task.precision}") if made is not None else ""
            rows.append(Row(label, name, statistics.median(each), ratio, ratio_alone, bleu, signature))
            print(rows[-1], file=sys.stderr, flush=True)
    table = [["load", "system", "tokens/s", "fairseq = 100%", "alone = 100%", "BLEU"]]
    for row in rows:
        percent = (f"{row.speed:.0%}", f"{row.speed_alone:.0%}")
        table.append([row.load, row.system, f"{row.tokens_per_second:.0f}", *percent, f"{row.bleu:.2f}"])
    print(markdown_table(table))
    write_results(given.output, {"repeats": given.repeats, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
