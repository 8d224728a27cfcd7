"""The study of tests/storage/trials, with rungs."""

from tests.storage.trials.conftest import engine, storage, study_id

__all__ = ["engine", "storage", "study_id"]
