"""The embedded stack: Postgres, an MLflow server and the Optuna dashboard on this machine."""
