"""Which phrases translate those of a text: python scripts/retrieve_phrases.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_ccpr.cli.retrieve_phrases import main

if __name__ == "__main__":
    main()
