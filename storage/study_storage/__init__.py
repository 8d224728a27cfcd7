"""The study storage: Optuna's tables on Postgres, at a fraction of the statements.

Imports: database.
"""

from storage.study_storage.storage import PostgresStorage

__all__ = ["PostgresStorage"]
