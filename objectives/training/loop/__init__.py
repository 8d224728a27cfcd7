"""The loop: a run, built from an objective and a configuration, and its epochs and steps."""
