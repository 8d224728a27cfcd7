"""What a trial logs to its trackers: parameters, metrics, artifacts, the model and its provenance."""

from __future__ import annotations

import inspect
import json
import logging
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from optuna.trial import TrialState

from hpsearch.kill_points import kill_point
from hpsearch.objectives.objective import BaseObjective
from hpsearch.objectives.training.ranks import current
from hpsearch.objectives.training.reproducibility.environment import environment
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.result import Exported, RunResult
from hpsearch.objectives.training.trainer import device_named
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.ranking import in_bounds, is_among_best, is_on_front
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.tracking.tracker import Tracker, pruning_tags
from hpsearch.storage.attributes import PENDING
from hpsearch.storage.journals import journal_records
from hpsearch.storage.journals.journal import MLFLOW, Journal
from hpsearch.storage.mlflow import model, tag_names
from hpsearch.storage.mlflow.model import keep_weights
from hpsearch.storage.trials.claims import Claim
from hpsearch.storage.trials.settle import Outcome

log = logging.getLogger(__name__)


def write_model(
    exported: Callable[[], Exported], folder: Path, *, checkpoint: Path | None, objective: str, number: int
) -> dict[str, str]:
    """Export the model, or else keep its checkpoint, and return the tags that say why.

    Args:
        exported: makes what there is to export.
        folder: where to; replaced when it exists.
        checkpoint: the trial's `best.pt`, where there is one.
        objective: reference of the objective.
        number: the trial's.

    Raises:
        OSError: there is no room.
        Exception: it cannot be exported, and there is no checkpoint; whatever ``torch.export`` says of it.
    """
    try:
        model.export_model(*exported(), folder)
        return {}
    except Exception as error:  # whatever torch.export says of it
        if isinstance(error, OSError) or checkpoint is None:
            raise
        why = told(error)
    log.warning("trial %d: its model cannot be exported: it is its checkpoint (%s)", number, why)
    keep_weights(checkpoint, folder, objective=objective, why=why)
    return {tag_names.WEIGHTS_ONLY: why}


def model_record(
    spec: StudySpec, number: int, params: Mapping[str, Any], best: EpochRecord, tags: Mapping[str, str]
) -> journal_records.Model:
    """Return what MLflow is told of the model of trial `number`, which is of its `best` epoch."""
    return journal_records.Model(
        name=f"{spec.name.replace('.', '_')}-trial-{number}",  # MLflow refuses dots
        step=best.epoch,
        at=best.timestamp,
        metrics=best.metrics,
        params=dict(params),
        tags={tag_names.STUDY: spec.name, tag_names.TRIAL: str(number), **tags},
    )


def run_params(spec: StudySpec, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a trial's run, and of its model: those that were suggested, and the study's own."""
    return {**params, "seed": spec.seed, "epochs": spec.epochs}


def told(error: Exception) -> str:
    """Return the first line of what an exporter says: the rest is where it was in torch."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:200]}"


_LONGEST_DIGEST = 36  # characters that MLflow takes for a dataset's


class TrialTracking:
    """The tracking of one attempt at a trial. A server that is away costs the trial nothing."""

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
        """The attempt's journal, which `open` begins."""
        assert self._journal is not None
        return self._journal

    def open(self, *, resumed: bool | None = None) -> None:
        """Begin the journal; the run exists a moment later, where the server answers.

        Args:
            resumed: whether the trial may have a run already; by default, from its second attempt on.
        """
        claim, tags = self._claim, {}
        if self._spec.finalists_of is not None:
            trial, seed = self._spec.finalists_of.assignment(claim.number)
            of = tag_names.FINALIST_OF if self._spec.refit is None else tag_names.REFIT_OF
            tags = {of: str(trial), tag_names.SEED: str(seed)}
        self._journal = self._tracker.begin(claim, resumed=claim.resumed if resumed is None else resumed, **tags)
        if self._tracker.system_metrics is not None:
            started = self._storage.get_trial(claim.trial_id).datetime_start
            since = started.timestamp() if started else time.time()
            self._tracker.system_metrics.start(self._journal, since=since)

    @kill_point("log params")
    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log the suggested parameters of the trial, which its model has too."""
        self._params = run_params(self._spec, params)
        self.journal.append(journal_records.Params(self._params))
        self._tracker.sender.wake()

    def log_epoch(self, epoch: int, timestamp: float, metrics: dict[str, float]) -> None:
        """Log an epoch's metrics at its own time (unix seconds), by which a repetition changes nothing."""
        self.journal.append(journal_records.Epoch(epoch, timestamp, metrics))
        self._tracker.sender.wake()

    def log_file(self, path: Path) -> None:
        """Keep a file of the run directory for the run's artifacts."""
        if self.journal.keep(path):
            self.journal.append(journal_records.Files())

    @kill_point("publish run")
    def publish(self, result: RunResult, files: list[Path]) -> bool:
        """Write down what the trial made: its files, a complete one's best value, and its model where one is wanted.

        It comes before the trial is settled: a worker that dies in between finds the trial at its last checkpoint
        and publishes again, where the reverse order would leave a winner without a model.

        Returns:
            Whether the trial's last checkpoint is to be kept until all of it has arrived.
        """
        journal = self.journal
        if journal.lost:  # on a full disk; the state has every epoch
            journal.lost = 0
            for record in result.history:
                self.log_epoch(record.epoch, record.timestamp, record.metrics)
        if result.status == "completed" and self._spec.refit is None:
            # Of these alone: by this name people sort for whom to promote, and a pruned trial has no model. What a
            # refit scores is of samples that it is trained on, and would be the first of all.
            last = result.history[-1]
            asked = self._spec.also_reported
            named = {key: value for key, value in result.best_metrics.items() if key.startswith("val_") or key in asked}
            best = {f"best_{key}": value for key, value in named.items()}
            best["best_epoch"] = float(result.best_epoch)
            if result.fresh is not None:
                best[f"cross_fitted_val_{self._spec.metric}"] = result.fresh.value
            journal.append(journal_records.Metrics(last.epoch, last.timestamp, best))
        self._log_data(result)
        if result.resume_note:
            journal.append(journal_records.Tags({tag_names.RESUMED: result.resume_note}))
        # Of a finalist only numbers count: the run of the search, or a refit, is what is promoted.
        confirms = self._spec.finalists_of is not None and self._spec.refit is None
        whole = result.status == "completed" and not confirms
        if not self._keep(files, result.best_path if whole else None):
            # The checkpoint in the store has all of it.
            journal.append(journal_records.Problem(f"{PENDING}: there was no room on disk for its files and its model"))
        elif result.has_model and self._leaves_model(result, whole=whole):
            self._log_model(result)
        journal.append(journal_records.Published())
        return whole

    def _leaves_model(self, result: RunResult, *, whole: bool) -> bool:
        """Whether the trial is one of those that leave a registrable model, by the spec."""
        if self._spec.models != "top":
            return self._spec.models == "all" or (whole and self._spec.models == "complete")
        if not whole:
            return False
        # Of two that end together neither sees the other, and both may leave one; none of the best goes without.
        spec, complete = self._spec, self._study.trials(TrialState.COMPLETE)
        best = spec.asked(result.best_metrics)
        if spec.out_of_bounds(best):
            return False
        if spec.several:
            others = [trial.values for trial in complete if trial.values and in_bounds(trial)]
            return is_on_front([best[name] for name in spec.ways], others, spec.maximized)
        ended = {trial.number: float(trial.values[0]) for trial in complete if trial.values and in_bounds(trial)}
        return is_among_best(
            self._claim.number,
            result.best_value,
            ended,
            top=self._spec.top_models,
            maximize=self._spec.maximize,
        )

    def _keep(self, files: list[Path], best: Path | None) -> bool:
        """Keep the run's files and its best checkpoint; return whether there was room for all of it."""
        if not self._tracker.outbox.has_room():
            log.warning("trial %d: the outbox is full: its files and its model are not kept", self._claim.number)
            return False
        kept = [self.journal.keep(path) for path in files]
        kept += [self.journal.keep(best, folder="checkpoints")] if best is not None else []
        self.journal.append(journal_records.Files())
        return all(kept)

    def _log_data(self, result: RunResult) -> None:
        if result.data_digest is None:
            return
        sha256, samples = result.data_digest
        source = {"objective": self._spec.objective, "split_seed": self._spec.seed, "sha256": sha256}
        data = journal_records.Data(
            name=self._spec.objective.rpartition(":")[2],
            digest=sha256[:_LONGEST_DIGEST],
            source=json.dumps(source),
            profile=json.dumps({"validation_samples": samples}),
        )
        self.journal.append(data)
        self.journal.append(journal_records.Tags({tag_names.DATA_SHA256: sha256}))

    @kill_point("log model")
    def _log_model(self, result: RunResult) -> None:
        try:
            tags = write_model(
                result.exported,
                self.journal.model,
                checkpoint=result.best_path,
                objective=self._spec.objective,
                number=self._claim.number,
            )
        except OSError as error:
            log.warning("trial %d: its model found no room on disk (%s)", self._claim.number, error)
            self.journal.append(journal_records.Problem(f"{PENDING}: there was no room on disk for its model"))
            return
        except Exception as error:  # whatever torch.export says of it
            reason = f"no model: it cannot be exported ({told(error)})"
            log.warning("trial %d: %s", self._claim.number, reason)
            self.journal.append(journal_records.Problem(reason))
            return
        best = next(record for record in result.history if record.epoch == result.best_epoch)
        self.journal.append(model_record(self._spec, self._claim.number, self._params, best, tags))

    def tag_bounds(self, lines: list[str]) -> None:
        """Note in the run which constraints the trial breaks."""
        self.journal.append(journal_records.Tags({tag_names.OUT_OF_BOUNDS: "; ".join(lines)}))

    def tag_pruning(self, record: dict[str, object]) -> None:
        """Note on what grounds the trial is pruned: pruner, epoch (from 0), value, cut-off, peers, rung."""
        self.journal.append(pruning_tags(record))

    def pending(self) -> str:
        """Return what to note at the trial until all of it is in MLflow."""
        if refused := self.journal.places[MLFLOW].position.refused:
            return f"refused: {refused}"
        return f"{PENDING}: on its way from {socket.gethostname()}"

    @kill_point("finish run")
    def finish(self, outcome: Outcome, reason: str, *, kept: bool = False, at: int | None = None) -> None:
        """End the run as its trial ended. It ends there once all that was logged has arrived.

        Args:
            outcome: how the trial ended.
            reason: why, for a person.
            kept: whether the trial's last checkpoint was kept until then.
            at: when, in unix milliseconds; now, unless given.
        """
        at = int(time.time() * 1000) if at is None else at
        self._close(journal_records.End(outcome, reason, at, kept))

    def leave(self) -> None:
        """Leave the run open for the trial's next attempt."""
        self._close(journal_records.Leave())

    def _close(self, last: journal_records.Record) -> None:
        if self._tracker.system_metrics is not None:
            self._tracker.system_metrics.stop()
        self.journal.append(last)
        self._tracker.sender.wake(at_once=True)

    def abandon(self, reason: str) -> None:
        """Leave a run whose trial was lost: ended as killed, unless another attempt has the run."""
        if self._journal is None:
            return
        try:
            ended = self._storage.get_trial(self._claim.trial_id).state.is_finished()
        except KeyError:  # its study was deleted
            ended = False
        if ended:
            self.finish(Outcome.CANCELLED, reason)
        else:
            self.leave()


_VERSIONS = ("python", "torch", "numpy", "scikit-learn", "torchmetrics", "pytorch-optimizer")


def run_tags(objective: BaseObjective, device: str | None) -> dict[str, str]:
    """Return tags for the runs of a worker: commit, versions, device. `config.yaml` of a run has all of it.

    Raises:
        ObjectiveError: there is no such device.
    """
    source = inspect.getsourcefile(type(objective))
    found = environment(device_named(device), Path(source).resolve() if source else None)
    tags = {
        tag_names.VERSIONS: ", ".join(f"{name} {found[name]}" for name in _VERSIONS if found.get(name)),
        tag_names.DEVICE: str(found["device_name"]),
        tag_names.DEVICES: str(current().world),  # that train a trial together
        tag_names.OBJECTIVE_SHA256: str(found["source_sha256"] or ""),
    }
    if sha := found.get("git_sha"):
        # The name that MLflow's UI shows as the run's source version.
        tags |= {"mlflow.source.git.commit": sha, tag_names.GIT_DIRTY: str(found["git_dirty"]).lower()}
    return tags
