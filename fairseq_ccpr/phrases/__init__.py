"""From text to training pairs: word alignment, phrase pairs, and dictionary entries with example sentences."""
