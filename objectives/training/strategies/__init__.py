"""How one model trains on several devices, a module for each way.

Imports: errors, ranks, reproducibility, config, optimizers, data, evaluation.
"""
