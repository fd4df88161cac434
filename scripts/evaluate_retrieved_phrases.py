"""What phrase datastores bring back for a text with references: python scripts/evaluate_retrieved_phrases.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_ccpr.cli.evaluate_retrieved_phrases import main

if __name__ == "__main__":
    main()
