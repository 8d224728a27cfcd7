"""Runs on this machine: the search, its finalists, the live view, and the upload of remaining records."""
