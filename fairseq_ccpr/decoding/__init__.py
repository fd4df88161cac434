"""What `fairseq-generate` runs: the decoding task, the retrievers, and the maths that mixes them into beam search."""
