"""Sentence pairs out of two texts that were not aligned: python scripts/mine_bitext.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_ccpr.cli.mine_bitext import main

if __name__ == "__main__":
    main()
