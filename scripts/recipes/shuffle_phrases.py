"""A control for phrase datastores: the same phrases and the same keys, but each key with another phrase.

python scripts/recipes/shuffle_phrases.py DATASTORE OUTPUT

What decoding gains with OUTPUT it gains without the meaning of what was retrieved.
"""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.datastore.phrase import KEYS, OFFSETS, PHRASE, SENTENCES, SPANS, PhraseDatastore
from fairseq_ccpr.storage.files import describe_files


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__.strip())
    source, output = map(Path, sys.argv[1:])
    store = PhraseDatastore(source)
    partial = output.with_name(output.name + ".partial")
    (partial / PHRASE).mkdir(parents=True)
    np.save(partial / PHRASE / f"{SPANS}.npy", store.spans[np.random.default_rng(0).permutation(store.section.size)])
    kept = [f"{KEYS}.npy", f"{OFFSETS}.npy", SENTENCES]
    kept += [store.section.index.file] if store.section.index.file else []
    for name in kept:
        shutil.copy(source / PHRASE / name, partial / PHRASE / name)
    files = describe_files(partial, [f"{PHRASE}/{name}" for name in [*kept, f"{SPANS}.npy"]])
    Manifest(phrase=replace(store.section, files=files)).write(partial)
    partial.replace(output)


if __name__ == "__main__":
    main()
