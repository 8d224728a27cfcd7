"""From journals to TensorBoard: event files of a whole search, a folder a trial, each epoch of a trial once."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from hpsearch.storage.errors import AwayError, StorageError, one_line
from hpsearch.storage.journals import journal_records
from hpsearch.storage.journals.journal import Entry, Place
from hpsearch.storage.journals.reader import Failure, Reader, TrialEnds
from hpsearch.storage.tensorboard import files as events
from hpsearch.storage.tensorboard.files import EventFiles

_OWNER = ".study"  # a file in a study's folder: whose it is


def is_installed() -> bool:
    """Whether TensorBoard is installed here."""
    return importlib.util.find_spec("tensorboard") is not None


def check_folder(folder: Path) -> None:
    """Make a folder for event files.

    Raises:
        StorageError: it cannot be made, or nobody of this machine may write there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable, why = os.access(folder, os.W_OK | os.X_OK), "this user may not write there"
    except OSError as error:
        writable, why = False, str(error.strerror)
    if not writable:
        raise StorageError(f"--tensorboard {folder}: cannot be written ({why}): give a folder of this user's")


class TensorBoard(Reader):
    """Writes the trials of one study as event files.

    Args:
        folder: of all studies.
        study: the study's name.
        owner: which no other study has, not even a later one of the same name.
        ends: what the study's database says of trials.
    """

    name, title = "tensorboard", "TensorBoard"

    def __init__(self, folder: Path, study: str, owner: str, ends: TrialEnds) -> None:
        super().__init__(ends)
        self._folder, self._study, self._owner = folder, study, owner
        self._open: dict[Place, EventFiles] = {}

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

    def refused(self, place: Place) -> None:
        """Nobody else need know."""

    def close(self) -> None:
        """Nothing is waited for."""

    def failure(self, error: Exception) -> Failure:
        """Return what an error means: a folder that cannot be written today may be tomorrow."""
        known = isinstance(error, OSError | StorageError)
        text = f"{self._folder}: {error.strerror}" if isinstance(error, OSError) and error.strerror else one_line(error)
        return Failure(text, passes=known, everything=isinstance(error, OSError | AwayError), expected=known)

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
                self._add_table(files, "about", head.tags, step=head.attempt, at=began)
            case journal_records.Params(values):
                if not files.has(events.start_tag(), 0):
                    start = events.session_start(values, trial=f"{self._study}/{head.number:04d}", at=began)
                    files.add(start, (events.start_tag(), 0))
            case journal_records.Epoch(step, at, values) | journal_records.Metrics(step, at, values):
                named = {events.tag_of(name): float(value) for name, value in values.items()}
                new = {tag: value for tag, value in named.items() if not files.has(tag, step)}
                if new:
                    files.add(events.scalars(new, step=step, at=at), *((tag, step) for tag in new))
            case journal_records.Tags(values):
                self._add_table(files, ", ".join(values), values, step=head.attempt, at=began)

    def _add_table(self, files: EventFiles, tag: str, values: dict[str, str], *, step: int, at: float) -> None:
        if values and not files.has(tag, step):
            files.add(events.text(tag, events.table(values), step=step, at=at), (tag, step))

    def _end(self, files: EventFiles, place: Place, end: journal_records.End) -> None:
        at, step = end.at / 1000, place.journal.head.attempt
        if not files.has("outcome", step):
            words = f"{end.outcome.run_state}: {end.reason}"
            files.add(events.text("outcome", words, step=step, at=at), ("outcome", step))
            files.flush()
        files.write_end(events.session_end(end.outcome, at=at))
