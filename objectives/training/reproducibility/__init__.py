"""Reproducible and resumable runs: seeds, environment, checkpoint files and metrics files."""
