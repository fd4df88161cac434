"""A command of fairseq-ccpr: fairseq_ccpr/cli/__init__.py lists them all, `--help` explains this one."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fairseq_ccpr.cli import run_script

if __name__ == "__main__":
    run_script(__file__)
