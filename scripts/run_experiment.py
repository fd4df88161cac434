"""A domain-adaptation experiment from a file of its settings: python scripts/run_experiment.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_ccpr.cli.run_experiment import main

if __name__ == "__main__":
    main()
