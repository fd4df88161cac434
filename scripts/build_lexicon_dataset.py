"""Phrase pairs with example sentences: python scripts/build_lexicon_dataset.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_ccpr.cli.build_lexicon_dataset import main

if __name__ == "__main__":
    main()
