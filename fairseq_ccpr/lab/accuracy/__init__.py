"""Retrieval accuracy of token keys, phrase vectors and phrase types, and of what is retrieved for a text."""
