"""Fleets: worker processes of one machine, forked, restarted, told to stop."""
