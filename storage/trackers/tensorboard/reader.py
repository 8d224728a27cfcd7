"""From journals to TensorBoard: event files of a whole search, a folder a trial, each epoch of a trial once."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpsearch.storage.errors import StorageError
from hpsearch.storage.journals import journal_records
from hpsearch.storage.journals.journal import Entry, Place
from hpsearch.storage.journals.reader import Failure, TrialEnds
from hpsearch.storage.trackers.optional_tracker import OptionalTracker
from hpsearch.storage.trackers.tensorboard import files as events
from hpsearch.storage.trackers.tensorboard.files import EventFiles

_OWNER = ".study"  # a file in a study's folder: whose it is


class TensorBoard(OptionalTracker):
    """Writes the trials of one study as event files to the folder that the setting names."""

    name, title = "tensorboard", "TensorBoard"

    def __init__(self, setting: str, study: str, owner: str, home: Path, ends: TrialEnds) -> None:
        super().__init__(setting, study, owner, home, ends)
        self._folder = Path(setting)
        self._open: dict[Place, EventFiles] = {}

    @classmethod
    def check(cls, setting: str) -> None:
        """Check that TensorBoard is installed, and that this user can write to the folder, which is created."""
        super().check(setting)
        try:
            Path(setting).mkdir(parents=True, exist_ok=True)
            if not os.access(setting, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "this user may not write there")
        except OSError as error:
            raise StorageError(
                f"--{cls.name} {setting}: cannot be written ({error.strerror}): give a folder of this user's"
            ) from None

    def tell(self, place: Place, entries: Sequence[Entry]) -> bool:
        """Write what the trial's files lack of these."""
        if not entries:
            return False
        files = self._files(place)
        over, ended = False, None
        with files.alone():
            for entry in entries:
                self._add(files, place, entry.record)
                if isinstance(entry.record, journal_records.End) and not self.superseded(place):
                    ended = entry.record
                over = over or isinstance(entry.record, journal_records.End | journal_records.Leave)
            files.flush()
            if ended is not None:
                self._end(files, place, ended)
        place.moved(entries)
        return over

    def end(self, place: Place, end: journal_records.End) -> None:
        """Write how a trial ended whose process could not say so."""
        files = self._files(place)
        with files.alone():
            self._end(files, place, end)

    def leave(self, place: Place) -> None:
        """Nothing is open between two flushes."""
        self._open.pop(place, None)

    def failure(self, error: Exception) -> Failure:
        """Return the meaning of an error, with the folder that cannot be written."""
        found = super().failure(error)
        if isinstance(error, OSError) and error.strerror:
            return replace(found, text=f"{self._folder}: {error.strerror}")
        return found

    def _files(self, place: Place) -> EventFiles:
        if place not in self._open:
            self._open[place] = EventFiles(self._of_study() / f"{place.journal.head.number:04d}")
        return self._open[place]

    def _of_study(self) -> Path:
        """Return the study's folder: of its name, unless another study of that name has it."""
        folder = self._folder / self._study
        folder.mkdir(parents=True, exist_ok=True)
        hidden = folder / f"{_OWNER}-{os.getpid()}"
        hidden.write_text(self._owner)
        try:
            os.link(hidden, folder / _OWNER)  # whole at once, for others look at it meanwhile
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            if not (folder / _OWNER).exists():
                hidden.rename(folder / _OWNER)
        finally:
            hidden.unlink(missing_ok=True)
        if (folder / _OWNER).read_text() != self._owner:
            return self._folder / self._owner
        return folder

    def _add(self, files: EventFiles, place: Place, record: journal_records.Record) -> None:
        head = place.journal.head
        began = (head.began or 0) / 1000
        match record:
            case journal_records.Open():
                files.reopen()
                files.add(events.text("about", events.table(head.tags)), step=head.attempt, at=began)
            case journal_records.Params(values):
                start = events.session_start(values, trial=f"{self._study}/{head.number:04d}", at=began)
                files.add(start, step=0, at=began)
            case journal_records.Epoch(step, at, values) | journal_records.Metrics(step, at, values):
                named = {events.tag_of(name): float(value) for name, value in values.items()}
                files.add(events.scalars(named), step=step, at=at)
            case journal_records.Tags(values):
                files.add(events.text(", ".join(values), events.table(values)), step=head.attempt, at=began)

    def _end(self, files: EventFiles, place: Place, end: journal_records.End) -> None:
        at, words = end.at / 1000, f"{end.outcome.run_state}: {end.reason}"
        files.add(events.text("outcome", words), step=place.journal.head.attempt, at=at)
        files.flush()
        files.write_end(end.outcome, at=at)
