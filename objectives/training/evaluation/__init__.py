"""Evaluation: metrics, as sums over all samples.

Imports: errors, ranks, reproducibility, config, data.
"""
