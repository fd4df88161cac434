"""Build a datastore from a corpus: python scripts/build_datastore.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_ccpr.cli.build_datastore import main

if __name__ == "__main__":
    main()
