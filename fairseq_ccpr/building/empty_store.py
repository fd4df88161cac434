"""An empty token datastore, to learn into where there is no text of the domain to build from."""

from __future__ import annotations

from dataclasses import dataclass
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
from fairseq_ccpr.models.key_layer import KEY_LAYERS, KeyCapture
from fairseq_ccpr.search import IndexDescription
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.arrays import save_array
from fairseq_ccpr.storage.files import MANIFEST, atomic_directory, write_text

# While little is learned, most neighbours are far even if the nearest is not: it alone decides, and only if it is near.
SETTINGS = {"k": 1, "lambda_": 1.0, "temperature": 0.05, "confidence": True, "lambda_max": 0.95, "min_similarity": 0.8}


@dataclass(frozen=True)
class EmptyStore:
    """What an empty datastore is for.

    Args:
        model: the one translation model.
        symbols: the target vocabulary, by token id.
        key_layer: the decoder state that becomes the key, scaled to length 1.
        languages: "de-en", where the model knows several pairs.
    """

    model: Any
    symbols: list[str]
    key_layer: str = KEY_LAYERS[0]
    languages: str | None = None

    def write(self, output: Path) -> TokenSection:
        """Write the datastore, under its final name only when it is complete, or add its tokens to a phrase-only one.

        Raises:
            ConfigurationError: `output` exists and has tokens, or the model has no such layer.
        """
        dimension = KeyCapture(self.model, self.key_layer).dimension
        section = TokenSection(
            size=0,
            dimension=dimension,
            key_layer=self.key_layer,
            subsets={},
            fingerprints={
                "model": fingerprint.of_parameters(self.model.named_parameters()),
                "target_dictionary": fingerprint.of_strings(self.symbols),
                "corpus": fingerprint.of_strings([]),
                **({LANGUAGE_PAIR: self.languages} if self.languages else {}),
            },
            index=IndexDescription("exact", "ip"),
            projection=ProjectionDescription(dimension, 0, pca=False, normalize_before_pca=False),
        )
        if (output / MANIFEST).exists() and Manifest.read(output).token is None:
            self._fill(output, section)
        else:
            with atomic_directory(output) as folder:
                self._fill(folder, section)
        return section

    def _fill(self, folder: Path, section: TokenSection) -> None:
        """Write the token part."""
        part = Part(folder, TOKENS, show=False)
        rmtree(part.partial, ignore_errors=True)  # left by a run that was killed
        part.partial.mkdir()
        for name, (shape, dtype) in array_shapes(0, section.dimension).items():
            save_array(part.partial / f"{name}.npy", np.empty(shape, dtype))
        write_text(part.partial / SYMBOLS, "".join(f"{symbol}\n" for symbol in self.symbols))
        KeyProjection.scaling(section.dimension).save(part.partial / PROJECTION)
        part.publish(section)
        write_tuned({"token": TokenDatastore(folder)}, {"knn": SETTINGS}, "the settings of an empty datastore")


def one_model(models: list[Any]) -> Any:
    """Return the model of a datastore, which belongs to one.

    Raises:
        ConfigurationError: there are several.
    """
    if len(models) > 1:
        raise ConfigurationError(
            f"--path names an ensemble of {len(models)} models, and a datastore belongs to one model"
        )
    return models[0]
