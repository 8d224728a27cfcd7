"""Adapters: trainers of other libraries within an own loop, each needing its library.

Imports: errors, reproducibility, own_loop.
"""
