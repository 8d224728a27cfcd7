"""Checkpoints: files under one URL, and the database rows of the valid files."""
