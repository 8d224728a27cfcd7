"""Run an objective that has its own training loop."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from hpsearch.objectives.errors import ObjectiveError, blame, is_out_of_memory, users_code
from hpsearch.objectives.own_loop.folder import place, remove, unpack
from hpsearch.objectives.own_loop.loop_objective import LoopObjective, plain_config
from hpsearch.objectives.own_loop.loop_trial import LoopTrial
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.evaluation.step import call_of
from hpsearch.objectives.training.exportable import exportable
from hpsearch.objectives.training.loop.epoch import require_same
from hpsearch.objectives.training.loop.guards import DeviceMemoryError, NonFiniteError
from hpsearch.objectives.training.ranks import current
from hpsearch.objectives.training.reports.report import code, image, own_settings, write_sections
from hpsearch.objectives.training.reports.run_dir import RunDir
from hpsearch.objectives.training.reproducibility.environment import differences, environment, uncommitted
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.reproducibility.seeds import reproducible, set_seed
from hpsearch.objectives.training.result import Exported, RunResult, status_of
from hpsearch.objectives.training.session import Curve, LocalSession, Session, Verdict, on_ranks
from hpsearch.objectives.training.trainer import device_named


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


def write_loop_report(path: Path, objective: LoopObjective, result: RunResult, identity: dict[str, Any]) -> None:
    """Writes `report.md` for an own loop that has ended.

    Args:
        path: the file to write; the curves lie beside it.
        objective: what was trained.
        result: what it came to.
        identity: of the run: its configuration, epochs and seeds.
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


class LoopRun:
    """Runs a trial's own loop.

    Args:
        objective: what to train.
        config: how.
        plan: its epochs and seeds.
        session: where the run is kept and who may end it; `LocalSession(run_dir)` unless given.
        run_dir: where configuration, log and numbers go.
        device: such as "cpu" or "cuda:1"; an accelerator where there is one, unless given.
    """

    def __init__(
        self,
        objective: LoopObjective,
        config: Any,
        plan: RunPlan,
        *,
        session: Session | None = None,
        run_dir: Path | None = None,
        device: str | None = None,
    ) -> None:
        if run_dir is None and session is not None:
            run_dir = session.run_dir
        self._objective, self._config, self._plan = objective, config, plan
        self._ranks = current()
        if not self._ranks.first:  # it speaks to nobody and writes nothing
            session = run_dir = None
        self._kept = LocalSession(run_dir) if session is None and run_dir is not None else session
        self._session = self._kept if self._ranks.alone else on_ranks(self._kept, self._ranks)
        self._files = RunDir(run_dir, told=self._ranks.first)
        self._folder, self._checkpoint = self._ranks.told((run_dir and run_dir.resolve(), place(run_dir)))
        self._device = device_named(device)
        self._notes: list[str] = []
        curve = None if self._session is None else self._session.curve
        self._curve = curve or Curve(objective.metric, maximize=objective.direction == "maximize")
        self._logged: list[Path] = []

    def fit(self) -> LoopResult:
        """Run the loop, on where it was left.

        Raises:
            ObjectiveError: a mistake in the objective, with its file and line.
            NonFiniteError: its metric is NaN or infinite.
        """
        who = type(self._objective).__name__
        forget()
        with reproducible(deterministic=False), self._files.logging():
            try:
                verdict = self._train()
            except BaseException:
                forget()  # a library that refers to a connection keeps it open, and the other ranks waiting
                raise
            finally:
                if self._ranks.first:
                    remove(self._checkpoint)
            if not self._curve.history:
                raise ObjectiveError(f"{who}.run ended without a report: call trial.report in each of trial.epochs()")
            return self._finish(verdict)

    def _train(self) -> Verdict:
        state, verdict = self._start()
        if verdict != Verdict.CONTINUE or self._curve.next_epoch >= self._plan.epochs:
            return verdict
        trial = self._trial(state)
        set_seed(self._plan.seed, "init")
        self._run(trial)
        return trial.verdict

    def _run(self, trial: LoopTrial) -> None:
        try:
            self._objective.run(trial)
            if trial.failure is None:
                trial.meet(f"ends after epoch {self._curve.next_epoch}")
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
            raise DeviceMemoryError(None, self._device, str(error).strip().splitlines()[0]) from error
        self._files.log.error("%s", traceback.format_exc())
        raise ObjectiveError(f"{type(self._objective).__name__}.run: {blame(error)}") from error

    @property
    def _identity(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "objective": self._objective.name,
            "config": plain_config(self._config, "suggest"),
            **self._plan.identity,
            "split_hash": "",
        }

    def _start(self) -> tuple[Any, Verdict]:
        """Restore the last checkpoint, if there is one, and report its epochs again."""
        restored = self._restore()
        source = inspect.getsourcefile(type(self._objective))
        known = Path(source) if source and Path(source).exists() else None
        self._environment = environment(self._device, known, self._ranks.world)
        if restored is not None:
            require_same({key: restored.get(key) for key in self._identity}, self._identity)
            self._curve.load_state_dict(restored)
            if changed := differences(restored["environment"], self._environment):
                self._notes.append(f"not exact after epoch {self._curve.next_epoch}: {changed}")
            self._files.log.info("%s", "; ".join([f"resumed after epoch {self._curve.next_epoch}", *self._notes]))
        changes = uncommitted(known.resolve().parent if known else Path.cwd()) if self._ranks.first else ""
        resolved = {**self._identity, "environment": self._environment}
        self._files.start(resolved, changes, resumed_at=0 if restored else None)
        for record in self._curve.history:
            if (verdict := self._tell(record)) != Verdict.CONTINUE:
                return None, verdict
        return None if restored is None else restored["state"], Verdict.CONTINUE

    def _restore(self) -> dict[str, Any] | None:
        """The last checkpoint, which rank 0 reads; what only it needs of that is not told to the others."""
        read: list[dict[str, Any] | None] = []

        def reads() -> dict[str, Any] | None:
            remove(self._checkpoint)
            state = None if self._kept is None else self._kept.restore()
            read.append(state)
            if state is None:
                return None
            unpack(state.pop("folder", {}), self._checkpoint)
            return {**state, "best": {**state["best"], "model": None}}

        told = self._ranks.led(reads)
        return read[0] if read else told

    def _trial(self, state: Any) -> LoopTrial:
        return LoopTrial(
            config=self._config,
            seed=self._plan.seed,
            split_seed=self._plan.split_seed,
            device=self._device,
            total_epochs=self._plan.epochs,
            state=state,
            folder=self._folder,
            checkpoint=self._checkpoint,
            ranks=self._ranks,
            metric=self._objective.metric,
            reported=self._objective.reported,
            curve=self._curve,
            report=self._report,
            log_artifact=self._logged.append,
        )

    def _report(self, record: EpochRecord, state: dict[str, Any], best: bool) -> Verdict:
        """Keep, then report, so that a death in between loses no reported epoch."""
        if self._session is not None:
            whole = {
                **self._identity,
                "environment": self._environment,
                "notes": self._notes,
                **state,
                **self._curve.state_dict(),
            }
            self._session.save(whole, best=best)
        shown = " ".join(f"{name}={value:.5g}" for name, value in record.metrics.items())
        self._files.log.info("epoch %d%s %s", record.epoch + 1, " (best)" if best else "", shown)
        return self._tell(record)

    def _tell(self, record: EpochRecord) -> Verdict:
        # Before a file is touched: a session whose trial was lost raises, and the run leaves no mark.
        verdict = Verdict.CONTINUE if self._session is None else self._session.report(record)
        self._files.record(record)
        return verdict

    def _finish(self, verdict: Verdict) -> LoopResult:
        # A loop that ends by itself before its last epoch has decided that it is done.
        finished = verdict == Verdict.CONTINUE or self._curve.next_epoch >= self._plan.epochs
        status = status_of(verdict, finished=finished)
        result = LoopResult(
            status=status,
            verdict=verdict,
            curve=self._curve,
            best_path=self._files.existing("best.pt"),
            last_path=self._files.existing("last.pt"),
            resume_note="; ".join(self._notes) or None,
            objective=self._objective,
            config=self._config,
            best=self._curve.best["model"],
        )
        if status != "stopped":
            names = drawn(result.history, self._objective.metric)
            kept = self._files.finish(result, names, lambda path, _: self._write_report(path, result))
            for path in [*kept, *self._logged]:
                if self._session is not None:
                    self._session.log(path)
        return result

    def _write_report(self, path: Path, result: LoopResult) -> None:
        write_loop_report(path, self._objective, result, self._identity)
