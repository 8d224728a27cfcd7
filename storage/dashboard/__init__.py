"""The Optuna dashboard over a storage that reads little, with the files that MLflow keeps."""
