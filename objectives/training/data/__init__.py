"""Data: datasets and their splits, and the feed of batches in an order that a seed fixes."""
