"""From text to training pairs: word alignment, and phrase pairs."""
