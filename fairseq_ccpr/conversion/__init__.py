"""Conversion of other toolkits' translation models to fairseq checkpoints."""
