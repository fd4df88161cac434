"""Speed of decoding, of search and of phrases, and what a datastore of a size will need."""
