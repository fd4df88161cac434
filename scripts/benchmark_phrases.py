"""Speed and size of phrase datastores: python scripts/benchmark_phrases.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_ccpr.cli.benchmark_phrases import main

if __name__ == "__main__":
    main()
