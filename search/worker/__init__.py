"""Workers: claim a trial, run it, settle it, take the next.

Imports: early, errors, entry, services, spec, sampling, pruning, study, tracking, publish.
"""
