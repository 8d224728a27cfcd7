"""Runs in MLflow: one parent run per study, one child run per trial, written with `MlflowClient` only.

MLflow's fluent API is not used, because it has state per process and thread, and `start_run` overwrites a run's status.
"""

from __future__ import annotations

import functools
import getpass
import inspect
import logging
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import tenacity

from hpsearch.kill_points import kill_point
from hpsearch.redaction import redact
from hpsearch.storage.errors import StorageError
from hpsearch.storage.journals.consumer import RunRejectedError
from hpsearch.storage.mlflow.credentials import check_credentials, restrict_client
from hpsearch.storage.mlflow.health import get_or_none, is_duplicate, is_retryable, iterate_pages
from hpsearch.storage.mlflow.locations import restrict_artifact_locations
from hpsearch.storage.mlflow.tag_names import MODEL_ID, NOTE, REASON, STATE, STUDY, STUDY_ID, TRIAL
from hpsearch.storage.trials.finishing import Outcome
from hpsearch.storage.web.token import AUTH_NAME

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Metric, Run

EXPERIMENT_NAME = "hpsearch"
_EXPERIMENT_NOTE = """Studies of hpsearch: a run per study, with a child run per trial.

- The best trials of a study: open the link "MLflow, all trials" that `hpsearch show` prints.
- The pruned trials: filter with `tags.hpsearch.state = 'pruned'`. They have no model.
"""

_CLIENT_SETTINGS = {
    # By default, a call to a dead server blocks for four minutes, and a request to create a run is repeated if its
    # reply was lost, which creates a second run. Callers retry the requests that are safe to repeat.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_TRACKING_AUTH": AUTH_NAME,  # token_auth.py, which changes requests to embedded services only
}


class RunDeletedError(RunRejectedError):
    """A run that a user deleted in the MLflow UI."""


# For requests that are safe to repeat, after an interruption or after another process has written the same row.
_retry = tenacity.retry(
    retry=tenacity.retry_if_exception(is_retryable) | tenacity.retry_if_exception(is_duplicate),
    stop=tenacity.stop_after_attempt(3),
    wait=tenacity.wait_random_exponential(multiplier=0.3, max=2.0),
    reraise=True,
)

_retry_duplicates = tenacity.retry(
    retry=tenacity.retry_if_exception(is_duplicate),
    stop=tenacity.stop_after_attempt(5),
    wait=tenacity.wait_random(max=0.5),
    reraise=True,
)


def check_mlflow_variables() -> None:
    """Check MLflow's environment variables, which MLflow reads at the first request.

    Raises:
        StorageError: a variable has an invalid value.
    """
    from mlflow import environment_variables

    known = vars(environment_variables)
    ranges = {  # of variables that MLflow or the HTTP client checks at each request only
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": (0, known["_MLFLOW_HTTP_REQUEST_MAX_RETRIES_LIMIT"].get()),
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": (0, known["_MLFLOW_HTTP_REQUEST_MAX_BACKOFF_FACTOR_LIMIT"].get()),
        "MLFLOW_HTTP_REQUEST_TIMEOUT": (1, 2**31 - 1),
    }
    for name in known.keys() & os.environ.keys():
        try:
            value = known[name].get()
        except ValueError:
            raise StorageError(f"{name} {os.environ[name]!r} is invalid; correct or unset the variable") from None
        low, high = ranges.get(name, (None, None))
        if low is not None and not low <= value <= high:
            raise StorageError(f"{name} must be in [{low}, {high}], not {value}; correct or unset the variable")


@functools.cache
def _unlock_import_hooks() -> None:
    """Change MLflow's import hooks so that an import does not wait for their lock.

    `mlflow.autolog()` imports packages while it holds this lock. Python holds its own import lock while it searches a
    module with MLflow's finder. So an import in another thread, such as the one that sends records, could block both
    threads forever. The finder needs no lock, because Python searches each module in one thread at a time.
    """
    from mlflow.utils.import_hooks import ImportHookFinder

    find_spec = ImportHookFinder.find_spec
    while callable(unlocked := inspect.getclosurevars(find_spec).nonlocals.get("f")):  # MLflow's decorators
        find_spec = unlocked
    ImportHookFinder.find_spec = find_spec


class Tracking:
    """The tracking server, and the experiment that contains the runs of all studies.

    No connection is opened before the first request.

    Args:
        uri: the address of the server.
        experiment: the name of the experiment, which is created if it is missing.
        ui_url: the address of the server in links for browsers; None to use `uri`.

    Raises:
        CredentialsWithheldError: this process has credentials, and the user has not configured this address.
        StorageError: `uri` is not an HTTP address, or an environment variable of MLflow has an invalid value.
    """

    def __init__(self, uri: str, *, experiment: str = EXPERIMENT_NAME, ui_url: str | None = None) -> None:
        if not uri.lower().startswith(("http://", "https://")):  # MLflow would open a database or a folder
            raise StorageError(f"{redact(uri)} must be the http(s):// address of an MLflow tracking server")
        check_credentials(uri)
        for name, value in _CLIENT_SETTINGS.items():
            os.environ.setdefault(name, value)
        restrict_client(uri)
        _reach_loopback_directly(uri)
        import mlflow

        _unlock_import_hooks()
        check_mlflow_variables()
        logging.getLogger("mlflow").setLevel(logging.ERROR)
        restrict_artifact_locations(uri)
        mlflow.set_tracking_uri(uri)
        self.uri = uri.rstrip("/")
        self._ui_url = (ui_url or uri).rstrip("/")
        self._experiment = experiment
        # The registry of the same server: MLFLOW_REGISTRY_URI may name another one, which has no runs of the studies.
        self.client: MlflowClient = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)

    @functools.cached_property
    def experiment_id(self) -> str:
        """The id of the experiment, which is created if it is missing.

        Raises:
            StorageError: the experiment was deleted.
            MlflowException: the server does not answer, or rejects the request.
        """
        from mlflow.exceptions import MlflowException

        name = self._experiment
        found = self.client.get_experiment_by_name(name)
        if found is None:
            try:
                # The kind that the MLflow UI gives to experiments for model training.
                tags = {"mlflow.experimentKind": "custom_model_development", NOTE: _EXPERIMENT_NOTE}
                return str(self.client.create_experiment(name, tags=tags))
            except MlflowException:
                found = self.client.get_experiment_by_name(name)  # another process has just created the experiment
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            raise StorageError(_describe_deletion(found))
        return str(found.experiment_id)

    def run_url(self, run_id: str) -> str:
        """Return the URL of a run in the MLflow UI, in the view with the button "Register model"."""
        return f"{self._ui_url}/#/experiments/{self.experiment_id}/runs/{run_id}?workflowType=machine_learning"

    def ensure_study_run(
        self,
        study_name: str,
        study_id: int,
        *,
        params: Mapping[str, object],
        known_run_id: str | None,
        before_create: Callable[[], object] = lambda: None,
    ) -> str:
        """Return the id of the study's parent run, which is created if it is missing; the caller holds `study_lock`.

        Args:
            study_name: the name of the study and of the run.
            study_id: the id of the study in the database.
            params: the spec, logged as the run's parameters.
            known_run_id: the run id that is stored in the study; None if no id is stored.
            before_create: a function that is called before a run is created; it raises an exception to prevent this.
        """
        if known_run_id is not None and self.has_run(known_run_id):
            return known_run_id
        # A study that was deleted and created again under the same name has another id, and needs another run.
        query = f"tags.`{STUDY_ID}` = '{study_id}' AND tags.`{STUDY}` = '{study_name}'"
        for found in self.client.search_runs([self.experiment_id], query, max_results=5):
            if "mlflow.parentRunId" not in found.data.tags:
                return str(found.info.run_id)
        before_create()
        run_id = self._create_run(study_name, {STUDY: study_name, STUDY_ID: str(study_id)})
        self.log(run_id, params=params)
        return run_id

    def find_trial_run(self, study_name: str, number: int, *, parent: str) -> str | None:
        """Return the id of the run whose tags identify the trial; None if there is no such run."""
        runs = self._trial_runs(study_name, parent, f"tags.`{TRIAL}` = '{number}'")
        return next((str(run.info.run_id) for run in runs), None)

    @kill_point("create run")
    def create_trial_run(
        self, study_name: str, number: int, *, parent: str, tags: Mapping[str, str], start_ms: int | None = None
    ) -> str:
        """Create the run of a trial as a child of its study's run, and return its id.

        Args:
            study_name: the name of the study.
            number: the number of the trial.
            parent: the id of the study's run.
            tags: further tags of the run.
            start_ms: the start time in unix milliseconds; None for the current time.
        """
        note = f"Trial {number} of study {study_name}. All its records: `hpsearch show {study_name} --trial {number}`"
        tags = {STUDY: study_name, TRIAL: str(number), "mlflow.parentRunId": parent, NOTE: note, **tags}
        return self._create_run(f"{study_name}-{number:04d}", tags, start_ms=start_ms)

    def find_running_trial_runs(self, study_name: str, parent: str) -> dict[int, str]:
        """Return the ids of the trial runs of a study that have the status RUNNING, by trial number."""
        runs = self._trial_runs(study_name, parent, "attributes.status = 'RUNNING'")
        return {int(run.data.tags[TRIAL]): str(run.info.run_id) for run in runs if TRIAL in run.data.tags}

    def find_tagged_trial_runs(self, study_name: str, parent: str, tag: str) -> set[str]:
        """Return the ids of the trial runs of a study whose tag `tag` has the value ``true``."""
        return {str(run.info.run_id) for run in self._trial_runs(study_name, parent, f"tags.`{tag}` = 'true'")}

    def _trial_runs(self, study_name: str, parent: str, condition: str) -> Iterator[Run]:
        # The condition includes the study's name: the runs of finalists have the same parent, and the same numbers.
        of_study = f"tags.`mlflow.parentRunId` = '{parent}' AND tags.`{STUDY}` = '{study_name}'"
        return iterate_pages(self.client.search_runs, [self.experiment_id], f"{condition} AND {of_study}")

    @_retry
    def reopen_run(self, run_id: str) -> None:
        """Set the status of a run to RUNNING."""
        self.client.update_run(run_id, status="RUNNING")

    @_retry
    def mark_run_scheduled(self, run_id: str) -> None:
        """Set the status of a trial's run to SCHEDULED, until the next attempt resumes the run."""
        self.log(run_id, tags={STATE: "waiting", REASON: ""})
        self.client.update_run(run_id, status="SCHEDULED")

    @_retry
    def end_study_run(
        self, run_id: str, *, tags: Mapping[str, str], metrics: Sequence[Metric], end_ms: int | None
    ) -> None:
        """Log the results of a study to its parent run, and end the run.

        Args:
            run_id: the id of the run.
            tags: the tags to set.
            metrics: the metrics to log.
            end_ms: the end time in unix milliseconds; None if the study is not finished.
        """
        for start in range(0, max(len(metrics), 1), _MAX_METRICS):
            self.log(run_id, metrics=metrics[start : start + _MAX_METRICS], tags=tags)
        if end_ms is not None:
            self.client.set_terminated(run_id, status="FINISHED", end_time=end_ms)

    @_retry
    def annotate_run(self, run_id: str, *, tags: Mapping[str, str], metrics: Mapping[str, float], at: float) -> None:
        """Add tags and metrics to a run that has ended. Safe to repeat with the same `at`.

        Args:
            run_id: the id of the run, whose status does not change.
            tags: the tags to set.
            metrics: the metrics to log at step 0.
            at: the time of the metrics in unix seconds.
        """
        self.log(run_id, metrics=make_metrics(0, at, metrics), tags=tags)

    @_retry
    @kill_point("end run")
    def end_trial_run(self, run_id: str, outcome: Outcome, reason: str, *, end_ms: int) -> None:
        """End the run of a trial, and set outcome and reason as tags.

        Args:
            run_id: the id of the run.
            outcome: the outcome of the trial.
            reason: the reason of the outcome, as text for users.
            end_ms: the end time in unix milliseconds.
        """
        self.log(run_id, tags={STATE: outcome.run_state, REASON: reason})
        self.client.set_terminated(run_id, status=outcome.mlflow_status, end_time=end_ms)

    @_retry
    def log_file(self, run_id: str, path: Path) -> None:
        """Upload a file to a run."""
        self.client.log_artifact(run_id, str(path))

    @_retry_duplicates  # workers that start together log the same dataset
    def log_dataset(self, run_id: str, *, name: str, digest: str, source: str, profile: str) -> None:
        """Log the dataset on which a run was trained. Safe to repeat."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(name, digest, "code", source, profile=profile)
        self.client.log_inputs(run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])

    def log(
        self,
        run_id: str,
        *,
        metrics: Sequence[Metric] | None = None,
        params: Mapping[str, object] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Log a batch of metrics, parameters and tags. Safe to repeat.

        In names of metrics and parameters, characters that MLflow rejects are replaced. Long texts are truncated.
        """
        from mlflow.entities import Param, RunTag

        self.client.log_batch(
            run_id,
            metrics=metrics or (),
            params=[Param(sanitize_name(key), str(value)[:_MAX_PARAM]) for key, value in (params or {}).items()],
            tags=[RunTag(key, value[:_MAX_TAG]) for key, value in (tags or {}).items()],
        )

    def has_run(self, run_id: str) -> bool:
        """Return whether this server has the run; it may not if the study has moved to another tracking server.

        Raises:
            RunDeletedError: a user deleted the run or its experiment in the MLflow UI, so no new run may be created for
                the trial.
        """
        if (run := get_or_none(self.client.get_run, run_id)) is None:
            return False
        if run.info.lifecycle_stage != "active":
            experiment = get_or_none(self.client.get_experiment, run.info.experiment_id)
            if experiment is not None and experiment.lifecycle_stage == "deleted":
                raise RunDeletedError(_describe_deletion(experiment))
            raise RunDeletedError(f"MLflow run {run_id} was deleted in the MLflow UI; restore the run there")
        return True

    def _create_run(self, name: str, tags: Mapping[str, str], *, start_ms: int | None = None) -> str:
        tags = {**tags, "mlflow.user": _user_name(), "mlflow.source.name": "hpsearch"}
        run = self.client.create_run(self.experiment_id, start_time=start_ms, tags=dict(tags), run_name=name)
        return str(run.info.run_id)


def _describe_deletion(experiment: Experiment) -> str:
    restore = f"mlflow experiments restore --experiment-id {shlex.quote(experiment.experiment_id)}"
    return f"MLflow experiment {experiment.name!r} is deleted; restore it in the MLflow UI or with: {restore}"


def make_metrics(epoch: int, seconds: float, values: Mapping[str, float], model_id: str | None = None) -> list[Metric]:
    """Return the metrics of an epoch as entities of MLflow, which stores each (key, time, step, value) once.

    Args:
        epoch: the epoch, which becomes the step of the metrics.
        seconds: the time of the metrics in unix seconds.
        values: values by metric name.
        model_id: the id of the logged model that the metrics are linked to; None for no link.
    """
    from mlflow.entities import Metric

    at = int(seconds * 1000)
    return [Metric(sanitize_name(key), float(value), at, epoch, model_id=model_id) for key, value in values.items()]


def list_model_ids(run: Run) -> list[str]:
    """Return the ids of a run's logged models: first the id in the run's tag, then the run's outputs, latest first."""
    outputs = [output.model_id for output in (run.outputs.model_outputs if run.outputs else [])]
    return [str(model_id) for model_id in (run.data.tags.get(MODEL_ID), *reversed(outputs)) if model_id]


_MAX_NAME, _MAX_PARAM, _MAX_TAG = 250, 6000, 5000  # characters
_MAX_METRICS = 1000  # per request


def sanitize_name(name: str) -> str:
    """Return the name of a metric or parameter, in which characters that MLflow rejects are replaced by `_`.

    MLflow also rejects all metrics of a request if a name is not a normalized relative path.
    """
    parts = re.sub(r"[^\w\-./ :]", "_", name)[:_MAX_NAME].split("/")
    replaced = "/".join("_" if part in {"", "."} else part for part in parts)
    return re.sub(r"^\.\.|(?<=/)\.\.(?=/|$)", "__", replaced)


def _reach_loopback_directly(uri: str) -> None:
    """Exclude a server on a loopback address from the configured HTTP proxy, which cannot reach this address."""
    host = urlsplit(uri).hostname or ""
    for name in ("NO_PROXY", "no_proxy"):
        excluded = os.environ.get(name, "")
        if host in {"127.0.0.1", "localhost", "::1"} and host not in excluded.split(","):
            os.environ[name] = f"{excluded},{host}".lstrip(",")


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a passwd entry
        return f"uid-{os.getuid()}"
