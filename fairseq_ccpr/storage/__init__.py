"""Files and folders: resumable arrays, lines of text, checksums, atomic writes. Nothing of retrieval."""
