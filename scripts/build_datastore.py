"""Build a datastore from a checkout that is not installed: `tokens ...` is `fairseq-ccpr build tokens ...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_ccpr.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "build")
    main()
