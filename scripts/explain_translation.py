"""A page that shows where each token of translations came from: python scripts/explain_translation.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_ccpr.cli.explain_translation import main

if __name__ == "__main__":
    main()
