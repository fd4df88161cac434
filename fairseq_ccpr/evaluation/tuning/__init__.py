"""Choosing the settings of retrieval on a validation set: large grids by likelihood, the best few by BLEU."""
