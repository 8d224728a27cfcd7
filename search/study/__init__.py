"""Studies: creation, steering, summaries and cleanup."""
