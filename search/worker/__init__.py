"""Workers: claim a trial, run it, settle it, take the next.

Imports: entry, services, spec, sampling, pruning, study, tracking, publish.
"""
