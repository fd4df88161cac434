"""XPR's training: phrases of a dictionary with example sentences, as tables, data sets, and a task and criterion of fairseq.

Importing this package registers them: for fairseq-train, it is the `--user-dir`, which fairseq imports as `xpr`. The
network is `models/xpr_encoder.py`, so that what was trained is used without this.
"""

from fairseq_ccpr.lab.xpr import training

__all__ = ["training"]
