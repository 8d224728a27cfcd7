"""Backup of studies, MLflow and checkpoints to one file while searches run, and restore."""
