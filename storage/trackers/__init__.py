"""Optional trackers, which receive a study's metrics in addition to MLflow."""
