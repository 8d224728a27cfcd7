"""Doctor: check everything that a worker on this machine needs, with a remedy for each failure."""
