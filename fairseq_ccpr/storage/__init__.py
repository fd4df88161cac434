"""Files and folders: resumable arrays, lines of text, checksums, and writes that are atomic. Knows nothing of retrieval."""
