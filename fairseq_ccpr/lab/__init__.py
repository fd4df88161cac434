"""What research runs: mining, XPR, evaluation of retrieval, benchmarks, experiments. Nothing outside of it imports it."""
