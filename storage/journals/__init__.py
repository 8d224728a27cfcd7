"""Journals: what is logged, on disk before the call returns, and the threads that bring it to each of its readers."""
