"""A control for phrase datastores: the same phrases and the same keys, but each key with another phrase.

python scripts/recipes/shuffle_phrases.py DATASTORE OUTPUT

What decoding gains with OUTPUT it gains without the meaning of what was retrieved.
"""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from fairseq_ccpr.building.part import Part
from fairseq_ccpr.cli.command import run
from fairseq_ccpr.datastore.manifest import PhraseSection
from fairseq_ccpr.datastore.parts import SPANS, STRING_HASHES
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.storage.arrays import save_array
from fairseq_ccpr.storage.files import atomic_directory


def shuffle_phrases(source: Path, output: Path) -> int:
    store = PhraseDatastore(source)
    order = np.random.default_rng(0).permutation(len(store.keys))  # which are in a folder
    with atomic_directory(output) as folder:
        part = Part(folder, PhraseSection, show=False)
        part.partial.mkdir()
        for name in store.section.names:
            shutil.copy(store.folder / name, part.partial / name)
        save_array(part.partial / f"{SPANS}.npy", store.spans[order])
        if (hashes := part.partial / f"{STRING_HASHES}.npy").exists():
            save_array(hashes, store.string_hashes(np.arange(store.section.size))[order])
        part.publish(replace(store.section, ancestors=[]))
    return 0


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__.strip())
    run("shuffle_phrases.py", lambda: shuffle_phrases(*map(Path, sys.argv[1:])))


if __name__ == "__main__":
    main()
