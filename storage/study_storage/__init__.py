"""The study storage: Optuna's tables on Postgres, at a fraction of the statements."""
