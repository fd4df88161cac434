"""`fairseq-ccpr serve`: LibreTranslate's API over one translator, learning, and a page for browsers."""
