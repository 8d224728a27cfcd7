"""Evaluation: metrics, as sums over all samples."""
