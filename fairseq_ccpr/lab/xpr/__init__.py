"""XPR's training: phrases of a dictionary with example sentences, as tables, data sets, and a task and criterion of fairseq.

Importing this package registers them.
"""

from fairseq_ccpr.lab.xpr import training

__all__ = ["training"]
