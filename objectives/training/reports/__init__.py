"""What a run leaves to read: its directory, its report, its plots.

Imports: reproducibility, config, data, evaluation, base, objective, result, loop.
"""
