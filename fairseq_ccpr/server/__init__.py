"""`fairseq-ccpr serve`: LibreTranslate's API over one translator, what it learns, and a page for the browser."""
