"""``hpsearch sync``: what waits on this machine for MLflow is sent; a model that a lost machine had is made again."""

from __future__ import annotations

from pathlib import Path

import optuna

from search.console import PlainConsole, command, counted
from search.errors import SearchError
from search.publish.study import close_if_spent
from search.services import Services, find_services, why_away
from search.steps import steps
from search.study.checkpoints import open_checkpoints
from search.study.study import StoredStudy, load_study
from search.tracking.rebuild import resend
from search.tracking.tracker import Tracker, outbox_folder
from storage.attributes import TRACKING_URI
from storage.study_storage import PostgresStorage
from storage.study_storage.opening import open_storage


def sync_studies(
    name: str | None,
    *,
    storage_url: str | None,
    tracking_uri: str | None,
    checkpoint_url: str | None,
    home: str | None,
) -> int:
    """Send what waits for MLflow of one study, or of all that have something on this machine.

    Returns:
        0 when nothing is left, else 1.

    Raises:
        SearchError: no such study, or it names no tracking server and none was given.
        StorageError: a service cannot be used.
    """
    console = PlainConsole()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    services = find_services(storage_url, tracking_uri, home=home)
    storage = open_storage(services.storage_url, application_name="hpsearch sync")
    studies = [load_study(storage, name)] if name is not None else waiting_studies(storage, services.home)
    if not studies:
        console.print("nothing waits for MLflow on this machine")
    return max((_sync(console, services, study, checkpoint_url) for study in studies), default=0)


def waiting_studies(storage: PostgresStorage, home: Path) -> list[StoredStudy]:
    """Return the studies of this database that have something on this machine for MLflow."""
    found = []
    for summary in storage.get_all_studies():
        try:
            study = load_study(storage, summary.study_name)
        except SearchError:  # not made by hpsearch
            continue
        if outbox_folder(home, study).is_dir():
            found.append(study)
    return found


def _sync(console: PlainConsole, services: Services, study: StoredStudy, checkpoint_url: str | None) -> int:
    name = study.spec.name
    uri = services.tracking_uri or study.attrs.get(TRACKING_URI)
    if uri is None:
        raise SearchError(f"study {name!r} names no tracking server: give --tracking-uri")
    why_away(uri, required=True)
    tracking = services.open_tracking(uri)
    checkpoints = open_checkpoints(study, services.home, checkpoint_url)
    tracker = Tracker(study, tracking, checkpoints, services.home, refused=True)
    problems: list[str] = []
    with steps(console) as tell:
        left = tracker.deliver(tell, then=lambda: problems.extend(resend(study, tracker, checkpoints, tell=tell)))
    sent = tracker.sender.sent
    said = f"{name}: {counted(sent, 'trial')} sent"
    for problem in problems:
        console.print(f"{name}, {problem}", style="yellow")
    if left:
        why = f" ({tracker.sender.away})" if tracker.sender.away else ""
        console.print(f"{said}, {left} are left{why}; try again with: {command('sync', name)}")
        return 1
    close_if_spent(study, tracking)
    console.print(f"{said}, nothing is left")
    return 1 if problems else 0
