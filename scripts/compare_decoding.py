"""Measure what retrieval changes, in quality and speed: python scripts/compare_decoding.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_ccpr.cli.compare_decoding import main

if __name__ == "__main__":
    main()
