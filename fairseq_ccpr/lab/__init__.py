"""What research runs: mining, XPR, evaluation of retrieval, benchmarks, experiments. Nothing outside of it
imports it but `plug_in.py`, which registers the task of XPR for fairseq-train.
"""
