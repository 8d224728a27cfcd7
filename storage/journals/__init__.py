"""Journals: a write-ahead log per attempt of a trial, and the threads that send the logs to the trackers."""
