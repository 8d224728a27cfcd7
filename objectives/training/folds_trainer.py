"""Train one model per fold of a cross-validation; the run reports the means of their metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.objective import Objective, overrides
from hpsearch.objectives.training.base_trainer import BaseTrainer, format_metrics
from hpsearch.objectives.training.config import RunPlan, TrainConfig
from hpsearch.objectives.training.data.folds import Fold
from hpsearch.objectives.training.evaluation.ensemble import Ensemble
from hpsearch.objectives.training.fold_metrics import merge_metrics, score_folds
from hpsearch.objectives.training.loop.epoch import EpochSums, require_same_run
from hpsearch.objectives.training.loop.fold_group import FoldGroup
from hpsearch.objectives.training.loop.fold_group_check import build_fold_group
from hpsearch.objectives.training.loop.guards import translate_torch_errors
from hpsearch.objectives.training.loop.measure_model import get_peak_memory, unwrap_model
from hpsearch.objectives.training.loop.prepare import combine_hashes
from hpsearch.objectives.training.loop.run import CHECKPOINT_FORMAT, MID_EPOCH_FORMAT, Run
from hpsearch.objectives.training.loop.step_functions import bind_export, get_forward_call
from hpsearch.objectives.training.reports.report import write_sections
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.reproducibility.seeds import derive_seed, make_reproducible, set_seed
from hpsearch.objectives.training.result import FitResult, ResplitScore
from hpsearch.objectives.training.serving_module import build_example
from hpsearch.objectives.training.session import Curve, MidEpochAction, Session, Verdict
from hpsearch.objectives.training.trainer import MidEpochStopError, Trainer


class _FoldCurve(Curve):
    """Learning curve of a fold, which keeps no weights: the mean over the folds selects the best epoch."""

    def add(self, record: EpochRecord, weights: Callable[[], Any]) -> bool:  # noqa: ARG002 as in the base class
        self._append(record)
        return False


class _FoldSession:
    """Session of a fold, which belongs to the session of the run.

    Args:
        owner: trainer of the run.
        index: index of the fold.
        state: state of the fold in the last checkpoint of the run; None if there is none.
    """

    run_dir: Path | None = None
    shards: Path | None = None

    def __init__(self, owner: FoldsTrainer, index: int, state: dict[str, Any] | None) -> None:
        self._owner, self._index, self._state = owner, index, state
        self.curve = _FoldCurve(owner.objective.metric, maximize=owner.objective.direction == "maximize")

    def restore(self) -> dict[str, Any] | None:
        state, self._state = self._state, None
        return state

    def save(self, state: dict[str, Any], *, best: bool) -> None:
        """Do nothing: the run saves all folds together after each epoch."""

    def mid_epoch_action(self, left: Callable[[], float]) -> MidEpochAction:
        return self._owner.choose_mid_epoch_action(self._index, left)

    def save_mid_epoch(self, state: dict[str, Any]) -> None:
        self._owner.save_mid_epoch(self._index, state)

    def report(self, record: EpochRecord) -> Verdict:  # noqa: ARG002 part of the protocol
        return Verdict.CONTINUE

    def log(self, path: Path) -> None:
        """Do nothing: a fold writes no files."""


class FoldsTrainer(BaseTrainer):
    """Cross-validation of one configuration: one model per fold, trained together or in turns, one epoch each.

    The folds train as one vectorized model if a check at the start finds that it is equal and faster (see
    `build_fold_group`). The checkpoint stores this choice for a resumed run.

    An epoch of this run is an epoch of all folds. Its metrics are the means over the folds. The best
    epoch and the patience are computed from the mean of the metric. A checkpoint contains all folds, and a run
    resumes within any epoch of any fold.

    The split seed determines the fold of each training and validation sample. The test split is the same for all folds.
    The model of the run is the `Ensemble` of the models of the folds.

    Args:
        objective: objective to train.
        config: configuration to train.
        plan: epochs, seeds and folds of the run.
        session: session that saves the run and may end it; None uses `LocalSession(run_dir)`.
        run_dir: directory for configuration, log and metrics; None uses the directory of the session.
        device: device name, such as "cpu" or "cuda:1"; None uses a GPU if available.

    Raises:
        ObjectiveError: the objective or the process cannot train folds.
    """

    def __init__(
        self,
        objective: BaseObjective,
        config: Any,
        plan: RunPlan,
        *,
        session: Session | None = None,
        run_dir: Path | None = None,
        device: str | None = None,
    ) -> None:
        assert plan.folds is not None
        super().__init__(config, plan, session=session, run_dir=run_dir, device=device)
        self.objective, self._count = check_folds(objective), plan.folds
        if not self.ranks.is_single_process:
            raise ObjectiveError("--folds trains each trial on one device; remove --devices and --nodes, or --folds")
        self._curve = self.curve or Curve(self.objective.metric, maximize=self.objective.direction == "maximize")
        self._trainers: list[Trainer] = []
        self._runs: list[Run] = []
        self._group: FoldGroup | None = None  # None trains the folds in turns
        self._sums: list[EpochSums] = []  # of the group's current epoch
        self._identity: dict[str, Any] = {}
        self._last_seconds = 0.0  # duration of the last epoch of a fold

    def fit(self) -> FitResult:
        """Train until all epochs are trained, the patience is exhausted, or the session ends the run.

        Raises:
            ObjectiveError, NonFiniteError, DeviceMemoryError: as in `Trainer.fit`.
        """
        switches = make_reproducible(
            deterministic=self.config.deterministic, matmul_precision=self.config.matmul_precision
        )
        with switches, self.files.logging(), translate_torch_errors(self.config, self.device):
            verdict = self._start()
            while verdict == Verdict.CONTINUE and not self._is_finished:
                verdict = self._epoch()
            return self._finish(verdict)

    @property
    def _is_finished(self) -> bool:
        patience = self.config.patience
        out_of_patience = patience is not None and self._curve.epochs_since_best >= patience
        return out_of_patience or self._curve.next_epoch >= self.plan.epochs

    def _start(self) -> Verdict:
        """Build the folds, and restore the last checkpoint, if there is one."""
        state = None if self.session is None else self.session.restore()
        states = [None] * self._count if state is None else state.get("fold_states", [])
        if len(states) != self._count:
            raise ObjectiveError(f"the checkpoint belongs to another run: it has {len(states)} folds; use a new folder")
        for index, own in enumerate(states):
            trainer = self._make_trainer(_FoldSession(self, index, own), Fold(index, self._count))
            self._trainers.append(trainer)
            self._runs.append(trainer.build())
            trainer.start(self._runs[-1])
        self._identity = {
            "format": CHECKPOINT_FORMAT,
            "objective": self.objective.name,
            "config": self.config.to_dict(),
            **self.plan.identity,
            "split_hash": combine_hashes([run.identity["split_hash"] for run in self._runs]),
        }
        if state is not None:
            config = TrainConfig.from_dict(state["config"]).to_dict()  # newer settings get their defaults
            require_same_run({**state, "format": CHECKPOINT_FORMAT, "config": config}, self._identity)
            self._curve.load_state_dict(state)
            self.files.log.info("resumed after epoch %d", self._curve.next_epoch)
        self._choose_path(None if state is None else state.get("is_vectorized", False))
        resolved = {**self._identity, "environment": self._runs[0].environment}
        return self._open(self._curve, resolved, self._runs[0].git_diff, resumed_at=self._step if state else None)

    def _choose_path(self, was_vectorized: bool | None) -> None:
        """Decide whether the folds train together; a resumed run keeps the choice of its checkpoint."""
        reason = "as before the interruption"
        if was_vectorized is not False:
            is_resumed = was_vectorized is not None
            self._group, reason = build_fold_group(self.objective, self.config, self._runs, is_resumed=is_resumed)
        path = "in turns" if self._group is None else "as one vectorized model"
        self.files.log.info("folds train %s: %s", path, reason)

    def _make_trainer(self, session: _FoldSession, fold: Fold) -> Trainer:
        plan = self.plan
        trainer = Trainer(
            self.objective,
            self.config,
            epochs=plan.epochs,
            seed=derive_seed(plan.seed, "fold", fold.index),
            split_seed=plan.split_seed,
            resplit_seed=plan.resplit_seed,
            fold=fold,
            session=session,
            device=str(self.device),
        )
        trainer.files.log.parent = self.files.log
        trainer.files.log.setLevel(logging.WARNING)
        return trainer

    def _epoch(self) -> Verdict:
        """Train an epoch of each fold, then save and report the run."""
        epoch = self._curve.next_epoch
        train = self._train_in_turns if self._group is None else partial(self._train_together, self._group)
        if (verdict := train(epoch)) != Verdict.CONTINUE:
            return verdict
        folds = [run.curve.history[epoch].metrics for run in self._runs]
        metrics = merge_metrics(folds, f"val_{self.objective.metric}")
        record = EpochRecord(epoch, time.time(), metrics)
        best = self._curve.add(record, self._copy_weights)
        if self.session is not None:
            self.session.save(self._state_dict(), best=best)
        self.files.log.info("epoch %d%s %s", epoch + 1, " (best)" if best else "", format_metrics(metrics))
        return self._report(record)

    def _train_in_turns(self, epoch: int) -> Verdict:
        for trainer, run in zip(self._trainers, self._runs, strict=True):
            if run.curve.next_epoch > epoch:  # trained before the run was interrupted within the epoch
                continue
            began = time.perf_counter()
            if (verdict := trainer.run_epoch(run)) != Verdict.CONTINUE:
                return verdict
            self._last_seconds = time.perf_counter() - began
        return Verdict.CONTINUE

    def _train_together(self, group: FoldGroup, epoch: int) -> Verdict:
        """Train and validate an epoch of all folds; the last fold acts for all of them within the epoch."""
        folds, started = list(zip(self._trainers, self._runs, strict=True)), time.perf_counter()
        trainer, last = folds[-1]
        is_resumed = last.mid_epoch_state is not None
        sums = [own.begin_epoch(run, epoch) for own, run in folds]
        if not is_resumed:  # a resumed epoch has restored the same generators for each fold
            set_seed(self.plan.seed, "epoch", epoch)
        started -= sums[-1].seconds
        self._sums = sums
        try:
            group.train_epoch(epoch, sums, partial(trainer.save_mid_epoch_if_due, last, started, sums[-1]))
        except MidEpochStopError:
            return Verdict.STOP
        seconds = (time.perf_counter() - started) / len(folds)
        for (own, run), of_fold in zip(folds, sums, strict=True):
            own.end_epoch(run, of_fold, seconds)
        return Verdict.CONTINUE

    def choose_mid_epoch_action(self, index: int, left: Callable[[], float]) -> MidEpochAction:
        """Return the action of the run's session within an epoch of the fold at `index`."""
        if self.session is None:
            return MidEpochAction.NONE
        if self._group is not None:  # `left` contains the validation of one fold
            ends = sum(run.epoch_end_seconds for run in self._runs[:-1])
            if (action := self.session.mid_epoch_action(lambda: left() + ends)) is not MidEpochAction.NONE:
                self._group.prepare_checkpoint()
            return action
        later = len(self._runs) - index - 1
        return self.session.mid_epoch_action(lambda: left() + later * max(self._last_seconds, left()))

    def save_mid_epoch(self, index: int, state: dict[str, Any]) -> None:
        """Save all folds; `state` is that of the fold at `index`, which is within an epoch."""
        assert self.session is not None
        folds = [run.state_dict() for run in self._runs]
        if self._group is not None:
            for number, (run, sums) in enumerate(zip(self._runs, self._sums, strict=True)):
                run.finite_guard.flush()  # only finite states are saved
                folds[number] = run.mid_epoch_state_dict(sums.state_dict())
        folds[index] = state
        self.session.save_mid_epoch(
            {**self._state_dict(folds), "format": MID_EPOCH_FORMAT, "within": {"sums": {"steps": self._step}}}
        )

    @property
    def _step(self) -> int:
        return sum(run.step for run in self._runs)

    @property
    def _notes(self) -> list[str]:
        return list(dict.fromkeys(note for run in self._runs for note in run.resume_notes))

    def _copy_weights(self) -> dict[str, Any]:
        """Return a copy of the weights of the ensemble."""
        weights = [run.copy_weights() for run in self._runs]
        return {f"models.{index}.{name}": tensor for index, own in enumerate(weights) for name, tensor in own.items()}

    def _state_dict(self, folds: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        return {
            **self._identity,
            "environment": self._runs[0].environment,
            "notes": self._notes,
            "fold_states": [run.state_dict() for run in self._runs] if folds is None else folds,
            "step": self._step,
            "is_vectorized": self._group is not None,
            **self._curve.state_dict(),
        }

    def _finish(self, verdict: Verdict) -> FitResult:
        """Return the result; a run that will not be resumed also passes its files to the session."""
        models = [unwrap_model(run.eval_model).cpu() for run in self._runs]
        for model in models:
            model.eval()
        ensemble, best = Ensemble(models), self._curve.best
        if best:
            ensemble.load_state_dict(best["model"])
        first = self._runs[0]
        shared = self._shared_result(self._curve, verdict, self._notes, finished=self._is_finished)
        is_scored = self.plan.resplit_seed is not None and shared["status"] == "completed"
        result = FitResult(
            **shared,
            model=ensemble,
            example=build_example(first.splits.val),
            call=get_forward_call(first.step_function),
            export=bind_export(self.objective, self.config),
            split_hash=self._identity["split_hash"],
            val=first.splits.val,
            memory=get_peak_memory(first.device),
            resplit_score=self._score() if is_scored else None,
        )
        self.files.log.info("%s: best epoch %d, %.6g", result.status, result.best_epoch + 1, result.best_value)
        if result.status != "stopped":
            names = list(dict.fromkeys(("loss", self.objective.metric)))
            self._log_files(self.files.finish(result, names, partial(self._write_report, result)))
        return result

    def _score(self) -> ResplitScore:
        """Return the score of a run on a new division, without the optimism of the choice of its best epoch."""
        curves = [[record.metrics[self._curve.metric_key] for record in run.curve.history] for run in self._runs]
        splits = self._runs[0].splits
        sizes = len(splits.train), sum(len(run.splits.val) for run in self._runs), len(splits.test)
        is_by_time = splits.blocks is not None and splits.blocks.ordered  # the windows do not depend on a seed
        return score_folds(curves, maximize=self._curve.maximize, sizes=sizes, has_new_split=not is_by_time)

    def _write_report(self, result: FitResult, path: Path, steps: list[dict[str, Any]]) -> None:  # noqa: ARG002
        metric, best = self.objective.metric, result.best_epoch
        rows = [
            f"| {number} | {len(run.splits.train)} | {len(run.splits.val)} | "
            f"{run.curve.history[best].metrics[self._curve.metric_key]:.6g} |"
            for number, run in enumerate(self._runs, start=1)
        ]
        title = f"{self.objective.name}: {result.status}, best {metric} {result.best_value:.6g}"
        write_sections(
            path,
            {
                title: [f"- best epoch {best + 1} of {len(result.history)} trained, {self.plan.epochs} planned"],
                f"{len(rows)} folds": [f"| fold | train | validation | {metric} |", "|---|---|---|---|", *rows],
            },
        )


def check_folds(objective: BaseObjective) -> Objective:
    """Return the objective if its models can be trained on folds and averaged.

    Raises:
        ObjectiveError: the objective has a custom loop, or overrides `step` or `evaluate`.
    """
    if not isinstance(objective, Objective):
        raise ObjectiveError(
            f"--folds is not available for {objective.name}, because its custom loop splits the data; remove --folds"
        )
    for method in ("step", "evaluate"):
        if overrides(objective, method):
            raise ObjectiveError(
                f"--folds is not available for {type(objective).__name__}, because its {method}() may call more than "
                "the forward() of the model, and the models of the folds are averaged; remove --folds"
            )
    return objective
