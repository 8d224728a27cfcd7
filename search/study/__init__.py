"""Studies: created or joined with their spec, steered, summed up, tidied.

Imports: errors, console, services, curves, spec, sampling, pruning.
"""
