"""What `fairseq-train` runs: tasks, criterions, data sets and samplers of CLKNN and CCPR.

fairseq calls this `tasks/` and `criterions/`. Importing this package registers them.
"""

from fairseq_ccpr.training import (
    ccpr_criterion,
    cpu_autocast,
    phrase_contrast,
    phrase_queries,
    query_criterion,
    supervised_contrastive,
    token_contrast,
)

__all__ = [
    "ccpr_criterion",
    "cpu_autocast",
    "phrase_contrast",
    "phrase_queries",
    "query_criterion",
    "supervised_contrastive",
    "token_contrast",
]
