"""The study storage: Optuna's tables on Postgres, at a fraction of the statements.

Imports: errors, database.
"""

from storage.study_storage.storage import PostgresStorage

__all__ = ["PostgresStorage"]
