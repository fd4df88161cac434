"""Words and subwords with their character offsets, and files of sentences. Knows nothing of retrieval."""
