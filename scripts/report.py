"""The results of experiments as a page: python scripts/report.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_ccpr.cli.report import main

if __name__ == "__main__":
    main()
