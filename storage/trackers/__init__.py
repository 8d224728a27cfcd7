"""Trackers in addition to MLflow; each one is used by the studies that have the setting of its name."""
