"""The Optuna dashboard as a WSGI application, with the files that MLflow stores."""

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
from hpsearch.storage.mlflow.artifacts import PREFIX
from hpsearch.storage.rungs.fronts import front, losses_of
from hpsearch.storage.study_storage.storage import PostgresStorage
from hpsearch.storage.urls import normalise

if TYPE_CHECKING:
    from hpsearch.storage.mlflow.artifacts import RunArtifacts

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_READING = ("GET", "HEAD", "OPTIONS")

_Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def serve_dashboard(
    url: str, *, host: str, port: int, artifacts: RunArtifacts | None = None, read_only: bool = False
) -> None:
    """Serve the dashboard of the studies at `url` until the process is ended.

    Args:
        url: Postgres URL; a role that may read and write rows is enough.
        host: Address to listen on. The dashboard knows no users: whoever reaches it can delete studies.
        port: Port to listen on.
        artifacts: What the trials left in MLflow, to be shown beside them.
        read_only: Whether it only shows, and refuses to delete, rename or note.

    Raises:
        StorageError: The database cannot be used, or the address cannot be listened on.
    """
    import waitress

    check_database(url)
    app = _application(normalise(url), artifacts)
    if read_only:
        app = _read_only(app)
    if host in _LOOPBACK:
        app = _local_only(app)
    try:
        server = waitress.create_server(
            app, host=host, port=port, threads=8, ident=None,
            # Behind a proxy with TLS its redirects have to lead there again; nothing else is believed of these headers.
            trusted_proxy="*", trusted_proxy_headers={"x-forwarded-proto"}, clear_untrusted_proxy_headers=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise StorageError(f"--port {port} is in use on {host}: choose another with --port") from None
        raise StorageError(f"--host {host!r} --port {port} cannot be listened on ({error})") from None
    server.run()


def _application(url: str, artifacts: RunArtifacts | None) -> _Wsgi:
    import optuna_dashboard
    from optuna_dashboard import _app

    _app.get_pareto_front_trials = feasible_front  # there is no setting for it
    engine = make_engine(url, application_name="hpsearch-dashboard", pool_size=4, pre_ping=False)
    app: _Wsgi = optuna_dashboard.wsgi(DashboardStorage(engine, patience=10.0), artifact_store=artifacts)
    return app


def _read_only(app: _Wsgi) -> _Wsgi:
    """Refuse all requests but those that read: the dashboard's pages send no other until somebody changes something."""
    reason = b'{"reason": "This dashboard is read-only."}\n'  # as its own errors are, which its pages show
    return _guarded(app, lambda environ: environ["REQUEST_METHOD"] in _READING, "application/json", reason)


def _local_only(app: _Wsgi) -> _Wsgi:
    """Refuse requests that a foreign web page makes the user's browser send here.

    A page may point a name of its own at 127.0.0.1 and then read and delete studies as if they were its own, or post
    to the address itself: the first shows in the Host header, the second in Origin.
    """

    def is_allowed(environ: dict[str, Any]) -> bool:
        host = f"//{environ.get('HTTP_HOST', '')}"
        return all(_hostname(value) in _LOOPBACK for value in (host, environ.get("HTTP_ORIGIN") or host))

    reason = b"This dashboard answers to 127.0.0.1 and localhost only.\n"
    return _guarded(app, is_allowed, "text/plain; charset=utf-8", reason)


def _guarded(app: _Wsgi, is_allowed: Callable[[dict[str, Any]], bool], content_type: str, reason: bytes) -> _Wsgi:
    """Answer the other requests with 403 and the reason."""

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if is_allowed(environ):
            return app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", content_type)])
        return [reason]

    return guarded


def _hostname(value: str) -> str | None:
    try:
        return urlsplit(value).hostname
    except ValueError:
        return None


_LISTED = """
    SELECT DISTINCT trial_id FROM trial_system_attributes
     WHERE trial_id = ANY(:trials) AND starts_with(key, :prefix)
"""


class DashboardStorage(PostgresStorage):
    """Reads a finished trial once more when its files have reached MLflow.

    To other processes a finished trial is final, and they keep it for good; files arrive in the background, later.
    """

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        trials = super().get_all_trials(study_id, deepcopy=False, states=states)
        lacking = [trial._trial_id for trial in trials if trial.state.is_finished() and not _lists_files(trial)]
        found = self._database.rows(_LISTED, {"trials": lacking, "prefix": PREFIX}) if lacking else []
        for row in found:
            self.read_again(row.trial_id)
        if found or deepcopy:
            trials = super().get_all_trials(study_id, deepcopy=deepcopy, states=states)
        return [in_older_form(trial) for trial in trials]

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        best = super().get_best_trial(study_id)
        if is_feasible(best):
            return best
        complete = self.get_all_trials(study_id, deepcopy=False, states=[TrialState.COMPLETE])
        within = [trial for trial in complete if is_feasible(trial) and trial.value is not None]
        maximize = self.get_study_directions(study_id)[0] == StudyDirection.MAXIMIZE
        return min(within, key=lambda trial: (-1 if maximize else 1) * (trial.value or 0.0), default=best)


def _lists_files(trial: FrozenTrial) -> bool:
    return any(key.startswith(PREFIX) for key in trial.system_attrs)


_OLDER = "constraints"  # the system attribute: numbers without names, positive where one is broken


def in_older_form(trial: FrozenTrial) -> FrozenTrial:
    """Return a trial with its constraints as the dashboard's pages read them, or the trial itself if it has none."""
    if not trial.constraints or _OLDER in trial.system_attrs:
        return trial
    told = copy.copy(trial)  # the other is in the storage's cache
    told._system_attrs = {**trial.system_attrs, _OLDER: list(trial.constraints.values())}
    return told


def is_feasible(trial: FrozenTrial) -> bool:
    """Whether a trial breaks no constraint."""
    return all(over <= 0 for over in trial.constraints.values())


def feasible_front(trials: Sequence[FrozenTrial], directions: Sequence[StudyDirection]) -> list[FrozenTrial]:
    """Return the feasible COMPLETE trials that none dominates, by number: the dashboard's own front ignores bounds."""
    ended = [trial for trial in trials if trial.state == TrialState.COMPLETE and trial.values and is_feasible(trial)]
    maximize = [direction == StudyDirection.MAXIMIZE for direction in directions]
    return [ended[place] for place in front(losses_of([trial.values for trial in ended], maximize))]
