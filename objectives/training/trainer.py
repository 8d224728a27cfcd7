"""The training loop from top to bottom; its parts are in the package `loop`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpsearch.objectives.errors import MetricError, ObjectiveError, suggest_names, wrap_user_errors
from hpsearch.objectives.training.base_trainer import BaseTrainer, format_metrics
from hpsearch.objectives.training.config import RunPlan, TrainConfig
from hpsearch.objectives.training.data.folds import Fold
from hpsearch.objectives.training.evaluation.metric_state import UnserializableStateError
from hpsearch.objectives.training.loop.build import build_run
from hpsearch.objectives.training.loop.epoch import EpochSums, restore, resume_mid_epoch, train_epoch
from hpsearch.objectives.training.loop.guards import NonFiniteError, translate_torch_errors
from hpsearch.objectives.training.loop.measure_model import get_peak_memory, reset_peak_memory, unwrap_model
from hpsearch.objectives.training.loop.profiling import NO_INSTRUMENTS, Instruments
from hpsearch.objectives.training.loop.run import Run
from hpsearch.objectives.training.loop.sanity_checks import list_config_warnings
from hpsearch.objectives.training.loop.step_functions import bind_export, get_forward_call
from hpsearch.objectives.training.reports.report import write_report
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.reproducibility.seeds import make_reproducible, set_seed
from hpsearch.objectives.training.result import FitResult
from hpsearch.objectives.training.serving_module import build_example
from hpsearch.objectives.training.session import MidEpochAction, Session, Verdict

if TYPE_CHECKING:
    from torch import nn

    from hpsearch.objectives.objective import Objective


class MidEpochStopError(Exception):
    """Exception that ends the training within an epoch, after the state is saved."""


class Trainer(BaseTrainer):
    """Training of one configuration of an objective.

    Args:
        objective: objective to train.
        config: configuration to train.
        epochs: planned number of epochs, over which schedules extend.
        seed: seed of initial weights, sample order and dropout.
        split_seed: seed of the data split, the same for all trials of a study; None uses `seed`.
        resplit_seed: seed of a new train/validation split with an unchanged test split, if `data()` allows it. The run
            then has a `FitResult.resplit_score`, the score of a finalist's run. None uses the study's split.
        refit: number of epochs to train in a refit, a run on training and validation data; None for other runs. In a
            refit, schedules extend over `epochs`, patience does not end the run, and the weights of the last epoch are
            kept. The validation metrics of a refit are computed on samples that it trains on.
        fold: fold of a cross-validation on which the run validates; None uses the split.
        config_by_epoch: the configurations of a run whose configuration changes, by the first epoch that each trains,
            from 0, as population-based training finds them. Only parameters may differ with which the model and the
            optimizer keep the names and shapes of their state. None trains all epochs with `config`.
        seed_by_epoch: the seeds that take the place of `seed` in such a run, by the same epochs, as in a trial of
            population-based training that continued another one. None uses `seed`.
        session: session that saves the run and may end it; None uses `LocalSession(run_dir)`.
        run_dir: directory for configuration, log, metrics and plots, which only this user may be able to change. None
            uses the directory of the session, or writes no files if there is no session.
        device: device name, such as "cpu" or "cuda:1"; None uses a GPU if available.
        instruments: profiler and TensorBoard, which do not change the run.

    Example:
        >>> result = Trainer(Digits(), TrainConfig(lr=3e-3), epochs=20, seed=0).fit()
        >>> result.best_value
    """

    def __init__(  # noqa: PLR0913 options by keyword
        self,
        objective: Objective,
        config: TrainConfig,
        *,
        epochs: int,
        seed: int,
        split_seed: int | None = None,
        resplit_seed: int | None = None,
        refit: int | None = None,
        fold: Fold | None = None,
        config_by_epoch: Mapping[int, TrainConfig] | None = None,
        seed_by_epoch: Mapping[int, int] | None = None,
        session: Session | None = None,
        run_dir: Path | None = None,
        device: str | None = None,
        instruments: Instruments = NO_INSTRUMENTS,
    ) -> None:
        if not isinstance(config, TrainConfig):
            raise ObjectiveError(f"the configuration must be a TrainConfig, not {type(config).__name__}")
        more: dict[str, Any] = {"config_by_epoch": config_by_epoch or {}, "seed_by_epoch": seed_by_epoch or {}}
        if fold is not None:
            more |= {"fold": fold.index, "folds": fold.count}
        plan = RunPlan(epochs, seed, seed if split_seed is None else split_seed, resplit_seed, refit, **more)
        super().__init__(config, plan, session=session, run_dir=run_dir, device=device)
        self.objective = objective
        self.instruments = instruments if self.ranks.is_rank_zero else NO_INSTRUMENTS
        self.instruments.check(self.files.path)

    def fit(self) -> FitResult:
        """Train until all epochs are trained, the patience is exhausted, or the session ends the run.

        Raises:
            ObjectiveError: the objective or its data have a fault, which is detected before training; an operation has
                no deterministic kernel; or the session's checkpoint is of another run.
            NonFiniteError: the loss, its gradient or a validation metric is NaN or infinite.
            DeviceMemoryError: the configuration does not fit in the device's memory.
        """
        switches = make_reproducible(
            deterministic=self.config.deterministic, matmul_precision=self.config.matmul_precision
        )
        with switches, self.files.logging(), translate_torch_errors(self.config, self.device):
            run = self.build()
            verdict = self.start(run)
            while verdict == Verdict.CONTINUE and not run.is_finished:
                run = self._change_config(run)
                verdict = self.run_epoch(run)
            return self._finish(run, verdict)

    def _change_config(self, run: Run) -> Run:
        """Return the run with the configuration of its next epoch: a new run with the old one's state if it changes."""
        epoch = run.curve.next_epoch
        config = self.plan.get_config(epoch)
        if config is None or (config == run.config and self.plan.get_seed(epoch) == run.plan.seed):
            return run
        if run.step == 0:  # it was built for a later epoch, whose checkpoint is lost
            return self.build(epoch)
        before, after = run.config.to_dict(), config.to_dict()
        settings = ", ".join(f"{name} {before[name]} -> {after[name]}" for name in after if before[name] != after[name])
        self.files.log.info("from epoch %d: %s", epoch + 1, settings or "another seed")
        changed = self.build(epoch)
        for trained in range(epoch + (run.mid_epoch_state is not None)):
            self._on_epoch(changed, trained)
        state = {**run.state_dict(), "within": run.mid_epoch_state}
        changed.load_state_dict(state, is_other_config=config != run.config)
        return changed

    def run_epoch(self, run: Run) -> Verdict:
        """Train, validate, save and report, in this order, so that no reported epoch is lost if the process dies."""
        epoch, started = run.curve.next_epoch, time.perf_counter()
        sums = self.begin_epoch(run, epoch)
        started -= sums.seconds
        try:
            with self.instruments.profiler(run, self.files.path):
                train_epoch(run, epoch, sums, partial(self.save_mid_epoch_if_due, run, started))
        except MidEpochStopError:
            return Verdict.STOP
        return self.end_epoch(run, sums, time.perf_counter() - started)

    def end_epoch(self, run: Run, sums: EpochSums, training: float) -> Verdict:
        """Validate, save and report an epoch whose steps took `training` seconds."""
        epoch, began = run.curve.next_epoch, time.perf_counter()
        self.files.record_steps(run.steplog.drain())
        run.strategy.sync_buffers(run.model)
        run.weight_averaging.after_epoch(epoch, run.batch_source.inputs, get_forward_call(run.step_function))
        run.strategy.sync_buffers(run.eval_model)
        scores = run.validate_epoch()
        measured = self._measure(run, scores, epoch)
        run.schedule.end_epoch(scores[self.objective.metric])
        metrics = {
            **{f"train_{name}": value for name, value in sums.scores.items()},
            **{f"val_{name}": value for name, value in scores.items()},
            **measured,
            "lr": sums.lr,
            "grad_norm": sums.grad_norm,
            "epoch_seconds": training + time.perf_counter() - began,
            "samples_per_second": sums.samples / training,
        }
        if not run.ranks.is_single_process:
            metrics["samples_per_second_per_device"] = metrics["samples_per_second"] / run.ranks.world_size
            if efficiency := run.strategy.scaling_efficiency():
                metrics["scaling_efficiency"] = efficiency
        record = EpochRecord(epoch, time.time(), metrics)
        if memory := get_peak_memory(run.device):
            metrics["peak_memory_bytes"] = float(memory)
        best = run.curve.add(record, run.copy_weights)
        if self.session is not None:
            self.session.save(run.state_dict(), best=best)
        run.epoch_end_seconds = time.perf_counter() - began
        self.files.log.info("epoch %d%s %s", epoch + 1, " (best)" if best else "", format_metrics(metrics))
        return self._report(record)

    def _measure(self, run: Run, scores: Mapping[str, float], epoch: int) -> dict[str, float]:
        """Return the model metrics after a validation, and check that all required metrics exist and are finite.

        Raises:
            NonFiniteError: the loss, a metric that the study requires, or a model metric is not finite.
            MetricError: a metric that existed before training is missing.
        """
        required = dict.fromkeys(("loss", self.objective.metric, *self.objective.reported))
        _require_finite(
            {f"val_{name}": scores[name] for name in required if name in scores}, scores["loss"], run, epoch
        )
        measured = run.measurer.after_epoch(run.eval_model, scores)
        _require_finite(measured, scores["loss"], run, epoch)
        for name in required:
            if name not in scores and name not in measured:
                raise MetricError(name, f"is missing after an epoch; {suggest_names(name, [*scores, *measured])}")
        return measured

    def begin_epoch(self, run: Run, epoch: int) -> EpochSums:
        """Begin an epoch, or resume it from a mid-epoch checkpoint."""
        sums, mid_epoch = EpochSums(run), run.mid_epoch_state
        if mid_epoch is None:
            set_seed(run.plan.seed, "epoch", epoch)
            self._on_epoch(run, epoch)
            if run.ranks.rank:
                set_seed(run.plan.seed, "epoch", epoch, *run.ranks.seed_suffix())
        else:
            run.mid_epoch_state = None
            resume_mid_epoch(run, mid_epoch, sums, epoch)
        return sums

    def save_mid_epoch_if_due(self, run: Run, started: float, sums: EpochSums) -> None:
        """Save a mid-epoch checkpoint after a step if one is due, and stop if required.

        Raises:
            MidEpochStopError: the run must stop.
        """
        if self.session is None or not run.can_save_mid_epoch:
            return
        elapsed = time.perf_counter() - started
        steps = run.batch_source.steps
        due = self.session.mid_epoch_action(lambda: elapsed / sums.steps * (steps - sums.steps) + run.epoch_end_seconds)
        if due is MidEpochAction.NONE:
            return
        run.finite_guard.flush()  # only finite states are saved
        sums.seconds = elapsed
        try:
            state = run.mid_epoch_state_dict(sums.state_dict())
        except UnserializableStateError as error:
            if run.can_save_mid_epoch:
                self.files.log.warning("no mid-epoch checkpoints: %s, which is not serializable", error)
            run.can_save_mid_epoch = False
            return
        self.files.record_steps(run.steplog.drain())
        self.session.save_mid_epoch(state)
        if due is MidEpochAction.SAVE_AND_STOP:
            self.files.log.info("stopped in epoch %d after %d of %d steps", run.curve.next_epoch + 1, sums.steps, steps)
            raise MidEpochStopError

    def build(self, epoch: int | None = None) -> Run:
        """Build the run with the configuration and seed of an epoch, from 0; None for the first unreported epoch."""
        reset_peak_memory(self.device)
        plan = self.plan
        if epoch is None and plan.config_by_epoch:
            # Only rank 0 has the epochs that earlier attempts have reported.
            epoch = self.ranks.broadcast_object(0 if self.curve is None else len(self.curve.values))
        config, plan = plan.get_config(epoch or 0) or self.config, replace(plan, seed=plan.get_seed(epoch or 0))
        run, untrained = build_run(self.objective, config, plan, device=self.device, ranks=self.ranks, curve=self.curve)
        run.measurer.require_device()
        run.shards = None if self.session is None else self.session.shards
        where = str(self.device)
        if not self.ranks.is_single_process:
            where = f"{self.ranks.world_size} devices ({self.device}, {run.strategy.name})"
        self.files.log.info("%s on %s, before training: %s", self.objective.name, where, format_metrics(untrained))
        for note in [*run.resume_notes, *list_config_warnings(run)]:
            self.files.log.warning("%s", note)
        return run

    def start(self, run: Run) -> Verdict:
        """Restore the last checkpoint, if there is one, and report its epochs again."""
        state = None if self.session is None else self.session.restore()
        if state is not None:
            for epoch in range(len(state["history"]) + ("within" in state)):
                self._on_epoch(run, epoch)
            restore(run, state)
            where = f"resumed after epoch {run.curve.next_epoch}"
            if run.mid_epoch_state:
                where += f" and {run.mid_epoch_state['sums']['steps']} of {run.batch_source.steps} steps"
            self.files.log.info("%s", "; ".join([where, *run.resume_notes]))
        changes = {str(first): config.to_dict() for first, config in self.plan.config_by_epoch.items()}
        resolved = {**run.identity, **({"config_by_epoch": changes} if changes else {}), "environment": run.environment}
        return self._open(run.curve, resolved, run.git_diff, resumed_at=run.step if state else None)

    def _on_epoch(self, run: Run, epoch: int) -> None:
        owner, before = f"{type(self.objective).__name__}.on_epoch", _list_tensor_names(run.model)
        with wrap_user_errors(owner):
            self.objective.on_epoch(run.model, epoch, self.plan.get_config(epoch) or self.config)
        if changed := before ^ _list_tensor_names(run.model):
            raise ObjectiveError(
                f"{owner} added or removed the parameter or buffer {min(changed)!r}, and checkpoints would not fit the "
                "model; create all of them in model(), and change only their values or requires_grad in on_epoch"
            )

    def _report(self, record: EpochRecord) -> Verdict:
        """Report an epoch to the session, then write its record."""
        verdict = super()._report(record)
        self.instruments.record(record, self.files.path)
        return verdict

    def _finish(self, run: Run, verdict: Verdict) -> FitResult:
        """Return the result; a run that will not be resumed also passes its files to the session."""
        result = self._result(run, verdict)
        best = f"best epoch {result.best_epoch + 1}, {run.curve.metric_key}={result.best_value:.6g}"
        self.files.log.info("%s: %s", result.status, best if run.curve.best else "no complete epoch")
        if result.status != "stopped":
            names = list(dict.fromkeys(("loss", self.objective.metric)))
            write = partial(write_report, run=run, result=result, objective=self.objective)
            self._log_files(self.files.finish(result, names, write))
        return result

    def _result(self, run: Run, verdict: Verdict) -> FitResult:
        """Return the result of a run that has ended, with its best weights restored."""
        best, val = run.curve.best, run.splits.val
        if best:  # empty if the run stopped in its first epoch
            run.eval_model.load_state_dict(run.strategy.local_state_dict(best["model"], run.eval_model.state_dict()))
        shared = self._shared_result(run.curve, verdict, run.resume_notes, finished=run.is_finished)
        should_report = run.ranks.broadcast_object(self.files.path is not None) and shared["status"] != "stopped"
        train_scores = run.evaluate(run.splits.train) if should_report else None
        resplit_score = None
        if run.resplit_evaluation is not None and shared["status"] == "completed":
            error = run.resplit_evaluation.estimate_error(run.evaluate_rows)
            resplit_score = run.resplit_evaluation.score(best.get("value", math.nan), error)
        model = unwrap_model(run.strategy.gather_model(run.eval_model))
        model.eval()  # not chained: a custom `train` may return None
        return FitResult(
            **shared,
            model=model,
            example=build_example(val),
            call=get_forward_call(run.step_function),
            export=bind_export(self.objective, run.config),
            split_hash=run.identity["split_hash"],
            val=val,
            memory=get_peak_memory(run.device),
            train_scores=train_scores,
            resplit_score=resplit_score,
        )


def _require_finite(numbers: Mapping[str, float], loss: float, run: Run, epoch: int) -> None:
    for name, value in numbers.items():
        if math.isfinite(value):
            continue
        if name != "val_loss" and math.isfinite(loss):  # the training did not diverge
            raise NonFiniteError(f"{name} is {value}", epoch=epoch, val_loss=loss)
        lr = float(run.optimizer.param_groups[0]["lr"])
        raise NonFiniteError(f"{name} is {value}", epoch=epoch, step=run.step - 1, lr=lr)


def _list_tensor_names(model: nn.Module) -> set[str]:
    return {name for tensors in (model.named_parameters(), model.named_buffers()) for name, _ in tensors}
