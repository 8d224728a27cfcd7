"""``hpsearch sync``: send the records in this machine's outbox, and rebuild missing models of lost machines' trials."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from hpsearch.search.console import format_command, pluralize, show_steps
from hpsearch.search.errors import SearchError
from hpsearch.search.services import Services
from hpsearch.search.study.checkpoints import open_checkpoints
from hpsearch.search.study.folders import get_outbox_folder
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.search.study.study_tracking import get_tracking_uri
from hpsearch.search.tracking.rebuild import resend
from hpsearch.search.tracking.study_run import publish_result
from hpsearch.search.tracking.tracker import Tracker, make_optional_trackers
from hpsearch.short_lists import list_trials
from hpsearch.storage.attributes import REFUSED, TRACKING
from hpsearch.storage.errors import DamagedStudyError
from hpsearch.storage.journals.journal import JOURNAL_FILE
from hpsearch.storage.mlflow.health import TrackingUnavailableError, check_server
from hpsearch.storage.study_storage.storage import PostgresStorage


@dataclass(frozen=True)
class SyncResult:
    """The result of ``hpsearch sync``.

    Attributes:
        sent: number of trials whose records were all sent.
        unsent: number of trials with records that were not sent.
        problems: one line per trial whose missing records could not be rebuilt.
    """

    sent: int
    unsent: int
    problems: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether all trackers have all records of the study."""
        return not self.unsent and not self.problems


def find_studies_to_sync(storage: PostgresStorage, home: Path) -> list[StoredStudy]:
    """Return the studies of this database that have records in this machine's outbox."""
    found = []
    for summary in storage.get_all_studies():
        try:
            study = load_study(storage, summary.study_name)
            if get_outbox_folder(home, study).is_dir():
                found.append(study)
        except (SearchError, DamagedStudyError):  # such as a study of another program
            continue
    return found


def sync_study(services: Services, study: StoredStudy, console: Console) -> SyncResult:
    """Send the study's records in this machine's outbox, rebuild records of lost machines, and print the result.

    Raises:
        SearchError: the study has no tracking server, and none was given; or the user has to confirm the trackers of a
            restored study.
        StorageError: a service is unusable.
    """
    study.check_restored()
    name, tracking_error = study.spec.name, None
    uri = get_tracking_uri(services, study)  # read once: every worker's database role could change it after the check
    try:
        check_server(uri)
    except TrackingUnavailableError as error:
        if not make_optional_trackers(study, services.home):
            raise  # otherwise the other trackers still receive their records
        tracking_error = error
    tracking = services.open_tracking(uri)
    checkpoints = open_checkpoints(study, services.home, services.checkpoint_url)
    tracker = Tracker(study, tracking, checkpoints, services.home, should_retry_rejected=True)
    problems: list[str] = []
    with show_steps(console) as step:
        left = tracker.flush(step, then=lambda: problems.extend(resend(study, tracker, checkpoints, on_progress=step)))
    if tracking_error is not None and not left:
        raise tracking_error  # MLflow may lack records of a lost machine
    sent = len(tracker.sender.sent_trial_numbers - tracker.outbox.find_trial_numbers())
    text = f"{name}: {pluralize(sent, 'trial')} sent"
    for problem in problems:
        console.print(f"{name}, {problem}", style="yellow")
    if left:
        reason = f" ({tracker.sender.unavailable_reason})" if tracker.sender.unavailable_reason else ""
        damaged = tracker.outbox.find_damaged()
        for folder in damaged:
            console.print(
                f"{name}: the journal in {folder} is missing or damaged; restore {JOURNAL_FILE}, or give up its "
                f"records with: rm -r {shlex.quote(str(folder))}",
                style="yellow",
            )
        again = (
            ""
            if tracker.outbox.count_journals() == len(damaged)
            else f"; try again with: {format_command('sync', name)}"
        )
        console.print(f"{text}, {left} not sent{reason}{again}")
    else:
        report = publish_result(services, study, tracking)
        console.print(f"{text}, no unsent records are left")
        study.refresh()
        states = {trial.number: str(trial.user_attrs.get(TRACKING)) for trial in study.trials()}
        if refused := [number for number, state in states.items() if state.startswith(REFUSED)]:
            console.print(
                f"{name}: the tracking server lacks records of {list_trials(refused)}, because it rejected "
                "them or their journals were deleted",
                style="yellow",
            )
        if report is not None:
            console.print(f"report: {report}")
    return SyncResult(sent, left, tuple(problems))
