"""The study storage: Optuna's tables on Postgres, with fewer SQL statements than RDBStorage."""
