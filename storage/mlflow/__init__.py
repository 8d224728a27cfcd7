"""MLflow: what brings journals there, what it is asked, and the registry of models."""
