"""Where each token of a translation came from, as records and as a page."""
