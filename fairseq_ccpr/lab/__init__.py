"""What research runs: mining, XPR, evaluation of retrieval, benchmarks, experiments.

Nothing outside of it imports it: `cli/__init__.py` knows its commands by the names of their modules, and fairseq-train
tasks and criterions by `--user-dir fairseq_ccpr/lab/xpr` or `lab/student`.
"""
