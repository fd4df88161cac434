"""How often a phrase finds its translation: python scripts/evaluate_phrases.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_ccpr.cli.evaluate_phrases import main

if __name__ == "__main__":
    main()
