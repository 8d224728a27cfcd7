"""The reader that sends journals to Weights & Biases."""

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
from hpsearch.storage.errors import StorageError, one_line
from hpsearch.storage.journals import journal_records
from hpsearch.storage.journals.journal import Entry, Place
from hpsearch.storage.journals.reader import RefusedError, TrialEnds
from hpsearch.storage.trackers.optional_tracker import OptionalTracker
from hpsearch.storage.trackers.wandb_runs.connection import Connection, WandbAwayError
from hpsearch.storage.trials.settle import Outcome

_HOSTED = (
    "api.forge.coreweave.com",
    "forge.coreweave.com",
    "api.wandb.ai",
)  # the same service, by its package
_PATIENCE = 5.0  # seconds


_ONLINE, _MODES = {"online", "run", "shared"}, ("online", "offline", "shared", "disabled", "run", "dryrun")


def is_online() -> bool:
    """Whether runs go to a server, and not to files alone, by WANDB_MODE."""
    return os.environ.get("WANDB_MODE", "online") in _ONLINE


def server() -> str:
    """Return the address of the server."""
    return os.environ.get("WANDB_BASE_URL") or f"https://{_HOSTED[0]}"


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(server()).netloc
    hosts = _HOSTED if host in _HOSTED else (host,)
    places = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for place in places:
        try:
            known = netrc.netrc(Path(place).expanduser())
        except (OSError, netrc.NetrcParseError, RuntimeError):
            continue
        # Its `default` entry is for any host, and so no key of this one.
        if any(host in known.hosts and known.hosts[host][2] for host in hosts):
            return True
    return False


def _check_reachable() -> None:
    """Check that something answers where the server is; what it says is no matter.

    Raises:
        WandbAwayError: nothing does.
    """
    if urlsplit(server()).scheme not in {"http", "https"}:
        raise StorageError(f"WANDB_BASE_URL {server()}: must be the http(s):// address of a server")
    try:
        urllib.request.urlopen(server(), timeout=_PATIENCE).close()  # noqa: S310 the scheme is checked
    except urllib.error.HTTPError:
        return
    except (OSError, ValueError) as error:
        raise WandbAwayError(f"{server()}: no answer ({getattr(error, 'reason', error)})") from None


_OPEN, _TELL, _FINISH = 60.0, 30.0, 60.0  # seconds in which the process has to answer
_SYSTEM = "system/"  # how the machine's load is named, whose steps are seconds


@dataclass
class _Run:
    """A run that is open in the process of a generation."""

    id: str
    generation: int
    load: dict[str, float] = field(default_factory=dict)  # of the machine, to go with the next epoch


class WandbRuns(OptionalTracker):
    """Sends the trials of one study to the Weights & Biases project, or entity/project, that the setting names."""

    name, title = "wandb", "Weights & Biases"

    def __init__(self, setting: str, study: str, owner: str, home: Path, ends: TrialEnds) -> None:
        super().__init__(setting, study, owner, home, ends)
        self._entity, _, self._project = setting.rpartition("/")
        self._folder = home / "wandb" / owner
        self._process = Connection(self._folder)
        self._runs: dict[Place, _Run] = {}

    @classmethod
    def check(cls, setting: str) -> None:
        """Check that the package is installed, and that there is a key where one is needed."""
        super().check(setting)
        if (mode := os.environ.get("WANDB_MODE", "online")) not in _MODES:
            raise StorageError(f"WANDB_MODE {mode!r}: set it to online or offline, or leave it out")
        if is_online() and not _has_key():
            raise StorageError(
                f"--{cls.name} {setting}: no key of Weights & Biases: set WANDB_API_KEY, or WANDB_API_KEY_FILE, or run "
                "wandb login; or set WANDB_MODE=offline and send later with wandb sync"
            )

    def tell(self, place: Place, entries: Sequence[Entry]) -> bool:
        """Tell the trial's run of these; its journal has arrived when its end has."""
        if not entries:
            return False
        if self._known(place) is None:  # of this process: what an earlier one was told may not have arrived
            place.returned()
            place.rewind()
            entries = place.unsent()
        told, over = self._open(place), False
        config: dict[str, Any] = {}
        rows: list[tuple[int, dict[str, float]]] = []
        summary: dict[str, Any] = {}
        for entry in entries:
            match entry.record:
                case journal_records.Params(values) | journal_records.Tags(values):
                    config |= values
                case journal_records.Epoch(step, at, values):
                    rows.append((step, {**told.load, **values, "_timestamp": at}))
                    told.load = {}
                case journal_records.Metrics(_, _, values) if all(key.startswith(_SYSTEM) for key in values):
                    told.load |= values
                case journal_records.Metrics(_, _, values):
                    summary |= values
                case journal_records.End() | journal_records.Leave():
                    over = True
        self._ask(_TELL, "tell", run_id=told.id, config=config, rows=rows, summary=summary)
        if not over:
            place.taken([entry for entry in entries if entry.end is not None])
            return False
        last = entries[-1].record
        self._finish(place, last if isinstance(last, journal_records.End) and not self.superseded(place) else None)
        place.moved(entries)
        return True

    def end(self, place: Place, end: journal_records.End) -> None:
        """Tell how a trial ended whose process could not say so."""
        self._open(place)
        self._finish(place, end)

    def leave(self, place: Place) -> None:
        """Finish the run here, which another attempt may go on with."""
        if self._known(place) is not None:
            self._finish(place, None)
            place.settle()

    def close(self) -> None:
        """Let the process end."""
        self._process.close()

    def _known(self, place: Place) -> _Run | None:
        run = self._runs.get(place)
        return run if run is not None and run.generation == self._process.generation else None

    def _open(self, place: Place) -> _Run:
        """Return the run of a place, opened if need be."""
        if (run := self._known(place)) is not None:
            return run
        if is_online():
            _check_reachable()
        head = place.journal.head
        made = re.sub(r"[^A-Za-z0-9_-]", "-", f"{self._owner}-{head.number:04d}")
        more = {"entity": self._entity} if self._entity else {}
        answer = self._ask(
            _OPEN, "open", run_id=made, folder=str(self._folder), project=self._project, group=self._study,
            name=f"{self._study}-{head.number:04d}", job_type="trial", config=dict(head.tags), **more,
        )  # fmt: skip
        if answer.get("busy"):
            raise LockHeldError(f"{made}: another process tells of it")
        self._runs[place] = _Run(made, self._process.generation)
        return self._runs[place]

    def _finish(self, place: Place, end: journal_records.End | None) -> None:
        run = self._runs[place]
        if end is not None:
            summary = {"state": end.outcome.run_state, "reason": end.reason}
            self._ask(_TELL, "tell", run_id=run.id, config={}, rows=[], summary=summary)
        well = end is not None and end.outcome in {Outcome.COMPLETE, Outcome.PRUNED}
        self._ask(_FINISH, "finish", run_id=run.id, exit_code=int(not well), left=end is None)
        del self._runs[place]

    def _ask(self, timeout: float, do: str, **request: Any) -> dict[str, Any]:
        answer = self._process.ask(timeout, do, **request)
        if (error := answer.get("error")) is None:
            return answer
        told = one_line(error, 200)
        if "deleted" in told:  # a person's wish: no run is made in its place
            raise RefusedError(told)
        raise WandbAwayError(told)
