"""The Optuna dashboard as a WSGI application that also shows MLflow artifacts."""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpsearch.storage.database.connect import check_database, make_engine
from hpsearch.storage.errors import StorageError
from hpsearch.storage.mlflow.artifacts import ATTR_PREFIX
from hpsearch.storage.rungs.fronts import find_front, to_losses
from hpsearch.storage.study_storage.storage import PostgresStorage
from hpsearch.storage.urls import normalise_url

if TYPE_CHECKING:
    from hpsearch.storage.mlflow.artifacts import MlflowArtifactStore

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_READ_METHODS = ("GET", "HEAD", "OPTIONS")

_Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def serve_dashboard(
    url: str, *, host: str, port: int, artifacts: MlflowArtifactStore | None = None, read_only: bool = False
) -> None:
    """Serve the dashboard of the studies at `url` until the process ends.

    Args:
        url: Postgres URL; the worker role is sufficient.
        host: address to listen on. The dashboard has no authentication: every client can delete studies.
        port: port to listen on.
        artifacts: store with the trials' artifacts, which the dashboard then displays; None to display no artifacts.
        read_only: whether to reject requests that may change data.

    Raises:
        StorageError: the database cannot be used, or the address cannot be bound.
    """
    import waitress

    check_database(url)
    app = _make_app(normalise_url(url), artifacts)
    if read_only:
        app = _reject_writes(app)
    if host in _LOOPBACK:
        app = _reject_foreign_origins(app)
    try:
        server = waitress.create_server(
            app, host=host, port=port, threads=8, ident=None,
            # Redirects must keep the scheme of a TLS proxy; no other forwarded header is trusted.
            trusted_proxy="*", trusted_proxy_headers={"x-forwarded-proto"}, clear_untrusted_proxy_headers=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise StorageError(f"--port {port} is in use on {host}; choose another port") from None
        raise StorageError(f"cannot listen on --host {host!r} --port {port} ({error})") from None
    server.run()


def _make_app(url: str, artifacts: MlflowArtifactStore | None) -> _Wsgi:
    import optuna_dashboard
    from optuna_dashboard import _app

    _app.get_pareto_front_trials = find_feasible_front  # there is no setting for this function
    engine = make_engine(url, application_name="hpsearch-dashboard", pool_size=4, pre_ping=False)
    app: _Wsgi = optuna_dashboard.wsgi(DashboardStorage(engine, retry_seconds=10.0), artifact_store=artifacts)
    return app


def _reject_writes(app: _Wsgi) -> _Wsgi:
    """Wrap an application so that it rejects requests with a method that may change data."""
    reason = b'{"reason": "This dashboard is read-only."}\n'  # the format of the dashboard's own errors
    return _guard(app, lambda environ: environ["REQUEST_METHOD"] in _READ_METHODS, "application/json", reason)


def _reject_foreign_origins(app: _Wsgi) -> _Wsgi:
    """Wrap an application so that it rejects requests that another web site sends through the user's browser.

    The Host header reveals DNS rebinding (a foreign name that resolves to 127.0.0.1). The Origin header reveals
    cross-site requests.
    """

    def is_allowed(environ: dict[str, Any]) -> bool:
        host = f"//{environ.get('HTTP_HOST', '')}"
        return all(_parse_hostname(value) in _LOOPBACK for value in (host, environ.get("HTTP_ORIGIN") or host))

    reason = b"This dashboard answers to 127.0.0.1 and localhost only.\n"
    return _guard(app, is_allowed, "text/plain; charset=utf-8", reason)


def _guard(app: _Wsgi, is_allowed: Callable[[dict[str, Any]], bool], content_type: str, reason: bytes) -> _Wsgi:
    """Wrap an application so that it answers requests that are not allowed with status 403 and the reason."""

    def answer_if_allowed(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if is_allowed(environ):
            return app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", content_type)])
        return [reason]

    return answer_if_allowed


def _parse_hostname(value: str) -> str | None:
    try:
        return urlsplit(value).hostname
    except ValueError:
        return None


_WITH_ARTIFACTS = """
    SELECT DISTINCT trial_id FROM trial_system_attributes
     WHERE trial_id = ANY(:trials) AND starts_with(key, :prefix)
"""


class DashboardStorage(PostgresStorage):
    """Study storage that reads a finished trial again after its artifacts have reached MLflow.

    The base class reads a finished trial only once. But artifacts are uploaded in the background, after the trial has
    ended, and the list of artifacts is an attribute of the trial.
    """

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        trials = super().get_all_trials(study_id, deepcopy=False, states=states)
        lacking = [trial._trial_id for trial in trials if trial.state.is_finished() and not _has_artifact_list(trial)]
        arguments = {"trials": lacking, "prefix": ATTR_PREFIX}
        found = self._database.fetch_rows(_WITH_ARTIFACTS, arguments) if lacking else []
        for row in found:
            self.refresh_trial(row.trial_id)
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
