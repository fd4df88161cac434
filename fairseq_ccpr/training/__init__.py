"""What `fairseq-train` runs: tasks, criterions, data sets and samplers of CLKNN and CCPR.

fairseq calls this `tasks/` and `criterions/`. Importing this package registers them.
"""

from fairseq_ccpr.training import phrase_contrast, tasks, token_contrast

__all__ = ["phrase_contrast", "tasks", "token_contrast"]
