"""MLflow: the consumer of journals, the client for runs and models, and the model registry."""
