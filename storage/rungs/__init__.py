"""Rungs: where trials wait until they are among the best that came there, by one metric or by fronts of several."""
