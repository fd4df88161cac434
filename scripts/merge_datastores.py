"""Several datastores as one, or one without some of its texts: python scripts/merge_datastores.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_ccpr.cli.merge_datastores import main

if __name__ == "__main__":
    main()
