"""Data: datasets, splits, and batches in a reproducible order."""
