"""See what a datastore holds, and whether it is whole: python scripts/inspect_datastore.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_ccpr.cli.inspect_datastore import main

if __name__ == "__main__":
    main()
