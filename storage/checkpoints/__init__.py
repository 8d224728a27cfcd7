"""Checkpoints: files under one URL, and the rows that say which of them count."""
