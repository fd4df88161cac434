"""What `fairseq-generate` runs: the decoding task, the retrievers, and their mixture in beam search."""
