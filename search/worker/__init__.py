"""Workers: claim a trial, run it, settle it, take the next.

Imports: early, errors, entry, console, services, spec, sampling, pruning, study, tracking, publish.
"""
