"""Tracking: the runs of a study and of its trials in MLflow, written to the outbox or made again."""
