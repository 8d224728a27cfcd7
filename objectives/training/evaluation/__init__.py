"""Evaluation: metrics, as sums over all samples.

Imports: errors, measured, ranks, reproducibility, config, data.
"""
