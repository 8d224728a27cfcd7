"""Journals: a write-ahead log per attempt at a trial, and the threads that send it to the trackers."""
