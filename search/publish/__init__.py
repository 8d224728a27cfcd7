"""Publishing: a study's end, its finalists and its note, told to MLflow and the dashboard."""
