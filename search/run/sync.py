"""``hpsearch sync``: what waits on this machine is sent; a model that a lost machine had is made again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from hpsearch.search.console import command, counted, steps
from hpsearch.search.errors import SearchError
from hpsearch.search.services import Services
from hpsearch.search.study.checkpoints import open_checkpoints
from hpsearch.search.study.study import StoredStudy, load_study, outbox_folder, tracking_of, tracking_uri_of
from hpsearch.search.tracking.publish import close_if_spent
from hpsearch.search.tracking.rebuild import resend
from hpsearch.search.tracking.tracker import Tracker, readers_of
from hpsearch.storage.mlflow.health import TrackingAwayError
from hpsearch.storage.study_storage.storage import PostgresStorage


@dataclass(frozen=True)
class Synced:
    """What sending came to: how many trials were told of, how many are left, and what could not be made again."""

    sent: int
    left: int
    problems: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether MLflow, and all other readers, have all there is."""
        return not self.left and not self.problems


def waiting_studies(storage: PostgresStorage, home: Path) -> list[StoredStudy]:
    """Return the studies of this database that have something on this machine to be told of."""
    found = []
    for summary in storage.get_all_studies():
        try:
            study = load_study(storage, summary.study_name)
        except SearchError:  # not made by hpsearch
            continue
        if outbox_folder(home, study).is_dir():
            found.append(study)
    return found


def sync_study(services: Services, study: StoredStudy, console: Console) -> Synced:
    """Send what waits of a study on this machine, and make again what a lost machine had; say so.

    Raises:
        SearchError: the study names no tracking server and none was given.
        StorageError: a service cannot be used.
    """
    name, away = study.spec.name, None
    try:
        tracking = tracking_of(services, study)
    except TrackingAwayError as error:
        if not readers_of(study, services.home):
            raise
        tracking, away = services.open_tracking(tracking_uri_of(services, study)), error  # others are told all the same
    checkpoints = open_checkpoints(study, services.home, services.checkpoint_url)
    tracker = Tracker(study, tracking, checkpoints, services.home, refused=True)
    problems: list[str] = []
    with steps(console) as tell:
        left = tracker.deliver(tell, then=lambda: problems.extend(resend(study, tracker, checkpoints, tell=tell)))
    if away is not None and not left:
        raise away  # what a lost machine had may be missing there
    sent = tracker.sender.sent
    said = f"{name}: {counted(sent, 'trial')} sent"
    for problem in problems:
        console.print(f"{name}, {problem}", style="yellow")
    if left:
        why = f" ({tracker.sender.away})" if tracker.sender.away else ""
        console.print(f"{said}, {left} are left{why}; try again with: {command('sync', name)}")
    else:
        close_if_spent(study, tracking)
        console.print(f"{said}, nothing is left")
    return Synced(sent, left, tuple(problems))
