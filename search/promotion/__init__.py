"""Promotion: the test set, champions with their evidence, and the check of what is served."""
