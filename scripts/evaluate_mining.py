"""How well translations are found among sentences many of which have none: python scripts/evaluate_mining.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_ccpr.cli.evaluate_mining import main

if __name__ == "__main__":
    main()
