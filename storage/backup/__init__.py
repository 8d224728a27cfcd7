"""Backup: all that a search needs to go on elsewhere, in one file, taken while it runs, and put back."""
