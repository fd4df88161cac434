"""An empty token datastore, to learn into where there is no text of the domain to build from."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from fairseq_ccpr.building.part import TOKENS, Part
from fairseq_ccpr.datastore.manifest import Manifest, ProjectionDescription, TokenSection
from fairseq_ccpr.datastore.token import PROJECTION, SYMBOLS, KeyProjection, TokenDatastore, array_shapes
from fairseq_ccpr.datastore.tuned import write_tuned
from fairseq_ccpr.decoding.retrieval_task import LANGUAGE_PAIR
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.key_layer import KeyCapture
from fairseq_ccpr.search import IndexDescription
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.arrays import save_array
from fairseq_ccpr.storage.files import MANIFEST, atomic_directory, write_text

# While little is learned, most neighbours are far even if the nearest is not: it alone decides, and only if it is near.
SETTINGS = {"k": 1, "lambda_": 1.0, "temperature": 0.05, "confidence": True, "lambda_max": 0.95, "min_similarity": 0.8}


def write_empty_store(
    models: list[Any], symbols: list[str], key_layer: str, languages: str | None, output: Path
) -> TokenSection:
    """Write an empty datastore, under its final name only when it is complete, or add tokens to a phrase-only one.

    Args:
        models: the one translation model; an ensemble is refused.
        symbols: the target vocabulary, by token id.
        key_layer: the decoder state that becomes the key, scaled to length 1.
        languages: "de-en", where the model knows several pairs.
    """
    if len(models) > 1:
        raise ConfigurationError(
            f"--path names an ensemble of {len(models)} models, and a datastore belongs to one model"
        )
    dimension = KeyCapture(models[0], key_layer).dimension
    section = TokenSection(
        size=0,
        dimension=dimension,
        key_layer=key_layer,
        subsets={},
        fingerprints={
            "model": fingerprint.of_parameters(models[0].named_parameters()),
            "target_dictionary": fingerprint.of_strings(symbols),
            "corpus": fingerprint.of_strings([]),
            **({LANGUAGE_PAIR: languages} if languages else {}),
        },
        index=IndexDescription("exact", "ip"),
        projection=ProjectionDescription(dimension, 0, pca=False, normalize_before_pca=False),
    )
    beside_phrases = (output / MANIFEST).exists() and Manifest.read(output).token is None
    with nullcontext(output) if beside_phrases else atomic_directory(output) as folder:
        part = Part(folder, TOKENS, show=False)
        rmtree(part.partial, ignore_errors=True)  # left by a run that was killed
        part.partial.mkdir()
        for name, (shape, dtype) in array_shapes(0, dimension).items():
            save_array(part.partial / f"{name}.npy", np.empty(shape, dtype))
        write_text(part.partial / SYMBOLS, "".join(f"{symbol}\n" for symbol in symbols))
        KeyProjection.scaling(dimension).save(part.partial / PROJECTION)
        part.publish(section)
        write_tuned({"token": TokenDatastore(folder)}, {"knn": SETTINGS}, "the settings of an empty datastore")
    return section
