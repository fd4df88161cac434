"""Choose k, lambda and T on a held-out subset: python scripts/tune_retrieval.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_ccpr.cli.tune_retrieval import main

if __name__ == "__main__":
    main()
