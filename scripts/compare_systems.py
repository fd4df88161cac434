"""Several translations of a test set against one another: python scripts/compare_systems.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_ccpr.cli.compare_systems import main

if __name__ == "__main__":
    main()
