"""Workers: claim a trial, run it, settle it, take the next.

Imports: errors, entry, services, spec, sampling, pruning, study, tracking, publish.
"""
