"""Alignment error rate on gold alignments: python scripts/evaluate_alignments.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_ccpr.cli.evaluate_alignments import main

if __name__ == "__main__":
    main()
