"""The loop: a run, built from an objective and a configuration, and its epochs and steps.

Imports: errors, measured, ranks, reproducibility, config, optimizers, data, evaluation, strategies, objective, result.
"""
