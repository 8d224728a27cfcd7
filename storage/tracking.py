"""What MLflow is told: one parent run per study, one child run per trial, by client calls alone.

The fluent API is per process and thread, and its `start_run` overwrites a run's status; a service uses the client.
"""

from __future__ import annotations

import getpass
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from storage.errors import StorageError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

log = logging.getLogger(__name__)

EXPERIMENT = "hpsearch"

# Tags of ours on runs: found by them, a run is never created twice.
STUDY, TRIAL, STATE, REASON = "hpsearch.study", "hpsearch.trial", "hpsearch.state", "hpsearch.reason"
STUDY_ID = "hpsearch.study_id"
MODEL_ID = "hpsearch.model_id"
FINALIST_OF, SEED = "hpsearch.finalist_of", "hpsearch.seed"  # of a finalist's run: the trial it repeats, on which seed

# MLflow knows no PRUNED: KILLED tells it from FINISHED in lists, the state tag tells it from a run that was killed.
STATUS_OF = {
    "COMPLETE": "FINISHED",
    "PRUNED": "KILLED",
    "CANCELLED": "KILLED",
    "INFEASIBLE": "FAILED",
    "FAIL": "FAILED",
}
State = Literal["COMPLETE", "PRUNED", "CANCELLED", "INFEASIBLE", "FAIL"]

_CLIENT_SETTINGS = {
    # The defaults block a call to a dead server for four minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


def check_server(uri: str, *, setting: str = "--tracking-uri") -> None:
    """Ask the tracking server for its health.

    Raises:
        StorageError: `uri` is not an HTTP address, or no MLflow server answers there.
    """
    parts = urlsplit(uri)
    shown = uri if "@" not in parts.netloc else uri.replace(parts.netloc, parts.netloc.rpartition("@")[2])
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise StorageError(f"{setting} {shown}: must be the http(s):// address of an MLflow tracking server")
    if "@" in parts.netloc:
        raise StorageError(
            f"{setting} {shown}: must not hold a password; set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD instead"
        )
    remedy = "start the MLflow server, or correct the address"
    try:
        with urllib.request.urlopen(uri.rstrip("/") + "/health", timeout=5) as reply:  # noqa: S310 scheme was checked
            if reply.status == 200 and reply.read(16).strip() == b"OK":
                return
        raise StorageError(f"{setting} {shown}: what answers there is not an MLflow server; {remedy}")
    except urllib.error.HTTPError as error:
        raise StorageError(f"{setting} {shown}: answers {error.code} {error.reason}; {remedy}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise StorageError(f"{setting} {shown}: no MLflow server answers ({reason}); {remedy}") from None


class Tracking:
    """The tracking server and the one experiment in it that holds all studies.

    Args:
        uri: the server's address.
        experiment: the experiment's name; made if there is none.
        ui_url: where browsers reach the server, for links; `uri` unless given.
    """

    def __init__(self, uri: str, *, experiment: str = EXPERIMENT, ui_url: str | None = None) -> None:
        for name, value in _CLIENT_SETTINGS.items():
            os.environ.setdefault(name, value)
        _reach_loopback_directly(uri)
        import mlflow

        logging.getLogger("mlflow").setLevel(logging.ERROR)
        mlflow.set_tracking_uri(uri)
        self.uri = uri.rstrip("/")
        self._ui_url = (ui_url or uri).rstrip("/")
        self.client: MlflowClient = mlflow.MlflowClient(tracking_uri=uri)
        self.experiment_id = self._experiment(experiment)
        mlflow.set_experiment(experiment_id=self.experiment_id)  # where logged models go

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = self.client.get_experiment_by_name(name)
        if found is None:
            try:
                # The kind that the UI itself gives to experiments of model training.
                tags = {"mlflow.experimentKind": "custom_model_development"}
                return str(self.client.create_experiment(name, tags=tags))
            except MlflowException:
                found = self.client.get_experiment_by_name(name)  # another process was faster
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            raise StorageError(
                f"MLflow experiment {name!r} is deleted; restore it in the MLflow UI or with "
                f"'mlflow experiments restore --experiment-id {found.experiment_id}'"
            )
        return str(found.experiment_id)

    def run_url(self, run_id: str) -> str:
        """Return the page of a run in the MLflow UI, in the view that has models and their "Register model"."""
        return f"{self._ui_url}/#/experiments/{self.experiment_id}/runs/{run_id}?workflowType=machine_learning"

    def study_run(self, study_name: str, study_id: int, *, params: Mapping[str, object], known: str | None) -> str:
        """Return the id of the study's parent run, creating it if need be; call it under the study's lock.

        Args:
            study_name: the study's name, which the run gets.
            study_id: the study's id in the database.
            params: the spec, logged as the run's parameters.
            known: the run's id, when the study has it noted.
        """
        if known is not None and self._exists(known):
            return known
        # A study deleted and made again under its name is another study: its number tells them apart.
        if found := self._find(f"tags.`{STUDY_ID}` = '{study_id}' AND tags.`{STUDY}` = '{study_name}'", child=False):
            return found
        run = self._create(study_name, {STUDY: study_name, STUDY_ID: str(study_id)})
        self._log_params(run, params)
        return run

    def trial_run(self, study_name: str, number: int, *, parent: str, known: str | None, search: bool) -> TrialRun:
        """Open the child run of a trial.

        Args:
            study_name: the study's name.
            number: the trial's number in it.
            parent: the run of the study.
            known: the run's id, when the trial has it noted.
            search: look for a run of the trial before making one (it was started before and has none noted).
        """
        if known is None and search:
            # By the study's name too: its finalists, whose trials are numbered anew, have the same parent.
            mine = f"tags.`{STUDY}` = '{study_name}' AND tags.`{TRIAL}` = '{number}'"
            known = self._find(f"tags.`mlflow.parentRunId` = '{parent}' AND {mine}", child=True)
        if known is not None and self._exists(known):
            self.client.update_run(known, status="RUNNING")
            return TrialRun(self, known)
        tags = {STUDY: study_name, TRIAL: str(number), "mlflow.parentRunId": parent}
        return TrialRun(self, self._create(f"{study_name}-{number:04d}", tags))

    def open_trial_runs(self, study_name: str, parent: str) -> dict[int, str]:
        """Return the runs of a study's trials that nobody has ended: trial number to run id."""
        under = f"tags.`mlflow.parentRunId` = '{parent}' AND tags.`{STUDY}` = '{study_name}'"
        query = f"attributes.status = 'RUNNING' AND {under}"
        runs: list[Run] = self.client.search_runs([self.experiment_id], query, max_results=1000)
        return {int(run.data.tags[TRIAL]): str(run.info.run_id) for run in runs if TRIAL in run.data.tags}

    def reopen(self, run_id: str) -> None:
        """Set a run to RUNNING, such as a study's that goes on."""
        self.client.update_run(run_id, status="RUNNING")

    def schedule(self, run_id: str) -> None:
        """Set the ended run of a trial to SCHEDULED: it waits for another attempt, which goes on with the run."""
        self.client.set_tag(run_id, STATE, "waiting")
        self.client.set_tag(run_id, REASON, "")
        self.client.update_run(run_id, status="SCHEDULED")

    def end_study_run(
        self, run_id: str, *, tags: Mapping[str, str], metrics: Mapping[str, float], step: int, finished: bool
    ) -> None:
        """Write what came of a study to its parent run, and end the run when the study is `finished`."""
        from mlflow.entities import Metric, RunTag

        now = int(time.time() * 1000)
        self.client.log_batch(
            run_id,
            metrics=[Metric(key, value, now, step) for key, value in metrics.items()],
            tags=[RunTag(key, value) for key, value in tags.items()],
        )
        if finished:
            self.client.set_terminated(run_id, status="FINISHED", end_time=now)

    def annotate(self, run_id: str, *, tags: Mapping[str, str], metrics: Mapping[str, float], at: float) -> None:
        """Add tags and metrics to a run that has ended; said again with the same time, a metric is there once.

        Args:
            run_id: the run, which keeps its status.
            tags: to set.
            metrics: to log, at step 0.
            at: unix seconds.
        """
        from mlflow.entities import Metric, RunTag

        self.client.log_batch(
            run_id,
            metrics=[Metric(key, value, int(at * 1000), 0) for key, value in metrics.items()],
            tags=[RunTag(key, value) for key, value in tags.items()],
        )

    def log_file(self, run_id: str, path: Path) -> None:
        """Upload a file to a run."""
        self.client.log_artifact(run_id, str(path))

    def _exists(self, run_id: str) -> bool:
        """Whether this server has the run: a study may move to another tracking server."""
        from mlflow.exceptions import MlflowException

        try:
            return str(self.client.get_run(run_id).info.lifecycle_stage) == "active"
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise

    def _find(self, query: str, *, child: bool) -> str | None:
        runs: list[Run] = self.client.search_runs([self.experiment_id], query, max_results=5)
        for run in runs:
            if ("mlflow.parentRunId" in run.data.tags) == child:
                return str(run.info.run_id)
        return None

    def _create(self, name: str, tags: Mapping[str, str]) -> str:
        tags = {**tags, "mlflow.user": _user(), "mlflow.source.name": "hpsearch"}
        return str(self.client.create_run(self.experiment_id, tags=dict(tags), run_name=name).info.run_id)

    def _log_params(self, run_id: str, params: Mapping[str, object]) -> None:
        from mlflow.entities import Param

        self.client.log_batch(run_id, params=[Param(k, str(v)) for k, v in params.items()])


class TrialRun:
    """The MLflow run of one trial. Metrics are sent by a thread of its own; nothing here fails a trial."""

    def __init__(self, tracking: Tracking, run_id: str) -> None:
        self._tracking = tracking
        self._client = tracking.client
        self.run_id = run_id
        self.url = tracking.run_url(run_id)
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlflow")
        self._pending: list[Future[None]] = []
        self.errors: list[str] = []

    def log_params(self, params: Mapping[str, object]) -> None:
        """Log parameters, in the background."""
        self._submit("parameters", self._tracking._log_params, self.run_id, params)

    def log_epoch(self, epoch: int, timestamp: float, metrics: Mapping[str, float]) -> None:
        """Log an epoch's metrics as one batch, in the background.

        The timestamp (unix seconds) is the epoch's own: MLflow keeps one copy of an equal (key, time, step, value),
        so that an epoch sent again after a crash is still there once.
        """
        from mlflow.entities import Metric

        batch = [Metric(key, float(value), int(timestamp * 1000), epoch) for key, value in metrics.items()]
        self._submit(f"metrics of epoch {epoch}", self._client.log_batch, self.run_id, metrics=batch)

    def log_file(self, path: Path, *, folder: str | None = None) -> None:
        """Upload a file, in the background."""
        self._submit(path.name, self._client.log_artifact, self.run_id, str(path), folder)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags, in the background."""
        from mlflow.entities import RunTag

        # MLflow refuses a tag's value of over 8,000 characters.
        batch = [RunTag(key, value[:5000]) for key, value in tags.items()]
        self._submit("tags", self._client.log_batch, self.run_id, tags=batch)

    def tag(self, key: str) -> str | None:
        """Return a tag of the run as the server has it."""
        value = self._client.get_run(self.run_id).data.tags.get(key)
        return None if value is None else str(value)

    def _submit(self, what: str, call: object, *args: object, **kwargs: object) -> None:
        def send() -> None:
            if self.errors:
                return  # the server is away: waiting for it once is enough, the trial's end tries again
            try:
                call(*args, **kwargs)  # type: ignore[operator]
            except Exception as error:  # the tracking server must never end a training run
                self.failed(what, error)

        self._pending.append(self._sender.submit(send))

    def failed(self, what: str, error: Exception) -> None:
        """Note and log that something did not reach the server."""
        self.errors.append(f"{what}: {' '.join(str(error).split())[:200]}")
        log.warning("MLflow did not take %s of run %s: %s", what, self.run_id, self.errors[-1])

    def flush(self) -> None:
        """Wait until all that was logged has been sent, or has failed."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def finish(self, state: State, reason: str) -> None:
        """End the run with the status of a trial's `state`, its reason as a tag and as the run's note."""
        from mlflow.entities import RunTag

        self.flush()
        try:
            tags = [RunTag(STATE, state.lower()), RunTag(REASON, reason[:5000])]
            self._client.log_batch(self.run_id, tags=tags)
            self._client.set_terminated(self.run_id, status=STATUS_OF[state], end_time=int(time.time() * 1000))
        except Exception as error:  # as above
            self.failed("the end", error)
        self.close()

    def close(self) -> None:
        """Stop the sender after what it has; the run stays open for a later attempt."""
        self.flush()
        self._sender.shutdown()


def _reach_loopback_directly(uri: str) -> None:
    """Keep requests to this machine's own server away from a configured proxy, which could not reach it."""
    host = urlsplit(uri).hostname or ""
    for name in ("NO_PROXY", "no_proxy"):
        known = os.environ.get(name, "")
        if host in {"127.0.0.1", "localhost", "::1"} and host not in known.split(","):
            os.environ[name] = f"{known},{host}".lstrip(",")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a passwd entry
        return f"uid-{os.getuid()}"
