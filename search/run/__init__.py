"""Whole runs on this machine: a search, its finalists, the live view, what is sent afterwards."""
