"""Speed of decoding and of search with datastores of any size: python scripts/benchmark.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_ccpr.cli.benchmark import main

if __name__ == "__main__":
    main()
