"""Sampling: samplers by name, seeds, and the suggestion of a trial that no other trial has."""
