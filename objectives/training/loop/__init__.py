"""The loop: a run, built from an objective and a configuration, and its epochs and steps.

Imports: errors, reproducibility, config, optimizers, data, evaluation, objective.
"""
