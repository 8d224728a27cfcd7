"""Logging of a trial to the trackers: parameters, metrics, artifacts, the model and its provenance."""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from optuna.trial import TrialState

from hpsearch.host_name import get_host_name
from hpsearch.kill_points import kill_point
from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.training.base_trainer import resolve_device
from hpsearch.objectives.training.ranks import current_ranks
from hpsearch.objectives.training.reproducibility.environment import describe_environment
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.result import ExportableModel, RunResult
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.ranking import is_among_best, is_feasible, is_on_front
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.tracking.tracker import Tracker, make_pruning_tags
from hpsearch.storage.attributes import PENDING, REFUSED
from hpsearch.storage.journals import journal_records
from hpsearch.storage.journals.journal import MLFLOW, Journal
from hpsearch.storage.mlflow import model_export, tag_names
from hpsearch.storage.mlflow.model_export import write_checkpoint_model
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.finishing import Outcome

log = logging.getLogger(__name__)


def write_model(
    exported: Callable[[], ExportableModel], folder: Path, *, checkpoint: Path | None, objective: str, number: int
) -> dict[str, str]:
    """Export the model, or store its checkpoint if the export fails; return tags.

    The tags state why an export failed, or which method of the objective returned the module.

    Args:
        exported: function that returns the model to export.
        folder: output folder, which is replaced if it exists.
        checkpoint: path of the trial's `best.pt`; None if the trial has no such file.
        objective: reference of the objective.
        number: number of the trial.

    Raises:
        OSError: the disk is full.
        Exception: ``torch.export`` failed, and there is no checkpoint.
    """
    try:
        model = exported()
        model_export.export_model(model.module, model.inputs, model.dynamic_dims, folder)
        return {tag_names.EXPORT_SOURCE: model.source} if model.source else {}
    except Exception as error:  # torch.export raises errors of many types
        if isinstance(error, OSError) or checkpoint is None:
            raise
        reason = format_export_error(error)
    log.warning("trial %d: torch.export failed (%s); storing the checkpoint instead of a model", number, reason)
    write_checkpoint_model(checkpoint, folder, objective=objective, reason=reason)
    return {tag_names.WEIGHTS_ONLY: reason}


def model_record(
    spec: StudySpec, number: int, params: Mapping[str, Any], best: EpochRecord, tags: Mapping[str, str]
) -> journal_records.Model:
    """Return the journal record of a trial's model, with the metrics of its best epoch."""
    return journal_records.Model(
        name=f"{spec.name.replace('.', '_')}-trial-{number}",  # MLflow rejects dots
        step=best.epoch,
        at=best.timestamp,
        metrics=best.metrics,
        params=dict(params),
        tags={tag_names.STUDY: spec.name, tag_names.TRIAL: str(number), **tags},
    )


def run_params(spec: StudySpec, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the MLflow parameters of a trial's run and model: suggested parameters, seed and number of epochs."""
    return {**params, "seed": spec.seed, "epochs": spec.epochs}


def format_export_error(error: Exception) -> str:
    """Return the type and the first line of an export error, without the stack that torch adds to the message."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:200]}"


_MAX_DIGEST = 36  # characters of a dataset's digest in MLflow


class TrialTracking:
    """The tracking of one attempt at a trial. Records go to a local journal, so training does not wait for a server."""

    def __init__(self, tracker: Tracker, study: StoredStudy, claim: Claim) -> None:
        self._tracker = tracker
        self._study = study
        self._spec = study.spec
        self._claim = claim
        self._storage = study.storage
        self._journal: Journal | None = None
        self._params: dict[str, Any] = {}

    @property
    def journal(self) -> Journal:
        """The journal of the attempt, which `open` creates."""
        assert self._journal is not None
        return self._journal

    def open(self, *, resumed: bool = False) -> None:
        """Create the journal. The MLflow run is created in the background.

        Args:
            resumed: whether the trial may already have an MLflow run; if None, whether the claim resumes the trial.
        """
        claim, tags = self._claim, {}
        if self._spec.finalists_of is not None:
            trial, seed = self._spec.finalists_of.get_trial_and_seed(claim.number)
            of = tag_names.FINALIST_OF if self._spec.refit is None else tag_names.REFIT_OF
            tags = {of: str(trial), tag_names.SEED: str(seed)}
        self._journal = self._tracker.open_journal(claim, resumed=resumed or claim.is_resumed, **tags)
        if self._tracker.system_metrics is not None:
            started = self._storage.get_trial(claim.trial_id).datetime_start
            since = started.timestamp() if started else time.time()
            self._tracker.system_metrics.start(self._journal, since=since)

    @kill_point("log params")
    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log the suggested parameters, the seed and the number of epochs as parameters of the run."""
        self._params = run_params(self._spec, params)
        self.journal.append(journal_records.Params(self._params))
        self._tracker.sender.wake()

    def log_epoch(self, epoch: int, timestamp: float, metrics: dict[str, float]) -> None:
        """Log the metrics of an epoch. A repeated call with the same timestamp has no effect.

        Args:
            epoch: the epoch, counted from 0.
            timestamp: Unix time in seconds.
            metrics: metrics of the epoch, by name.
        """
        self.journal.append(journal_records.Epoch(epoch, timestamp, metrics))
        self._tracker.sender.wake()

    def log_file(self, path: Path) -> None:
        """Log a file of the run directory as an artifact."""
        if self.journal.store_artifact(path):
            self.journal.append(journal_records.Artifacts())

    @kill_point("publish run")
    def publish(self, result: RunResult, files: list[Path]) -> bool:
        """Log the results of the trial: files, the best values of a completed trial, and the model if it is required.

        Call this method before the trial ends in the database. If the worker dies in between, the next attempt resumes
        from the last checkpoint and publishes again. In the reverse order, a winner could remain without a model.

        Returns:
            Whether the trial's last checkpoint must be kept until MLflow has all records.
        """
        journal = self.journal
        if journal.lost_records:  # the disk was full, but the training state has all epochs
            journal.lost_records = 0
            for record in result.history:
                self.log_epoch(record.epoch, record.timestamp, record.metrics)
        if result.status == "completed" and self._spec.refit is None:
            # Not for other runs, because users sort runs by these metrics to promote one. A pruned trial has no model,
            # and a refit is scored on its training samples, so that it would always be first.
            last = result.history[-1]
            reported = self._spec.reported_metrics
            items = result.best_metrics.items()
            best = {f"best_{key}": value for key, value in items if key.startswith("val_") or key in reported}
            best["best_epoch"] = float(result.best_epoch)
            if result.resplit_score is not None:
                best[f"debiased_val_{self._spec.metric}"] = result.resplit_score.value
            journal.append(journal_records.Metrics(last.epoch, last.timestamp, best))
        self._log_data(result)
        if result.resume_note:
            journal.append(journal_records.Tags({tag_names.RESUMED: result.resume_note}))
        # A finalist needs no model, because only the trial of the search or a refit is promoted.
        is_finalist = self._spec.finalists_of is not None and self._spec.refit is None
        is_promotable = result.status == "completed" and not is_finalist
        if not self._store_files(files, result.best_path if is_promotable else None):
            # The checkpoint in the store contains the missing data.
            journal.append(journal_records.Problem(f"{PENDING}: the disk was too full for the files and the model"))
        elif result.has_model and self._requires_model(result, is_promotable=is_promotable):
            self._log_model(result)
        journal.append(journal_records.ArtifactsComplete())
        return is_promotable

    def _requires_model(self, result: RunResult, *, is_promotable: bool) -> bool:
        """Return whether the spec requires a model of this trial.

        Args:
            result: result of the training.
            is_promotable: whether the trial completed and is not a finalist, so that its model can be promoted.
        """
        if self._spec.models != "top":
            return self._spec.models == "all" or (is_promotable and self._spec.models == "complete")
        if not is_promotable:
            return False
        # Two trials that end at the same time may both store a model, but the best ones always do.
        spec, complete = self._spec, self._study.trials(TrialState.COMPLETE)
        best = spec.select_metrics(result.best_metrics)
        if spec.list_violations(best):
            return False
        if spec.is_multi_objective:
            others = [trial.values for trial in complete if trial.values and is_feasible(trial)]
            return is_on_front([best[name] for name in spec.direction_by_metric], others, spec.maximize_each)
        ended = {trial.number: float(trial.values[0]) for trial in complete if trial.values and is_feasible(trial)}
        number, value = self._claim.number, result.best_value
        return is_among_best(number, value, ended, top=spec.top_models, maximize=spec.maximize)

    def _store_files(self, files: list[Path], best: Path | None) -> bool:
        """Store files and the best checkpoint as artifacts of the run; return whether there was space for all files."""
        if not self._tracker.outbox.has_space():
            log.warning(
                "trial %d: disk of the outbox folder is full; files and model are not sent to MLflow",
                self._claim.number,
            )
            return False
        stored = [self.journal.store_artifact(path) for path in files]
        stored += [self.journal.store_artifact(best, folder="checkpoints")] if best is not None else []
        self.journal.append(journal_records.Artifacts())
        return all(stored)

    def _log_data(self, result: RunResult) -> None:
        if result.data_digest is None:
            return
        sha256, samples = result.data_digest
        source = {"objective": self._spec.objective, "split_seed": self._spec.seed, "sha256": sha256}
        data = journal_records.Dataset(
            name=self._spec.objective.rpartition(":")[2],
            digest=sha256[:_MAX_DIGEST],
            source=json.dumps(source),
            profile=json.dumps({"validation_samples": samples}),
        )
        self.journal.append(data)
        self.journal.append(journal_records.Tags({tag_names.DATA_SHA256: sha256}))

    @kill_point("log model")
    def _log_model(self, result: RunResult) -> None:
        log.info("trial %d: exporting the model", self._claim.number)  # takes longer than the training of a small one
        try:
            tags = write_model(
                result.exportable_model,
                self.journal.model_folder,
                checkpoint=result.best_path,
                objective=self._spec.objective,
                number=self._claim.number,
            )
        except OSError as error:
            log.warning("trial %d: could not save the model (%s)", self._claim.number, error)
            self.journal.append(journal_records.Problem(f"{PENDING}: the disk was too full for the model"))
            return
        except Exception as error:  # torch.export raises errors of many types
            reason = f"no model: torch.export failed ({format_export_error(error)})"
            log.warning("trial %d: %s", self._claim.number, reason)
            self.journal.append(journal_records.Problem(reason))
            return
        best = next(record for record in result.history if record.epoch == result.best_epoch)
        self.journal.append(model_record(self._spec, self._claim.number, self._params, best, tags))

    def tag_violations(self, lines: list[str]) -> None:
        """Tag the run with the violated constraints, one text per constraint."""
        self.journal.append(journal_records.Tags({tag_names.OUT_OF_BOUNDS: "; ".join(lines)}))

    def tag_pruning(self, record: dict[str, object]) -> None:
        """Tag the run with a pruning decision; see `make_pruning_tags`."""
        self.journal.append(make_pruning_tags(record))

    def get_state(self) -> str:
        """Return the value of the trial's attribute TRACKING, which exists until MLflow has all its records."""
        if rejection := self.journal.cursors[MLFLOW].position.rejection:
            return f"{REFUSED}: {rejection}"
        return f"{PENDING}: records not yet sent from {get_host_name()}"

    @kill_point("finish run")
    def finish(self, outcome: Outcome, reason: str, *, is_checkpoint_kept: bool = False, at: int | None = None) -> None:
        """End the run with the outcome of the trial, after all other records.

        Args:
            outcome: the outcome of the trial.
            reason: the reason, as text for users.
            is_checkpoint_kept: whether the trial's last checkpoint is kept until MLflow has all records.
            at: end time in Unix milliseconds; None uses the current time.
        """
        at = int(time.time() * 1000) if at is None else at
        self._close(journal_records.End(outcome, reason, at, is_checkpoint_kept))

    def leave_open(self) -> None:
        """Close the journal, and leave the run open for the trial's next attempt."""
        self._close(journal_records.Released())

    def _close(self, last: journal_records.Record) -> None:
        if self._tracker.system_metrics is not None:
            self._tracker.system_metrics.stop()
        self.journal.append(last)
        self._tracker.sender.wake(is_urgent=True)

    def abandon(self, reason: str) -> None:
        """Close the journal after the trial's claim was lost.

        If the trial has finished, the run ends as cancelled. If not, the run stays open for another attempt.
        """
        if self._journal is None:
            return
        try:
            ended = self._storage.get_trial(self._claim.trial_id).state.is_finished()
        except KeyError:  # the study was deleted
            ended = False
        if ended:
            self.finish(Outcome.CANCELLED, reason)
        else:
            self.leave_open()


_VERSIONS = ("python", "torch", "numpy", "scikit-learn", "torchmetrics", "pytorch-optimizer")


def run_tags(objective: BaseObjective, device: str | None) -> dict[str, str]:
    """Return the tags for all runs of a worker: commit, versions, device. The `config.yaml` of a run has more details.

    Raises:
        ObjectiveError: the device does not exist.
    """
    source = inspect.getsourcefile(type(objective))
    found = describe_environment(resolve_device(device), Path(source).resolve() if source else None)
    tags = {
        tag_names.VERSIONS: ", ".join(f"{name} {found[name]}" for name in _VERSIONS if found.get(name)),
        tag_names.DEVICE: str(found["device_name"]),
        tag_names.DEVICES: str(current_ranks().world_size),
        tag_names.OBJECTIVE_SHA256: str(found["source_sha256"] or ""),
    }
    if sha := found.get("git_sha"):
        # The name that MLflow's UI shows as the run's source version.
        tags["mlflow.source.git.commit"] = sha
        if found["git_dirty"] is not None:
            tags[tag_names.GIT_DIRTY] = str(found["git_dirty"]).lower()
    return tags
