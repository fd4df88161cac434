"""Make a DATA_BIN from sentence pairs: python scripts/prepare_data.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_ccpr.cli.prepare_data import main

if __name__ == "__main__":
    main()
