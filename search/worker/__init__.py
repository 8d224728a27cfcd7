"""Workers: claim a trial, run it, settle it, take the next.

Imports: errors, entry, services, sampling, pruning, study, tracking, publish.
"""
