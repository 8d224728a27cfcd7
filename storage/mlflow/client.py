"""What MLflow is told: one parent run per study, one child run per trial, by client calls alone.

The fluent API is per process and thread, and its `start_run` overwrites a run's status; a service uses the client.
"""

from __future__ import annotations

import functools
import getpass
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import tenacity

from hpsearch.kill_points import kill_point
from hpsearch.storage.errors import StorageError
from hpsearch.storage.journals.reader import RefusedError
from hpsearch.storage.mlflow.health import all_pages, is_away, is_duplicate, unless_missing
from hpsearch.storage.mlflow.tag_names import MODEL_ID, REASON, STATE, STUDY, STUDY_ID, TRIAL
from hpsearch.storage.trials.settle import Outcome

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

EXPERIMENT = "hpsearch"

_CLIENT_SETTINGS = {
    # The defaults block a call to a dead server for four minutes, and repeat a creation whose reply was lost, which
    # makes a second run. Who calls repeats what is safe to repeat.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class RunDeletedError(RefusedError):
    """Somebody deleted the run in the MLflow UI."""


# What is safe to repeat is repeated when a proxy or a restart cut it off, or somebody else wrote the same.
_again = tenacity.retry(
    retry=tenacity.retry_if_exception(is_away) | tenacity.retry_if_exception(is_duplicate),
    stop=tenacity.stop_after_attempt(3),
    wait=tenacity.wait_random_exponential(multiplier=0.3, max=2.0),
    reraise=True,
)

_unless_overtaken = tenacity.retry(
    retry=tenacity.retry_if_exception(is_duplicate),
    stop=tenacity.stop_after_attempt(5),
    wait=tenacity.wait_random(max=0.5),
    reraise=True,
)


class Tracking:
    """The tracking server and the one experiment in it that holds all studies. Asks nothing of it before it must.

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
        self._experiment = experiment
        self.client: MlflowClient = mlflow.MlflowClient(tracking_uri=uri)

    @functools.cached_property
    def experiment_id(self) -> str:
        """The experiment's id.

        Raises:
            StorageError: somebody deleted the experiment.
            MlflowException: the server does not answer, or refuses.
        """
        from mlflow.exceptions import MlflowException

        name = self._experiment
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

    def study_run(
        self,
        study_name: str,
        study_id: int,
        *,
        params: Mapping[str, object],
        known: str | None,
        may_create: Callable[[], object] = lambda: None,
    ) -> str:
        """Return the id of the study's parent run, creating it if need be; call it under the study's lock.

        Args:
            study_name: the study's name, which the run gets.
            study_id: the study's id in the database.
            params: the spec, logged as the run's parameters.
            known: the run's id, when the study has it noted.
            may_create: is called before a run is created, and raises if none may be.
        """
        if known is not None and self.has_run(known):
            return known
        # A study deleted and made again under its name is another study: its number tells them apart.
        query = f"tags.`{STUDY_ID}` = '{study_id}' AND tags.`{STUDY}` = '{study_name}'"
        for found in self.client.search_runs([self.experiment_id], query, max_results=5):
            if "mlflow.parentRunId" not in found.data.tags:
                return str(found.info.run_id)
        may_create()
        run = self._create(study_name, {STUDY: study_name, STUDY_ID: str(study_id)})
        self.log(run, params=params)
        return run

    def find_trial_run(self, study_name: str, number: int, *, parent: str) -> str | None:
        """Return the run of a trial, looked for by its tags."""
        runs = self._trial_runs(study_name, parent, f"tags.`{TRIAL}` = '{number}'")
        return next((str(run.info.run_id) for run in runs), None)

    @kill_point("create run")
    def create_trial_run(
        self, study_name: str, number: int, *, parent: str, tags: Mapping[str, str], began: int | None = None
    ) -> str:
        """Create the run of a trial, which `began` then (unix milliseconds; now), under its study's; return its id."""
        tags = {STUDY: study_name, TRIAL: str(number), "mlflow.parentRunId": parent, **tags}
        return self._create(f"{study_name}-{number:04d}", tags, began=began)

    def open_trial_runs(self, study_name: str, parent: str) -> dict[int, str]:
        """Return the runs of a study's trials that nobody has ended: trial number to run id."""
        runs = self._trial_runs(study_name, parent, "attributes.status = 'RUNNING'")
        return {int(run.data.tags[TRIAL]): str(run.info.run_id) for run in runs if TRIAL in run.data.tags}

    def tagged_trial_runs(self, study_name: str, parent: str, tag: str) -> set[str]:
        """Return the ids of the runs of a study's trials whose tag is ``true``."""
        return {str(run.info.run_id) for run in self._trial_runs(study_name, parent, f"tags.`{tag}` = 'true'")}

    def _trial_runs(self, study_name: str, parent: str, condition: str) -> Iterator[Run]:
        # By the study's name too: its finalists, whose trials have numbers of their own, have the same parent.
        under = f"tags.`mlflow.parentRunId` = '{parent}' AND tags.`{STUDY}` = '{study_name}'"
        return all_pages(self.client.search_runs, [self.experiment_id], f"{condition} AND {under}")

    @_again
    def reopen(self, run_id: str) -> None:
        """Set a run to RUNNING, such as a study's that goes on."""
        self.client.update_run(run_id, status="RUNNING")

    @_again
    def schedule(self, run_id: str) -> None:
        """Set the ended run of a trial to SCHEDULED: it waits for another attempt, which goes on with the run."""
        self.log(run_id, tags={STATE: "waiting", REASON: ""})
        self.client.update_run(run_id, status="SCHEDULED")

    @_again
    def end_study_run(
        self, run_id: str, *, tags: Mapping[str, str], metrics: Mapping[str, float], step: int, finished: bool
    ) -> None:
        """Write what came of a study to its parent run, and end the run when the study is `finished`."""
        self.log(run_id, metrics=epoch_metrics(step, time.time(), metrics), tags=tags)
        if finished:
            self.client.set_terminated(run_id, status="FINISHED")

    @_again
    def annotate(self, run_id: str, *, tags: Mapping[str, str], metrics: Mapping[str, float], at: float) -> None:
        """Add tags and metrics to a run that has ended; said again with the same time, a metric is there once.

        Args:
            run_id: the run, which keeps its status.
            tags: to set.
            metrics: to log, at step 0.
            at: unix seconds.
        """
        self.log(run_id, metrics=epoch_metrics(0, at, metrics), tags=tags)

    @_again
    @kill_point("end run")
    def end_trial_run(self, run_id: str, outcome: Outcome, reason: str, *, at: int) -> None:
        """End a run as its trial ended, with the reason as a tag.

        Args:
            run_id: the run.
            outcome: how the trial ended.
            reason: why, for a person.
            at: when, in unix milliseconds.
        """
        self.log(run_id, tags={STATE: outcome.run_state, REASON: reason})
        self.client.set_terminated(run_id, status=outcome.mlflow_status, end_time=at)

    @_again
    def log_file(self, run_id: str, path: Path) -> None:
        """Upload a file to a run."""
        self.client.log_artifact(run_id, str(path))

    @_unless_overtaken  # of workers that begin together, the runs have the same data
    def log_data(self, run_id: str, *, name: str, digest: str, source: str, profile: str) -> None:
        """Log what a run was trained on. Safe to repeat."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(name, digest, "code", source, profile=profile)
        self.client.log_inputs(run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])

    def log(
        self,
        run_id: str,
        *,
        metrics: list[Metric] | None = None,
        params: Mapping[str, object] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Log a batch; what MLflow would refuse of a name or a text is changed, not lost. Safe to repeat."""
        from mlflow.entities import Param, RunTag

        self.client.log_batch(
            run_id,
            metrics=metrics or (),
            params=[Param(allowed_name(key), str(value)[:_LONGEST_PARAM]) for key, value in (params or {}).items()],
            tags=[RunTag(key, value[:_LONGEST_TAG]) for key, value in (tags or {}).items()],
        )

    def has_run(self, run_id: str) -> bool:
        """Whether this server has the run: a study may move to another tracking server.

        Raises:
            RunDeletedError: it was deleted in the MLflow UI. That is a person's wish: no run is made in its place.
        """
        if (run := unless_missing(self.client.get_run, run_id)) is None:
            return False
        if run.info.lifecycle_stage != "active":
            raise RunDeletedError(f"its run {run_id} was deleted in the MLflow UI; restore it there")
        return True

    def _create(self, name: str, tags: Mapping[str, str], *, began: int | None = None) -> str:
        tags = {**tags, "mlflow.user": _user(), "mlflow.source.name": "hpsearch"}
        run = self.client.create_run(self.experiment_id, start_time=began, tags=dict(tags), run_name=name)
        return str(run.info.run_id)


def epoch_metrics(
    epoch: int, timestamp: float, values: Mapping[str, float], model_id: str | None = None
) -> list[Metric]:
    """Return an epoch's metrics for MLflow, which keeps one copy of an equal (key, time, step, value)."""
    from mlflow.entities import Metric

    at = int(timestamp * 1000)
    return [Metric(allowed_name(key), float(value), at, epoch, model_id=model_id) for key, value in values.items()]


def models_of(run: Run) -> list[str]:
    """Return the ids of a run's logged models: the one that its tag names first, then the latest."""
    outputs = [output.model_id for output in (run.outputs.model_outputs if run.outputs else [])]
    return [str(model_id) for model_id in (run.data.tags.get(MODEL_ID), *reversed(outputs)) if model_id]


_LONGEST_NAME, _LONGEST_PARAM, _LONGEST_TAG = 250, 6000, 5000


def allowed_name(name: str) -> str:
    """Return the name of a metric or parameter with what MLflow refuses in it replaced."""
    return re.sub(r"[^\w\-./ :]", "_", name)[:_LONGEST_NAME]


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
