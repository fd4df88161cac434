"""`fairseq-ccpr compare`: what retrieval changes, in quality and in speed, measured in one run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fairseq_ccpr.cli.command import command, markdown_table
from fairseq_ccpr.common_options import data_bin_option
from fairseq_ccpr.evaluation.translation.comparison import BASE, RETRIEVAL, Comparison, compare_decoding
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.storage.files import write_json, write_text

HELP = """\
Decode a subset with the base model and with retrieval, in turns. Print BLEU, chrF and speed of both, and three
sentences that retrieval improved. All options are those of fairseq-generate --task translation_retrieval:
--knn-k, --knn-lambda, --knn-temperature, --gen-subset, --beam, --max-tokens, --bpe and so on. With
--results-path DIR it writes base.txt, retrieval.txt, source.txt, reference.txt and comparison.json there once both
are decoded. Without --datastore the base model decodes alone.
"""


def as_markdown(comparison: Comparison) -> str:
    """Return the table, the signatures, and the sentences."""
    rows = comparison.rows()
    table = [["system", "BLEU", "chrF", "seconds", "tokens/s", "speed"]]
    for row in rows:
        numbers = [f"{row['bleu']:.2f}", f"{row['chrf']:.2f}", f"{row['seconds']:.1f}", f"{row['tokens_per_second']}"]
        table.append([row["system"], *numbers, f"{row['speed']:.0%}"])
    lines = [markdown_table(table), "", f"{len(comparison.decodings.references):,} sentences"]
    lines += [f"BLEU {rows[0]['bleu_signature']}", f"chrF {rows[0]['chrf_signature']}"]
    if comparison.retrieval_signature is None:
        return "\n".join(lines)
    lines += [f"retrieval {comparison.retrieval_signature}"]
    lines += ["", "The three sentences that retrieval brought nearest to their references, by chrF gained:"]
    for i in comparison.examples(3):
        lines += ["", f"source     {comparison.decodings.sources[i]}"]
        lines += [f"{name:10} {comparison.decodings.systems[name].hypotheses[i]}" for name in (BASE, RETRIEVAL)]
        lines += [f"reference  {comparison.decodings.references[i]}"]
    return "\n".join(lines)


def write_results(comparison: Comparison, folder: Path) -> None:
    """Texts one sentence per line in the order of the corpus, and the numbers as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"source": comparison.decodings.sources, "reference": comparison.decodings.references}
    texts |= {name: system.hypotheses for name, system in comparison.decodings.systems.items()}
    for name, sentences in texts.items():
        write_text(folder / f"{name}.txt", "".join(f"{sentences[i]}\n" for i in sorted(sentences)))
    results = {"retrieval_signature": comparison.retrieval_signature, "rows": comparison.rows()}
    write_json(folder / "comparison.json", results)


@dataclass
class Options:
    """The command's own option."""

    data_bin: Path = data_bin_option()


def compare(options: Options, rest: list[str]) -> int:
    """Compare and print."""
    system = System.of(rest, options.data_bin)
    comparison = compare_decoding(system)
    print(as_markdown(comparison))
    results_path = system.cfg.common_eval.results_path
    if results_path is not None:
        write_results(comparison, Path(results_path))
    return 0


main = command(HELP, compare, Options, rest=True)
