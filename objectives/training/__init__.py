"""The training loop. It depends on torch and on a small session protocol, but not on Postgres or MLflow."""
