"""Adapters: trainers of other libraries within an own loop, each needing its library."""
