"""Trackers in addition to MLflow, which a study selects by the settings of their names."""
