"""Evaluation: metrics, as sums over all samples.

Imports: errors, reproducibility, config, data.
"""
