"""Doctor: check the prerequisites of a worker on this machine, and give a remedy for each failure."""
