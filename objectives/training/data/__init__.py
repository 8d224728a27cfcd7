"""Data: datasets and their splits, and the feed of batches in an order that a seed fixes.

Imports: errors, ranks, reproducibility, config.
"""
