"""The consumer that sends journals to Weights & Biases."""

from __future__ import annotations

import netrc
import os
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hpsearch.storage.database.locks import LockHeldError
from hpsearch.storage.errors import StorageError, format_error
from hpsearch.storage.journals import journal_records
from hpsearch.storage.journals.consumer import RunRejectedError, TrialOutcomes
from hpsearch.storage.journals.journal import Cursor, JournalEntry
from hpsearch.storage.trackers import OptionalTracker
from hpsearch.storage.trackers.wandb_runs.process_client import Connection, WandbUnavailableError
from hpsearch.storage.trials.finishing import Outcome

_HOSTED = (
    "api.forge.coreweave.com",
    "forge.coreweave.com",
    "api.wandb.ai",
)  # hosts that the library treats as the same service
_TIMEOUT_SECONDS = 5.0


_ONLINE, _MODES = {"online", "run", "shared"}, ("online", "offline", "shared", "disabled", "run", "dryrun")


def is_online() -> bool:
    """Return whether WANDB_MODE selects a mode that sends runs to a server, instead of only writing files."""
    return os.environ.get("WANDB_MODE", "online") in _ONLINE


def server_url() -> str:
    """Return the address of the Weights & Biases server."""
    return os.environ.get("WANDB_BASE_URL") or f"https://{_HOSTED[0]}"


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(server_url()).netloc
    hosts = _HOSTED if host in _HOSTED else (host,)
    paths = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for path in paths:
        try:
            known = netrc.netrc(Path(path).expanduser())
        except (OSError, netrc.NetrcParseError, RuntimeError):
            continue
        # The `default` entry applies to any host, so it is not a key of this server.
        if any(host in known.hosts and known.hosts[host][2] for host in hosts):
            return True
    return False


def _check_reachable() -> None:
    """Check that the Weights & Biases server answers, with any HTTP status.

    Raises:
        StorageError: WANDB_BASE_URL is not an HTTP address.
        WandbUnavailableError: the server does not answer.
    """
    if urlsplit(server_url()).scheme not in {"http", "https"}:
        raise StorageError(f"WANDB_BASE_URL {server_url()} must be the http(s):// address of a server")
    try:
        urllib.request.urlopen(server_url(), timeout=_TIMEOUT_SECONDS).close()  # noqa: S310 the scheme is checked
    except urllib.error.HTTPError:
        return
    except (OSError, ValueError) as error:
        raise WandbUnavailableError(f"{server_url()}: no answer ({getattr(error, 'reason', error)})") from None


_OPEN_SECONDS, _LOG_SECONDS, _FINISH_SECONDS = 60.0, 30.0, 60.0  # longest time until the reply of the process
_SYSTEM_PREFIX = "system/"  # prefix of the names of system metrics, whose steps are seconds


@dataclass
class _Run:
    """A run that is open in a process of the wandb library.

    Attributes:
        id: the id of the run.
        generation: the `Connection.generation` of the process that opened the run.
        system_metrics: the latest system metrics, which are logged with the next epoch.
    """

    id: str
    generation: int
    system_metrics: dict[str, float] = field(default_factory=dict)


class WandbConsumer(OptionalTracker):
    """Sends the trials of one study to Weights & Biases; the setting's value is ``PROJECT`` or ``ENTITY/PROJECT``."""

    name, title = "wandb", "Weights & Biases"

    def __init__(self, setting: str, study: str, owner: str, home: Path, outcomes: TrialOutcomes) -> None:
        super().__init__(setting, study, owner, home, outcomes)
        self._entity, _, self._project = setting.rpartition("/")
        self._folder = home / "wandb" / owner
        self._process = Connection(self._folder)
        self._runs: dict[Cursor, _Run] = {}

    @classmethod
    def check(cls, setting: str) -> None:
        """Check that the package is installed, and that an API key is configured if WANDB_MODE needs one.

        Raises:
            StorageError: the package or the key is missing, or WANDB_MODE is invalid.
        """
        super().check(setting)
        if (mode := os.environ.get("WANDB_MODE", "online")) not in _MODES:
            raise StorageError(f"WANDB_MODE {mode!r} is an unknown mode; set it to online or offline, or unset it")
        if is_online() and not _has_key():
            raise StorageError(
                f"--{cls.name} {setting}: no API key of Weights & Biases; set WANDB_API_KEY or WANDB_API_KEY_FILE, run "
                "wandb login, or set WANDB_MODE=offline and send the runs later with wandb sync"
            )

    def write_records(self, cursor: Cursor, entries: Sequence[JournalEntry]) -> bool:
        """Log records to the trial's run, and return whether the last record ends the journal.

        The cursor is committed only when the run is finished: until then, the process may lose logged records.
        """
        if not entries:
            return False
        if self._opened_run(cursor) is None:  # the process that received the entries in flight may have lost them
            cursor.release_buffered_lines()
            cursor.rewind()
            entries = cursor.read_pending()
        run, is_complete = self._open_run(cursor), False
        config: dict[str, Any] = {}
        rows: list[tuple[int, dict[str, float]]] = []
        summary: dict[str, Any] = {}
        for entry in entries:
            match entry.record:
                case journal_records.Params(values) | journal_records.Tags(values):
                    config |= values
                case journal_records.Epoch(step, at, values):
                    rows.append((step, {**run.system_metrics, **values, "_timestamp": at}))
                    run.system_metrics = {}
                case journal_records.Metrics(_, _, values) if all(key.startswith(_SYSTEM_PREFIX) for key in values):
                    run.system_metrics |= values
                case journal_records.Metrics(_, _, values):
                    summary |= values
                case journal_records.End() | journal_records.Released():
                    is_complete = True
        self._request(_LOG_SECONDS, "log_rows", run_id=run.id, config=config, rows=rows, summary=summary)
        if not is_complete:
            cursor.mark_in_flight([entry for entry in entries if entry.end_offset is not None])
            return False
        last = entries[-1].record
        self._finish(cursor, last if isinstance(last, journal_records.End) and not self.is_superseded(cursor) else None)
        cursor.commit(entries)
        return True

    def write_outcome(self, cursor: Cursor, end: journal_records.End) -> None:
        """Finish the run of a trial whose process died before it recorded the outcome."""
        self._open_run(cursor)
        self._finish(cursor, end)

    def release(self, cursor: Cursor) -> None:
        """Finish the run in this process; another attempt may resume the run."""
        if self._opened_run(cursor) is not None:
            self._finish(cursor, None)
            cursor.commit_in_flight()

    def close(self) -> None:
        """Make the process of the wandb library exit."""
        self._process.close()

    def _opened_run(self, cursor: Cursor) -> _Run | None:
        run = self._runs.get(cursor)
        return run if run is not None and run.generation == self._process.generation else None

    def _open_run(self, cursor: Cursor) -> _Run:
        if (run := self._opened_run(cursor)) is not None:
            return run
        if is_online():
            _check_reachable()
        header = cursor.journal.header
        run_id = re.sub(r"[^A-Za-z0-9_-]", "-", f"{self._owner}-{header.number:04d}")
        entity = {"entity": self._entity} if self._entity else {}
        reply = self._request(
            _OPEN_SECONDS, "open", run_id=run_id, folder=str(self._folder), project=self._project, group=self._study,
            name=f"{self._study}-{header.number:04d}", job_type="trial", config=dict(header.tags), **entity,
        )  # fmt: skip
        if reply.get("busy"):
            raise LockHeldError(f"another process has opened run {run_id}")
        self._runs[cursor] = _Run(run_id, self._process.generation)
        return self._runs[cursor]

    def _finish(self, cursor: Cursor, end: journal_records.End | None) -> None:
        run = self._runs[cursor]
        if end is not None:
            summary = {"state": end.outcome.run_state, "reason": end.reason}
            self._request(_LOG_SECONDS, "log_rows", run_id=run.id, config={}, rows=[], summary=summary)
        is_success = end is not None and end.outcome in {Outcome.COMPLETE, Outcome.PRUNED}
        self._request(_FINISH_SECONDS, "finish", run_id=run.id, exit_code=int(not is_success), is_preempted=end is None)
        del self._runs[cursor]

    def _request(self, timeout_seconds: float, command: str, **arguments: Any) -> dict[str, Any]:
        reply = self._process.request(timeout_seconds, command, **arguments)
        if (error := reply.get("error")) is None:
            return reply
        text = format_error(error, 200)
        if "deleted" in text:  # a user deleted the run, so no new run may be created for the trial
            raise RunRejectedError(text)
        raise WandbUnavailableError(text)
