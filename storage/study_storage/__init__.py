"""The study storage: Optuna's tables on Postgres, at a fraction of the statements."""

from hpsearch.storage.study_storage.storage import PostgresStorage

__all__ = ["PostgresStorage"]
