"""Translation models of others made checkpoints of fairseq."""
