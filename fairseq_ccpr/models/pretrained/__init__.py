"""Pretrained encoders of others: converted to fairseq's directories, pruned to a text's pieces, loaded."""
