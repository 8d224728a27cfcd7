"""Evaluation: metrics, as sums over all samples.

Imports: errors, data.
"""
