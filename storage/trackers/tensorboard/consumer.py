"""The consumer that writes journals as TensorBoard event files, with one folder per trial."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpsearch.storage.errors import StorageError
from hpsearch.storage.journals import journal_records
from hpsearch.storage.journals.consumer import Failure, TrialOutcomes
from hpsearch.storage.journals.journal import Cursor, JournalEntry
from hpsearch.storage.trackers import OptionalTracker
from hpsearch.storage.trackers.tensorboard import event_files as events
from hpsearch.storage.trackers.tensorboard.event_files import EventFiles
from hpsearch.storage.trackers.tensorboard.hparams import make_session_start

_OWNER_FILE = ".study"  # name of a file in the study's folder that contains the identifier of the study


class TensorBoardConsumer(OptionalTracker):
    """Writes the trials of one study as event files, to the folder that is the value of the setting."""

    name, title = "tensorboard", "TensorBoard"

    def __init__(self, setting: str, study: str, owner: str, home: Path, outcomes: TrialOutcomes) -> None:
        super().__init__(setting, study, owner, home, outcomes)
        self._folder = Path(setting)
        self._trial_files: dict[Cursor, EventFiles] = {}

    @classmethod
    def check(cls, setting: str) -> None:
        """Check that TensorBoard is installed; create the folder, and check that this user can write to it.

        Raises:
            StorageError: TensorBoard is missing, or the folder is not writable.
        """
        super().check(setting)
        try:
            Path(setting).mkdir(parents=True, exist_ok=True)
            if not os.access(setting, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "permission denied")
        except OSError as error:
            raise StorageError(f"--{cls.name} {setting} is not writable ({error.strerror}); choose another") from None

    def write_records(self, cursor: Cursor, entries: Sequence[JournalEntry]) -> bool:
        """Write the records that are not in the trial's files yet; return whether the last record ends the journal."""
        if not entries:
            return False
        files = self._event_files(cursor)
        is_complete, end = False, None
        with files.lock():
            for entry in entries:
                self._add_record(files, cursor, entry.record)
                if isinstance(entry.record, journal_records.End) and not self.is_superseded(cursor):
                    end = entry.record
                is_complete |= isinstance(entry.record, journal_records.End | journal_records.Released)
            files.flush()
            if end is not None:
                self._write_end(files, cursor, end)
        cursor.commit(entries)
        return is_complete

    def write_outcome(self, cursor: Cursor, end: journal_records.End) -> None:
        """Write the outcome of a trial whose process died before it recorded the outcome."""
        files = self._event_files(cursor)
        with files.lock():
            self._write_end(files, cursor, end)

    def release(self, cursor: Cursor) -> None:
        """Drop the cached content of the trial's files, which are not open."""
        self._trial_files.pop(cursor, None)

    def classify_error(self, error: Exception) -> Failure:
        """Return the classification of an error; the text of an OSError contains the folder."""
        failure = super().classify_error(error)
        if isinstance(error, OSError) and error.strerror:
            return replace(failure, text=f"{self._folder}: {error.strerror}")
        return failure

    def _event_files(self, cursor: Cursor) -> EventFiles:
        if cursor not in self._trial_files:
            self._trial_files[cursor] = EventFiles(self._claim_study_folder() / f"{cursor.journal.header.number:04d}")
        return self._trial_files[cursor]

    def _claim_study_folder(self) -> Path:
        """Return the study's folder; its name is the study's name or, if another study uses this, the identifier."""
        folder = self._folder / self._study
        folder.mkdir(parents=True, exist_ok=True)
        # Another user may be able to write to the folder, so links are not followed.
        events.reject_link(folder)
        hidden = folder / f"{_OWNER_FILE}-{uuid.uuid4().hex}"
        with hidden.open("x") as file:
            file.write(self._owner)
        try:
            os.link(hidden, folder / _OWNER_FILE)  # atomic, because other processes may read the file
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            if not (folder / _OWNER_FILE).exists():
                hidden.rename(folder / _OWNER_FILE)
        finally:
            hidden.unlink(missing_ok=True)
        if (folder / _OWNER_FILE).read_text() != self._owner:
            return self._folder / self._owner
        return folder

    def _add_record(self, files: EventFiles, cursor: Cursor, record: journal_records.Record) -> None:
        header = cursor.journal.header
        started = (header.began or 0) / 1000  # unix seconds
        match record:
            case journal_records.Header():
                files.reopen()
                files.add(events.make_text("about", events.format_table(header.tags)), step=header.attempt, at=started)
            case journal_records.Params(values):
                start = make_session_start(values, trial=f"{self._study}/{header.number:04d}", at=started)
                files.add(start, step=0, at=started)
            case journal_records.Epoch(step, at, values) | journal_records.Metrics(step, at, values):
                tagged = {events.make_tag(name): float(value) for name, value in values.items()}
                files.add(events.make_scalars(tagged), step=step, at=at)
            case journal_records.Tags(values):
                text = events.make_text(", ".join(values), events.format_table(values))
                files.add(text, step=header.attempt, at=started)

    def _write_end(self, files: EventFiles, cursor: Cursor, end: journal_records.End) -> None:
        at, text = end.at / 1000, f"{end.outcome.run_state}: {end.reason}"
        files.add(events.make_text("outcome", text), step=cursor.journal.header.attempt, at=at)
        files.flush()
        files.write_end(end.outcome, at=at)
