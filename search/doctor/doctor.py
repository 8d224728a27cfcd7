"""Run the checks of `hpsearch doctor` and print their results."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import optuna
from rich.text import Text

from hpsearch.search.console import format_command
from hpsearch.search.doctor.checks import (
    IMPORT_CHECKS,
    STUDY_CHECKS,
    Checker,
    Finding,
    Status,
    check_artifacts,
    check_cores,
    check_free_space,
    check_gpus,
    check_home,
    check_store,
    check_tracking,
    check_versions,
)
from hpsearch.search.doctor.database import DATABASE_CHECKS, run_database_check
from hpsearch.search.services import check_pair
from hpsearch.search.study.checkpoints import read_checkpoint_url
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.storage.attributes import TRACKING_URI
from hpsearch.storage.database.libpq import list_variables
from hpsearch.storage.embedded import stack
from hpsearch.storage.home import prepare_home
from hpsearch.storage.mlflow.credentials import allow_credentials
from hpsearch.storage.study_storage.storage import open_storage


def run_checks(
    study: str | None = None,
    *,
    storage_url: str | None = None,
    tracking_uri: str | None = None,
    checkpoint_url: str | None = None,
    home: str | None = None,
    import_objective: bool = False,
) -> Iterator[Finding]:
    """Run all checks on this machine and yield their findings; start no services, and leave no test files.

    Args:
        study: name of a study that a worker on this machine should join; None checks no study.
        storage_url: database URL; None selects the database of the embedded stack, if the stack runs.
        tracking_uri: MLflow server; None selects the server of the embedded stack or of the study.
        checkpoint_url: address of the checkpoints; None selects the study's address, or else a folder in the home
            folder.
        home: home folder, with the embedded stack, runs and logs; None selects the default folder.
        import_objective: whether to import the study's objective; otherwise its file is only located and compared.

    Raises:
        SearchError: the study does not exist, or `tracking_uri` is given without `storage_url`.
        StorageError: the home folder is unusable, or the database URL is invalid.
    """
    check_pair({"storage_url": storage_url, "tracking_uri": tracking_uri}, both=False)
    folder = prepare_home(home)
    running = None if storage_url is not None else stack.find_running(folder)
    database = storage_url if running is None else running.storage_url
    checker = Checker([url for url in (database, checkpoint_url) if url])
    given = "--storage-url" if running is None else "embedded Postgres"
    first = [checker.run("services", partial(_check_services, folder, storage_url, running))]
    for name, look, need in DATABASE_CHECKS:
        first.append(checker.run(name, partial(run_database_check, look, database or "", given), need))
    # Opened before the first finding is printed, so that the error of a missing study is the only output.
    found = _open_study(study, database) if study is not None and database and checker.has_passed("rights") else None
    yield from first

    is_unread, attrs = study is not None and found is None, found.attrs if found is not None else {}
    configured = tracking_uri or (running.tracking_uri if running is not None else None)
    if configured is not None:
        allow_credentials(configured)
    server = configured or attrs.get(TRACKING_URI)
    if server is not None:
        yield checker.run("mlflow", partial(check_tracking, server))
    else:
        yield checker.run("mlflow", partial(_report_missing_server, found), "rights" if is_unread else "services")
    yield checker.run("artifacts", partial(check_artifacts, server or ""), "mlflow")
    study_checks = (*STUDY_CHECKS, *(IMPORT_CHECKS if import_objective else ()))
    for name, look, need in study_checks if study is not None else ():
        yield checker.run(name, partial(look, found), need)
    needs = ("rights",) if is_unread and checkpoint_url is None else ()
    yield checker.run("checkpoints", partial(_check_checkpoints, found, checkpoint_url, folder), *needs)
    yield checker.run("cpu", check_cores)
    yield checker.run("gpu", check_gpus)
    yield checker.run("home", partial(check_home, folder))
    yield checker.run("disk", partial(check_free_space, folder))
    yield checker.run("versions", check_versions)


def _check_services(home: Path, storage_url: str | None, running: stack.StackInfo | None) -> Finding:
    if storage_url is not None:
        used = f"; libpq also uses {', '.join(names)}" if (names := list_variables()) else ""
        return Finding("ok", f"the services given by --storage-url{used}")
    if running is not None:
        return Finding("ok", f"the embedded services in {home}")
    states = ", ".join(f"{service.name} {service.state}" for service in stack.read_status(home))
    return Finding(
        "failed",
        f"no --storage-url is given, and the embedded services in {home} are not running ({states})",
        f"run '{format_command('up')}', or give --storage-url and --tracking-uri",
    )


def _check_checkpoints(study: StoredStudy | None, url: str | None, home: Path) -> Finding:
    """Check the checkpoint store, but not one that only a backup names and the user has not confirmed."""
    if url is None and study is not None and (url := read_checkpoint_url(study)) is not None:
        study.check_restored()
    return check_store(url or str(home / "checkpoints"))


def _open_study(name: str, url: str) -> StoredStudy:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return load_study(open_storage(url, application_name="hpsearch doctor"), name)


def _report_missing_server(study: StoredStudy | None) -> Finding:
    if study is not None:
        return Finding("failed", f"study {study.spec.name!r} has no MLflow server", "give --tracking-uri")
    return Finding("skipped", "no MLflow server to check; give --tracking-uri, or STUDY to check the server of a study")


_COLOURS: dict[Status, str] = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
_STATUS, _NAME = 9, 13  # widths of the columns


def format_finding(finding: Finding, columns: int | None) -> Text:
    """Return a finding as text, wrapped at `columns` characters; if `columns` is None, the text is not wrapped."""
    head = f"{finding.status:{_STATUS}}{finding.check:{_NAME}}"
    line = head + finding.found + (f": {finding.remedy}" if finding.remedy else "")
    if columns is not None:
        indent, width = " " * len(head), max(columns, 2 * len(head))
        line = textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    text = Text(line)
    text.stylize(_COLOURS[finding.status], 0, len(finding.status))
    return text


def format_status_counts(findings: Iterable[Finding]) -> str:
    """Return the number of checks per status as text: ``14 ok, 1 with a warning, 1 failed``."""
    counts = Counter(finding.status for finding in findings)
    words = {"ok": "ok", "warning": "with a warning", "failed": "failed", "skipped": "skipped"}
    return ", ".join(f"{counts[status]} {said}" for status, said in words.items() if counts[status])  # type: ignore[index]  # a status is one of these words
