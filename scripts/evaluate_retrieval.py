"""How often keys find the right token: python scripts/evaluate_retrieval.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_ccpr.cli.evaluate_retrieval import main

if __name__ == "__main__":
    main()
