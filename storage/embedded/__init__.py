"""The embedded stack: a Postgres, an MLflow server and a dashboard of our own on this machine."""
