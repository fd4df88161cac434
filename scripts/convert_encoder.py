"""A pretrained encoder for phrases: python scripts/convert_encoder.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_ccpr.cli.convert_encoder import main

if __name__ == "__main__":
    main()
