"""The Optuna dashboard as a WSGI application that also shows MLflow artifacts."""

from __future__ import annotations

import copy
import csv
import re
from collections.abc import Callable, Container, Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TextIO

from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from hpsearch.storage.database.connect import check_database, make_engine
from hpsearch.storage.display import escape_csv_cell
from hpsearch.storage.mlflow.artifacts import ATTR_PREFIX
from hpsearch.storage.rungs.fronts import find_front, to_losses
from hpsearch.storage.study_storage.storage import PostgresStorage
from hpsearch.storage.urls import normalise_url
from hpsearch.storage.web.guard import Wsgi
from hpsearch.storage.web.server import reject_unless, serve_wsgi

if TYPE_CHECKING:
    from hpsearch.storage.mlflow.artifacts import MlflowArtifactStore

_READ_METHODS = ("GET", "HEAD", "OPTIONS")


def serve_dashboard(
    url: str,
    *,
    host: str,
    port: int,
    artifacts: MlflowArtifactStore | None = None,
    read_only: bool = False,
    token: str | None = None,
) -> None:
    """Serve the dashboard of the studies at `url` until the process ends.

    Args:
        url: Postgres URL; the worker role is sufficient.
        host: address to listen on.
        port: port to listen on.
        artifacts: store with the trials' artifacts, which the dashboard then displays; None to display no artifacts.
        read_only: whether to reject requests that may change data.
        token: token that requests must have; None to accept requests without a token.

    Raises:
        StorageError: the database cannot be used, or the address cannot be bound.
    """
    check_database(url)
    app = _add_security_headers(_make_app(normalise_url(url), artifacts))
    if read_only:
        app = _reject_writes(app)
    serve_wsgi(app, host=host, port=port, token=token)


def _make_app(url: str, artifacts: MlflowArtifactStore | None) -> Wsgi:
    import optuna_dashboard
    from optuna_dashboard import _app

    # There are no settings for these functions.
    _app.get_pareto_front_trials = find_feasible_front
    _app.csv = SimpleNamespace(writer=_EscapingCsvWriter)
    engine = make_engine(url, application_name="hpsearch-dashboard", pool_size=4, pre_ping=False)
    app: Wsgi = optuna_dashboard.wsgi(DashboardStorage(engine, retry_seconds=10.0), artifact_store=artifacts)
    return app


class _EscapingCsvWriter:
    """Writer of the dashboard's CSV file, in which a spreadsheet finds no formulas."""

    def __init__(self, file: TextIO) -> None:
        self._writer = csv.writer(file)

    def writerow(self, row: Iterable[object]) -> None:
        """Write a row."""
        self._writer.writerow(map(escape_csv_cell, row))


def _reject_writes(app: Wsgi) -> Wsgi:
    """Wrap an application so that it rejects requests with a method that may change data."""
    reason = b'{"reason": "This dashboard is read-only."}\n'  # the format of the dashboard's own errors
    return reject_unless(app, lambda environ: environ["REQUEST_METHOD"] in _READ_METHODS, "application/json", reason)


_ARTIFACTS = "/artifacts/"
# The dashboard has inline styles, and plots with images from data URLs.
_PAGE_POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; worker-src 'self' blob:; object-src 'none'; base-uri 'self'; "
    "form-action 'self'; frame-ancestors 'none'"
)
_ARTIFACT_POLICY = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:; media-src 'self'"


_SAFE_TYPE = re.compile(r"((image|audio|video)/[\w.+-]+|text/plain)(; ?charset=[\w-]+)?", re.IGNORECASE)


def _add_security_headers(app: Wsgi) -> Wsgi:
    """Wrap an application so that browsers run no script but its own.

    Artifacts are downloads, as they may be HTML. Only some have their type, because others may be scripts, which a page
    could load. Bottle's route shows whether a reply is an artifact, because Bottle changes some paths first.
    """

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        def start(status: str, headers: list[tuple[str, str]], *error: Any) -> Any:
            route = environ.get("bottle.route")
            is_artifact = route is not None and route.rule.startswith(_ARTIFACTS)
            policy = _ARTIFACT_POLICY if route is None or is_artifact else _PAGE_POLICY
            added = [("Content-Security-Policy", policy), ("X-Content-Type-Options", "nosniff")]
            added += [("X-Frame-Options", "DENY"), ("Referrer-Policy", "same-origin")]
            if is_artifact:
                added.append(("Content-Disposition", "attachment"))
            replaced = {name.lower() for name, _ in added} | {"access-control-allow-origin"}
            kept = [header for header in headers if header[0].lower() not in replaced]
            types = [value for name, value in kept if name.lower() == "content-type"]
            if is_artifact and not any(map(_SAFE_TYPE.fullmatch, types)):
                kept = [header for header in kept if header[0].lower() != "content-type"]
                kept.append(("Content-Type", "application/octet-stream"))
            return start_response(status, [*kept, *added], *error)

        return app(environ, start)

    return answer


_WITH_ARTIFACTS = """
    SELECT DISTINCT trial_id FROM trial_system_attributes
     WHERE trial_id = ANY(:trials) AND starts_with(key, :prefix)
"""


_PLOT_PREFIX = "dashboard:plot_data:"  # of save_plotly_graph_object


class DashboardStorage(PostgresStorage):
    """Study storage that reads a finished trial again after its artifacts have reached MLflow.

    The base class reads a finished trial only once. But artifacts are uploaded in the background, after the trial has
    ended, and the list of artifacts is an attribute of the trial.

    It omits plots that are stored with a study. plotly.js inserts HTML of maps, which can open an address of another
    user in the browser. A worker can store such a plot.
    """

    def get_all_studies(self) -> list[FrozenStudy]:
        studies = super().get_all_studies()
        for study in studies:
            attrs = study.system_attrs.items()
            study.system_attrs = {key: value for key, value in attrs if not key.startswith(_PLOT_PREFIX)}
        return studies

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        trials = super().get_all_trials(study_id, deepcopy=False, states=states)
        lacking = [trial._trial_id for trial in trials if trial.state.is_finished() and not _has_artifact_list(trial)]
        arguments = {"trials": lacking, "prefix": ATTR_PREFIX}
        found = self._database.fetch_rows(_WITH_ARTIFACTS, arguments) if lacking else []
        for row in found:
            self.refresh_trial(study_id, row.trial_id)
        if found or deepcopy:
            trials = super().get_all_trials(study_id, deepcopy=deepcopy, states=states)
        return [add_legacy_constraints(trial) for trial in trials]

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        best = super().get_best_trial(study_id)
        if is_feasible(best):
            return best
        complete = self.get_all_trials(study_id, deepcopy=False, states=[TrialState.COMPLETE])
        within = [trial for trial in complete if is_feasible(trial) and trial.value is not None]
        maximize = self.get_study_directions(study_id)[0] == StudyDirection.MAXIMIZE
        return min(within, key=lambda trial: (-1 if maximize else 1) * (trial.value or 0.0), default=best)


def _has_artifact_list(trial: FrozenTrial) -> bool:
    return any(key.startswith(ATTR_PREFIX) for key in trial.system_attrs)


_LEGACY_CONSTRAINTS = "constraints"  # system attribute: a list of numbers without names, positive if violated


def add_legacy_constraints(trial: FrozenTrial) -> FrozenTrial:
    """Return a copy of a trial with constraints in the form that the dashboard reads; other trials are unchanged."""
    if not trial.constraints or _LEGACY_CONSTRAINTS in trial.system_attrs:
        return trial
    copied = copy.copy(trial)  # the original is in the cache of the storage
    copied._system_attrs = {**trial.system_attrs, _LEGACY_CONSTRAINTS: list(trial.constraints.values())}
    return copied


def is_feasible(trial: FrozenTrial) -> bool:
    """Return whether a trial violates no constraint."""
    return all(violation <= 0 for violation in trial.constraints.values())


def find_feasible_front(trials: Sequence[FrozenTrial], directions: Sequence[StudyDirection]) -> list[FrozenTrial]:
    """Return the Pareto front of the feasible COMPLETE trials, by number; Optuna's function ignores constraints."""
    ended = [trial for trial in trials if trial.state == TrialState.COMPLETE and trial.values and is_feasible(trial)]
    maximize = [direction == StudyDirection.MAXIMIZE for direction in directions]
    return [ended[place] for place in find_front(to_losses([trial.values for trial in ended], maximize))]
