"""Custom training loops: an objective trains itself epoch by epoch, with the guarantees of a trial."""
