"""Run an objective with a custom training loop."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from hpsearch.objectives.custom_loop.folder import unpack_folder
from hpsearch.objectives.custom_loop.loop_objective import LoopObjective, config_to_json
from hpsearch.objectives.custom_loop.loop_trial import BaseLoopRun, LoopTrial
from hpsearch.objectives.errors import (
    ObjectiveError,
    find_source_file,
    format_traceback,
    format_user_error,
    get_first_line,
    is_out_of_memory,
    wrap_user_errors,
)
from hpsearch.objectives.training.evaluation.step import bind_forward
from hpsearch.objectives.training.loop.epoch import require_same_run
from hpsearch.objectives.training.loop.guards import DeviceMemoryError, NonFiniteError
from hpsearch.objectives.training.ranks import init_group_of_one
from hpsearch.objectives.training.reports.report import format_image, format_value, list_custom_settings, write_sections
from hpsearch.objectives.training.reproducibility.changes import read_changes
from hpsearch.objectives.training.reproducibility.environment import (
    describe_differences,
    describe_environment,
)
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.reproducibility.seeds import make_reproducible, set_seed
from hpsearch.objectives.training.result import ExportableModel, RunResult
from hpsearch.objectives.training.serving_module import make_exportable
from hpsearch.objectives.training.session import Verdict


def reset_distributed_state() -> None:
    """Reset the distributed state of Accelerate and DeepSpeed if they are imported.

    The state may be outdated: the process group may have been created again since the last trial, and each trial may
    use another precision.
    """
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    if groups := sys.modules.get("deepspeed.utils.groups"):
        groups._release_process_group_references()


_MAX_PANELS = 8  # maximum number of panels in the plot of curves; metrics.jsonl has the other metrics
_NOT_CHECKED = """\
The objective has a custom training loop. hpsearch did not check its gradients, and did not look for leakage and
overfitting. The loop must split the data with `trial.split_seed`, which is the same for every trial, and must not use
the test set. A resumed trial repeats the code before `trial.epochs()` with the same random numbers."""


def write_loop_report(
    path: Path,
    _steps: Sequence[dict[str, Any]],
    *,
    objective: LoopObjective,
    result: RunResult,
    identity: dict[str, Any],
) -> None:
    """Write `report.md` of a custom loop that has ended.

    `identity` contains the run's configuration, epochs and seeds.
    """
    summary = [
        f"- best epoch {result.best_epoch + 1} of {len(result.history)} trained, {identity['epochs']} planned",
        f"- seed {identity['seed']}, split seed {identity['split_seed']}",
        *([f"- {result.resume_note}"] if result.resume_note else []),
    ]
    settings = list_custom_settings(identity["config"])
    rows = [f"| `{setting.name}` | `{format_value(setting.value)}` |" for setting in settings]
    write_sections(
        path,
        {
            f"{objective.name}: {result.status}, best {objective.metric} {result.best_value:.6g}": summary,
            "Configuration": ["| setting | value |", "|---|---|", *rows] if rows else ["No settings."],
            "Reported metrics": [
                *_format_reported_metrics(result),
                *format_image(path, "curves.png", "Curves over the epochs"),
            ],
            "Not checked": [_NOT_CHECKED],
        },
    )


def select_plotted_metrics(history: Sequence[EpochRecord], metric: str) -> list[str]:
    """Return the names of the metrics to plot, the study's metric first."""
    names = [name for record in history for name in record.metrics if name != "epoch_seconds"]
    curves = [name.removeprefix("train_").removeprefix("val_") for name in names if name != "lr"]
    return list(dict.fromkeys([metric, *curves]))[:_MAX_PANELS]


def _format_reported_metrics(result: RunResult) -> list[str]:
    first, best, last = result.history[0].metrics, result.best_metrics, result.history[-1].metrics
    lines = ["| | first epoch | best epoch | last epoch |", "|---|---|---|---|"]
    for name in dict.fromkeys([*first, *best, *last]):
        cells = [f"{epoch[name]:.6g}" if name in epoch else "" for epoch in (first, best, last)]
        lines.append(f"| {name.replace('|', ' ')} | {' | '.join(cells)} |")
    return lines


CHECKPOINT_FORMAT = 1  # format of a checkpoint's state


@dataclass
class LoopResult(RunResult):
    """Result of a custom training loop.

    Attributes:
        objective: the objective that was trained.
        config: configuration of the trial.
        best: the argument `best` that the loop reported in the best epoch.
    """

    objective: LoopObjective
    config: Any
    best: Any

    @property
    def has_model(self) -> bool:
        """Whether the objective's class defines `export`."""
        return self.objective.defines("export")

    def exportable_model(self) -> ExportableModel:
        """Return the exportable model of the best epoch.

        Raises:
            ObjectiveError: the objective has no `export`, or `export` raised an error.
        """
        return export_model(self.objective, self.best, self.config)


def export_model(objective: LoopObjective, best: Any, config: Any) -> ExportableModel:
    """Return the model that `objective.export` builds from the reported `best`.

    Raises:
        ObjectiveError: the objective has no `export`, or `export` raised an error.
    """
    owner = type(objective).__name__
    if not objective.defines("export"):
        raise ObjectiveError(f"{owner} has no export(); define export() to get a model that can be promoted")
    with wrap_user_errors(f"{owner}.export"):
        model, x = objective.export(best, config)
        if not isinstance(model, nn.Module):
            raise ObjectiveError(f"{owner}.export must return a module and an input, not {type(model).__name__}")
        model.eval()
        module, parts = make_exportable(model, bind_forward(model, x), x)
    return ExportableModel(module, parts, [frozenset({0})] * len(parts))


class LoopRun(BaseLoopRun):
    """Run of a trial's custom training loop; see `BaseTrainer` for the parameters."""

    objective: LoopObjective

    def fit(self) -> LoopResult:
        """Run the loop and return its result; a resumed trial continues from its last checkpoint.

        Raises:
            ObjectiveError: the objective raised an error; the message has its file and line.
            NonFiniteError: a metric that the study optimizes or bounds is NaN or infinite.
        """
        owner = type(self.objective).__name__
        reset_distributed_state()
        self.ranks.allow_setup()
        group = init_group_of_one(self.device) if self.ranks.is_single_process else nullcontext()
        with make_reproducible(deterministic=False), self.files.logging():
            try:
                with group:
                    verdict = self._train()
            except BaseException:
                reset_distributed_state()  # open connections of a library would make the other ranks wait
                raise
            finally:
                if self.ranks.is_rank_zero:
                    shutil.rmtree(self.checkpoint, ignore_errors=True)
            if not self.curve.history:
                raise ObjectiveError(f"{owner}.run ended without a report; call trial.report in each of trial.epochs()")
            return self._finish(verdict)

    def _train(self) -> Verdict:
        state, verdict = self._start()
        if verdict != Verdict.CONTINUE or self.curve.next_epoch >= self.plan.epochs:
            return verdict
        trial = LoopTrial(self, state)
        set_seed(self.plan.seed, "init")
        self._run(trial)
        return trial.verdict

    def _run(self, trial: LoopTrial) -> None:
        try:
            self.objective.run(trial)
            if trial.failure is None:
                trial.barrier(f"ends after epoch {self.curve.next_epoch}")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever the user's code raises
            if trial.failure is None:
                self._raise(error)
        if trial.failure is not None:  # the loop may have caught the error of `report`
            raise trial.failure

    def _raise(self, error: BaseException) -> NoReturn:
        """Raise the loop's error as an ObjectiveError with the user's file and line; the log has the traceback."""
        if isinstance(error, (ObjectiveError, NonFiniteError)):
            raise error
        if is_out_of_memory(error):
            raise DeviceMemoryError(None, self.device, get_first_line(error)) from error
        self.files.log.error("%s", format_traceback(error))
        raise ObjectiveError(f"{type(self.objective).__name__}.run: {format_user_error(error)}") from error

    def _start(self) -> tuple[Any, Verdict]:
        """Restore the last checkpoint, if there is one, and report its epochs again.

        Returns:
            The state for the loop (None if there is no checkpoint), and the verdict on the restored epochs.
        """
        restored, source = self._restore(), find_source_file(type(self.objective))
        identity = {
            "format": CHECKPOINT_FORMAT,
            "objective": self.objective.name,
            "config": config_to_json(self.config, "suggest"),
            **self.plan.identity,
            "split_hash": "",
        }
        self.settings = {**identity, "environment": describe_environment(self.device, source, self.ranks.world_size)}
        if restored is not None:
            require_same_run(restored, identity)
            self.curve.load_state_dict(restored)
            if changed := describe_differences(restored["environment"], self.settings["environment"]):
                self.resume_notes.append(f"results after epoch {self.curve.next_epoch} may differ: {changed}")
            self.files.log.info("%s", "; ".join([f"resumed after epoch {self.curve.next_epoch}", *self.resume_notes]))
        changes = read_changes(source) if self.ranks.is_rank_zero else ""
        verdict = self._open(self.curve, self.settings, changes, resumed_at=0 if restored else None)
        return None if restored is None else restored["state"], verdict

    def _restore(self) -> dict[str, Any] | None:
        """Read the last checkpoint on rank 0, and broadcast it without the parts that only rank 0 needs."""
        read: list[dict[str, Any] | None] = []

        def read_checkpoint() -> dict[str, Any] | None:
            shutil.rmtree(self.checkpoint, ignore_errors=True)
            state = None if self.own_session is None else self.own_session.restore()
            read.append(state)
            if state is None:
                return None
            folder = state.pop("folder", {})
            if state["state"] is None and not folder and len(state["history"]) < self.plan.epochs:
                self.files.log.warning("the loop reported no state; the trial starts from the first epoch again")
                read[:] = [None]
                return None
            unpack_folder(folder, self.checkpoint)
            return {**state, "best": {**state["best"], "model": None}}

        broadcast = self.ranks.run_on_rank_zero(read_checkpoint)
        return read[0] if read else broadcast

    def _finish(self, verdict: Verdict) -> LoopResult:
        # A loop that returns before the last epoch, without a stop, is complete.
        finished = verdict == Verdict.CONTINUE or self.curve.next_epoch >= self.plan.epochs
        result = LoopResult(
            **self._shared_result(self.curve, verdict, self.resume_notes, finished=finished),
            objective=self.objective,
            config=self.config,
            best=self.curve.best["model"],
        )
        if result.status == "stopped":
            self._log_files(self.logged)
        else:
            names = select_plotted_metrics(result.history, self.objective.metric)
            write = partial(write_loop_report, objective=self.objective, result=result, identity=self.settings)
            self._log_files([*self.files.finish(result, names, write), *self.logged])
        return result
