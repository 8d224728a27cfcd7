"""Run an objective that has its own training loop."""

from __future__ import annotations

import shutil
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from hpsearch.objectives.errors import ObjectiveError, blame, is_out_of_memory, source_file, users_code
from hpsearch.objectives.own_loop.folder import unpack
from hpsearch.objectives.own_loop.loop_objective import LoopObjective, plain_config
from hpsearch.objectives.own_loop.loop_trial import LoopTrial, OwnLoop
from hpsearch.objectives.training.evaluation.step import call_of
from hpsearch.objectives.training.exportable import exportable
from hpsearch.objectives.training.loop.epoch import require_same
from hpsearch.objectives.training.loop.guards import DeviceMemoryError, NonFiniteError
from hpsearch.objectives.training.reports.report import code, image, own_settings, write_sections
from hpsearch.objectives.training.reproducibility.environment import differences, environment, uncommitted
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.reproducibility.seeds import reproducible, set_seed
from hpsearch.objectives.training.result import Exported, RunResult
from hpsearch.objectives.training.session import Verdict


def forget() -> None:
    """Lets libraries that are imported already find out anew which ranks there are.

    The ranks may have closed their connections and opened new ones since, and a trial may want another precision.
    """
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    if groups := sys.modules.get("deepspeed.utils.groups"):
        groups._release_process_group_references()


_PANELS = 8  # of the curves; what else was reported is in metrics.jsonl
_NOT_LOOKED_AFTER = """\
The loop is the objective's own, and these are its business: how data are divided (by `trial.split_seed`, the same for
every trial), that the test set stays closed, and what is drawn at random before the first of `trial.epochs()`, which a
resumed trial draws again. Gradients, leakage and overfitting were not looked for."""


def write_loop_report(
    path: Path,
    _steps: Sequence[dict[str, Any]],
    *,
    objective: LoopObjective,
    result: RunResult,
    identity: dict[str, Any],
) -> None:
    """Write `report.md` for an own loop that has ended, of which no steps are known.

    `identity` has the run's configuration, epochs and seeds.
    """
    summary = [
        f"- best epoch {result.best_epoch + 1} of {len(result.history)} trained, {identity['epochs']} planned",
        f"- seed {identity['seed']}, split seed {identity['split_seed']}",
        *([f"- {result.resume_note}"] if result.resume_note else []),
    ]
    rows = [f"| `{setting.name}` | `{code(setting.value)}` |" for setting in own_settings(identity["config"])]
    write_sections(
        path,
        {
            f"{objective.name}: {result.status}, best {objective.metric} {result.best_value:.6g}": summary,
            "Configuration": ["| setting | value |", "|---|---|", *rows] if rows else ["No settings."],
            "What was reported": [*_reported(result), *image(path, "curves.png", "Curves over the epochs")],
            "What was not looked after": [_NOT_LOOKED_AFTER],
        },
    )


def drawn(history: Sequence[EpochRecord], metric: str) -> list[str]:
    """What of the reported numbers to draw over the epochs, the study's metric first."""
    names = [name for record in history for name in record.metrics if name != "epoch_seconds"]
    curves = [name.removeprefix("train_").removeprefix("val_") for name in names if name != "lr"]
    return list(dict.fromkeys([metric, *curves]))[:_PANELS]


def _reported(result: RunResult) -> list[str]:
    first, best, last = result.history[0].metrics, result.best_metrics, result.history[-1].metrics
    lines = ["| | first epoch | best epoch | last epoch |", "|---|---|---|---|"]
    for name in dict.fromkeys([*first, *best, *last]):
        cells = [f"{epoch[name]:.6g}" if name in epoch else "" for epoch in (first, best, last)]
        lines.append(f"| {name.replace('|', ' ')} | {' | '.join(cells)} |")
    return lines


FORMAT = 1  # of a checkpoint's state


@dataclass
class LoopResult(RunResult):
    """What an own loop came to.

    Attributes:
        objective: whose loop it was.
        config: of the trial.
        best: what was kept of the best epoch.
    """

    objective: LoopObjective
    config: Any
    best: Any

    @property
    def has_model(self) -> bool:
        """Whether the objective makes a module of it."""
        return self.objective.defines("export")

    def exported(self) -> Exported:
        """The module that the objective makes of the best epoch.

        Raises:
            ObjectiveError: the objective has no `export`, or it failed.
        """
        return exported(self.objective, self.best, self.config)


def exported(objective: LoopObjective, best: Any, config: Any) -> Exported:
    """The module that an objective makes of what was kept of the best epoch.

    Raises:
        ObjectiveError: the objective has no `export`, or it failed.
    """
    who = type(objective).__name__
    if not objective.defines("export"):
        raise ObjectiveError(f"{who} has no export(): define it to have a model that can be promoted")
    with users_code(f"{who}.export"):
        model, x = objective.export(best, config)
        if not isinstance(model, nn.Module):
            raise ObjectiveError(f"{who}.export must return a module and an example, not {type(model).__name__}")
        module, parts = exportable(model.eval(), call_of(model, x), x)
    return Exported(module, parts, [frozenset({0})] * len(parts))


class LoopRun(OwnLoop):
    """Runs a trial's own loop; for the parameters see `BaseTrainer`."""

    objective: LoopObjective

    def fit(self) -> LoopResult:
        """Run the loop, on where it was left.

        Raises:
            ObjectiveError: a mistake in the objective, with its file and line.
            NonFiniteError: its metric is NaN or infinite.
        """
        who = type(self.objective).__name__
        forget()
        with reproducible(deterministic=False), self.files.logging():
            try:
                verdict = self._train()
            except BaseException:
                forget()  # a library that refers to a connection keeps it open, and the other ranks waiting
                raise
            finally:
                if self.ranks.first:
                    shutil.rmtree(self.checkpoint, ignore_errors=True)
            if not self.curve.history:
                raise ObjectiveError(f"{who}.run ended without a report: call trial.report in each of trial.epochs()")
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
                trial.meet(f"ends after epoch {self.curve.next_epoch}")
        except Exception as error:  # whatever the user's code raises
            if trial.failure is None:
                self._raise(error)
        if trial.failure is not None:  # of the service, whatever the loop made of it
            raise trial.failure

    def _raise(self, error: Exception) -> NoReturn:
        """Raise what ended the loop, told by the user's file and line; the log has where it went from there."""
        if isinstance(error, (ObjectiveError, NonFiniteError)):
            raise error
        if is_out_of_memory(error):
            raise DeviceMemoryError(None, self.device, str(error).strip().splitlines()[0]) from error
        self.files.log.error("%s", traceback.format_exc())
        raise ObjectiveError(f"{type(self.objective).__name__}.run: {blame(error)}") from error

    def _start(self) -> tuple[Any, Verdict]:
        """Restore the last checkpoint, if there is one, and report its epochs again."""
        restored, source = self._restore(), source_file(type(self.objective))
        identity = {
            "format": FORMAT,
            "objective": self.objective.name,
            "config": plain_config(self.config, "suggest"),
            **self.plan.identity,
            "split_hash": "",
        }
        self.resolved = {**identity, "environment": environment(self.device, source, self.ranks.world)}
        if restored is not None:
            require_same(restored, identity)
            self.curve.load_state_dict(restored)
            if changed := differences(restored["environment"], self.resolved["environment"]):
                self.notes.append(f"not exact after epoch {self.curve.next_epoch}: {changed}")
            self.files.log.info("%s", "; ".join([f"resumed after epoch {self.curve.next_epoch}", *self.notes]))
        changes = uncommitted(source.parent if source else Path.cwd()) if self.ranks.first else ""
        verdict = self._open(self.curve, self.resolved, changes, resumed_at=0 if restored else None)
        return None if restored is None else restored["state"], verdict

    def _restore(self) -> dict[str, Any] | None:
        """The last checkpoint, which rank 0 reads; what only it needs of that is not told to the others."""
        read: list[dict[str, Any] | None] = []

        def reads() -> dict[str, Any] | None:
            shutil.rmtree(self.checkpoint, ignore_errors=True)
            state = None if self.kept is None else self.kept.restore()
            read.append(state)
            if state is None:
                return None
            unpack(state.pop("folder", {}), self.checkpoint)
            return {**state, "best": {**state["best"], "model": None}}

        told = self.ranks.led(reads)
        return read[0] if read else told

    def _finish(self, verdict: Verdict) -> LoopResult:
        # A loop that ends by itself before its last epoch has decided that it is done.
        finished = verdict == Verdict.CONTINUE or self.curve.next_epoch >= self.plan.epochs
        result = LoopResult(
            **self._shared_result(self.curve, verdict, self.notes, finished=finished),
            objective=self.objective,
            config=self.config,
            best=self.curve.best["model"],
        )
        if result.status != "stopped":
            names = drawn(result.history, self.objective.metric)
            write = partial(write_loop_report, objective=self.objective, result=result, identity=self.resolved)
            self._log_files([*self.files.finish(result, names, write), *self.logged])
        return result
