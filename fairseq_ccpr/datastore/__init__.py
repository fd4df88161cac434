"""What a datastore is: its manifest, its token part, its phrase part, and the projection of keys (datastores/README.md)."""
