"""How near translations are to their references in meaning: the mean cosine of both by sentence encoders.

python scripts/recipes/reference_cosine.py OUTPUT.json DECODED_DOMAIN ... [--encoder e5 muse] [--systems NAME ...]

DECODED_DOMAIN is a folder of an experiment's output, such as office.experiment/decoded/office, with a folder for each system.
Encoders are named as for `mine`. p is of paired resampling (1,000 samples, seed 12345), of each system against those before
it: how often the difference has the other sign, doubled. Encoders notice a wrong or missing word, and hardly bad grammar.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairseq_ccpr.cli.command import markdown_table
from fairseq_ccpr.lab.commands.report import write_results
from fairseq_ccpr.lab.sentence_encoders import load_sentence_encoder
from fairseq_ccpr.text.pairs import read_lines

SAMPLES, SEED = 1000, 12345


def p_value(differences: np.ndarray) -> float:
    """Return the two-sided p of a mean difference, fp64 [n]."""
    drawn = np.random.default_rng(SEED).integers(len(differences), size=(SAMPLES, len(differences)))
    means = differences[drawn].mean(axis=1)
    return float(min(1.0, 2 * (1 + min((means <= 0).sum(), (means >= 0).sum())) / (SAMPLES + 1)))


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("domains", type=Path, nargs="+")
    parser.add_argument("--encoder", nargs="+", default=["e5", "muse"])
    parser.add_argument("--systems", nargs="+")
    options = parser.parse_args()
    encoders = {name: load_sentence_encoder(name, torch.device("cpu")) for name in options.encoder}
    domains: dict[str, Any] = {}
    for folder in options.domains:
        names = options.systems or sorted(path.name for path in folder.iterdir())
        texts = {name: list(read_lines(written(folder / name))) for name in names if (folder / name).is_dir()}
        references = list(read_lines(folder / next(iter(texts)) / "reference.txt"))
        rows: dict[str, Any] = {name: {} for name in texts}
        for encoder, of in encoders.items():
            every = sorted({*references, *(line for lines in texts.values() for line in lines)})
            vectors = dict(zip(every, of.encode(every)))
            right = np.stack([vectors[line] for line in references])
            cosines = {
                name: (np.stack([vectors[line] for line in lines]) * right).sum(axis=1)
                for name, lines in texts.items()
            }
            for at, name in enumerate(texts):
                p = {one: p_value(cosines[name] - cosines[one]) for one in list(texts)[:at]}
                rows[name][encoder] = {"cosine": float(cosines[name].mean()), "p": p}
        domains[folder.name] = {"sentences": len(references), "systems": rows}
        table = [[folder.name, *encoders]]
        print(
            markdown_table(
                [
                    *table,
                    *([name, *(f"{row[e]['cosine']:.4f}" for e in encoders)] for name, row in rows.items()),
                ]
            ),
            "\n",
        )
    prints = {name: of.fingerprint for name, of in encoders.items()}
    write_results(options.output, {"domains": domains, "encoders": prints})


def written(folder: Path) -> Path:
    """Return the file with a system's translations: the model alone has no datastore."""
    return next(path for name in ("retrieval", "base") if (path := folder / f"{name}.txt").is_file())


if __name__ == "__main__":
    main()
