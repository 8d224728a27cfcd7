"""A study with one trial in a real database, and the journals of its attempts."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import optuna
import sqlalchemy as sa

from hpsearch.storage.journals.consumer import Consumer, TrialOutcomes
from hpsearch.storage.journals.journal import Cursor, Journal
from hpsearch.storage.journals.journal_records import End, Epoch, Header, Params, Released
from hpsearch.storage.journals.outbox import Outbox
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from hpsearch.storage.trials.finishing import Outcome


class Post:
    """A trial with number 0, and the outbox of its study with one reader."""

    def __init__(self, url: str, folder: Path, reader: str) -> None:
        self.storage: PostgresStorage = open_storage(url, application_name="test")
        self.study = f"post-{secrets.token_hex(4)}"
        study_id = self.storage.create_new_study([optuna.study.StudyDirection.MINIMIZE], self.study)
        self.trial_id = self.storage.create_new_trial(study_id)
        self.ends = TrialOutcomes(self.storage.engine)
        self.box, self.reader = Outbox(folder, [reader]), reader

    def open(self, *, attempt: int = 1) -> Journal:
        """Start the journal of an attempt; the second attempt is a resumed one."""
        if attempt > 1:
            self.begin_attempt(attempt)
        tags = {"hpsearch.attempt": str(attempt)}
        header = Header(self.study, self.trial_id, 0, attempt, attempt > 1, "val_loss", tags, began=1000)
        journal = self.box.open(f"0000-{attempt}", header)
        journal.append(Params({"lr": 0.1, "model": "mlp", "deep": True}))
        return journal

    def left(self) -> list[Cursor]:
        """Take over the journals of dead processes."""
        return [journal.cursors[self.reader] for journal in self.box.take_orphaned_journals()]

    def consume(self, reader: Consumer, journal: Journal) -> bool:
        return reader.consume(journal.cursors[self.reader])

    def begin_attempt(self, attempt: int) -> None:
        query = """
            INSERT INTO hpsearch_attempts (trial_id, attempt, claim_id, worker, process, expires_at, ended_at, outcome)
            VALUES (:trial, :attempt, gen_random_uuid(), 'w', 'p', now(), now(), 'lost')
        """
        with self.storage.engine.begin() as connection:
            connection.execute(sa.text(query), {"trial": self.trial_id, "attempt": attempt})

    def settle(self, state: str = "COMPLETE") -> None:
        self.storage.set_trial_state_values(self.trial_id, optuna.trial.TrialState[state])


def log(journal: Journal, epochs: Sequence[int], *, at: float = 0.0, end: Outcome | None = None) -> None:
    """Log epochs with times in seconds after `at`, and the outcome of the trial."""
    for epoch in epochs:
        journal.append(Epoch(epoch, at + epoch, {"val_loss": epoch / 10, "train_loss": epoch / 5}))
    if end is Outcome.RELEASED:
        journal.append(Released())
    elif end is not None:
        journal.append(End(end, "as it goes", at=5000, is_checkpoint_kept=False))
