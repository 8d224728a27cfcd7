"""Fleets: start, restart and stop the worker processes of one machine."""
