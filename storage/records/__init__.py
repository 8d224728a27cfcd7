"""Records that are written once: the evaluation on the test set, and promotions."""
