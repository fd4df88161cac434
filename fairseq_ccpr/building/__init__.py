"""Building and merging datastores, and preparing data for them; every stage survives a kill."""
