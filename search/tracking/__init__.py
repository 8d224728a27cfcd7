"""Tracking: log the runs of a study and its trials to MLflow through the outbox, and rebuild missing runs."""
