"""Fleets: start, restart and stop a study's worker processes on one machine."""
