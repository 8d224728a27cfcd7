"""Records that are written once: the opening of a test set, and promotions."""
