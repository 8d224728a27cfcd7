"""Whole runs on this machine: a search, its finalists, the live view, what is sent afterwards.

Imports: errors, entry, console, steps, services, spec, study, finalists, tracking, report, publish, worker, fleet.
"""
