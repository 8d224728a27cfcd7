"""Workers: claim a trial, run it, settle it, take the next.

Imports: entry, services, sampling, pruning, study, tracking, publish.
"""
