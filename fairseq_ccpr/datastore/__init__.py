"""What datastores/README.md describes: the manifest, the token part, the phrase part, and the projection of keys."""
