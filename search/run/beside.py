"""A fleet for a study beside a search: its finalists, or the refit of their winner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console

from hpsearch.objectives.loading import load_objective
from hpsearch.search.console import command
from hpsearch.search.errors import SearchError
from hpsearch.search.fleet.fleet import Fleet
from hpsearch.search.run.drive import drive, open_run, tell_outbox
from hpsearch.search.services import Services
from hpsearch.search.study.checkpoints import note_checkpoints
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.tracking import with_tracking
from hpsearch.search.tracking.readers import check_readers
from hpsearch.search.worker.options import WorkerOptions
from hpsearch.storage.attributes import STOPPED, TRACKING_URI
from hpsearch.storage.checkpoints.store import Checkpoints


@dataclass(frozen=True)
class Beside:
    """A study beside a search, whether it was made now, its services, and why MLflow is away where it is."""

    study: StoredStudy
    created: bool
    services: Services
    away: str | None


def open_beside(
    services: Services, search: StoredStudy, options: WorkerOptions, make: Callable[[], tuple[StoredStudy, bool]]
) -> Beside:
    """Make or join a study beside a search, with a run in MLflow.

    Raises:
        SearchError: the search is none, or has nothing to train again.
        StorageError: a service cannot be used.
    """
    if options.checkpoint_url is not None:
        Checkpoints(options.checkpoint_url).check()
    if (of := search.spec.finalists_of) is not None:
        raise SearchError(f"study {search.spec.name!r} holds {of.what}: {search.go_on}")
    services = with_tracking(services, search)
    study, created = make()
    study.set_attr(TRACKING_URI, services.open_tracking().uri)
    away = open_run(services, study, required=False)
    if options.checkpoint_url is not None:
        note_checkpoints(study, options.checkpoint_url)
    return Beside(study, created, services, away)


def train_beside(console: Console, beside: Beside, options: WorkerOptions, workers: int) -> tuple[bool, Fleet | None]:
    """Train what is left by so many workers, and tell MLflow; return whether it was interrupted, and the fleet.

    Raises:
        SearchError: the study was stopped.
        ObjectiveError: the objective cannot be loaded.
    """
    study, services = beside.study, beside.services
    if beside.away:
        console.print(f"{beside.away}; what is logged waits in {services.home / 'outbox'}", style="yellow")
    interrupted, fleet = False, None
    if workers:
        check_readers(study.spec)
        if why := study.attrs.get(STOPPED):
            raise SearchError(
                f"study {study.spec.name!r} was stopped {why}: start it with {command('start', study.spec.name)}"
            )
        if warning := study.source_warning(load_objective(study.spec.objective)):
            console.print(f"warning: {warning}", style="yellow")
        interrupted, fleet = drive(console, services, study, workers, options)
    tell_outbox(console, services, study, interrupted=interrupted)
    return interrupted, fleet
