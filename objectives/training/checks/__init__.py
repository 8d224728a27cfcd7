"""Checks beside a run: overfit one batch, range of learning rates, the held-out test split.

Imports: errors, reproducibility, config, data, evaluation, objective, exportable, result, loop, reports.
"""
