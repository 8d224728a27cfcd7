"""The summary of a study: counts, best trials, Pareto front, rungs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.console import pluralize
from hpsearch.search.pruners.study_pruner import make_rungs
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.ranking import find_pareto_front, is_feasible
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import INFEASIBLE, RUNG, TRACKING, VIOLATIONS
from hpsearch.storage.rungs.rungs import read_rung_counts
from hpsearch.storage.trials.history import read_attempts

_MOST = 12  # of the front's trials in a text


def format_values(spec: StudySpec, trial: FrozenTrial) -> str:
    """Return a trial's values for a person: ``accuracy 0.9871, latency_ms 1.92``."""
    values = trial.values or ()
    return ", ".join(f"{name} {value:.4g}" for name, value in zip(spec.direction_by_metric, values, strict=False))


def list_violations(spec: StudySpec, trial: FrozenTrial) -> list[str]:
    """Return a line for each constraint that a finished trial breaks: ``model_mb 12.5, not <= 10``."""
    if not spec.constraints or not trial.state.is_finished():
        return []
    if lines := trial.user_attrs.get(VIOLATIONS):
        return [str(line) for line in lines]
    # One that was pruned while it waited at a rung was settled by another: by how much is there, as Optuna has it.
    over = {bound: trial.constraints.get(bound.metric, 0.0) for bound in spec.bounds}
    return [
        bound.format_violation(bound.limit + by if bound.sign == "<=" else bound.limit - by)
        for bound, by in over.items()
        if by > 0
    ]


def format_front(spec: StudySpec, front: Sequence[FrozenTrial]) -> list[str]:
    """Return the front as lines of plain text, a line for each trial, the best by the first metric first."""
    many = f"{len(front)} trials that no other dominates" if len(front) > 1 else "1 trial"
    lines = [f"front: {many}"]
    rows = [("trial", *spec.direction_by_metric)]
    rows += [(str(trial.number), *(f"{value:.6g}" for value in trial.values)) for trial in front[:_MOST]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["    " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    if len(front) > _MOST:
        lines.append(f"    and {len(front) - _MOST} more")
    return lines


def compute_run_seconds(study: StoredStudy, trials: Sequence[FrozenTrial]) -> dict[int, float]:
    """Return for how long each finished trial was run, by its id: without the time that it waited at rungs."""
    paused = [trial._trial_id for trial in trials if RUNG in trial.user_attrs]
    found = {trial._trial_id: trial.duration.total_seconds() for trial in trials if trial.duration is not None}
    attempts = read_attempts(study.engine, paused)
    return found | {trial_id: sum(each.seconds for each in made) for trial_id, made in attempts.items()}


def format_rungs(study: StoredStudy) -> list[str]:
    """Return a line for each rung that a trial has reached; none where no trial waits at rungs."""
    if (rungs := make_rungs(study.spec)) is None:
        return []
    lines = []
    for at in read_rung_counts(study.engine, study.study_id):
        epochs = pluralize(rungs.epochs[at.rung], "epoch")
        waiting = f", {at.waiting} {'waits' if at.waiting == 1 else 'wait'}" if at.waiting else ""
        pruned = f", {at.pruned} {'was' if at.pruned == 1 else 'were'} pruned" if at.pruned else ""
        lines.append(f"rung {at.rung}, {epochs}: {at.reached} reached it, {at.promoted} went on{waiting}{pruned}")
    return lines


@dataclass(frozen=True)
class Summary:
    """The counts of a study's trials, its best trial, and the time pruning saved."""

    complete: int
    pruned: int
    infeasible: int  # diverged or too large: PRUNED in Optuna, counted apart
    failed: int
    running: int
    waiting: int
    front: tuple[FrozenTrial, ...] = field(repr=False)  # that none dominates; of one metric the best
    out_of_bounds: int  # COMPLETE ones that break a constraint
    epochs_run: int
    epochs_saved: int
    untracked: int  # trials of which something did not reach MLflow
    seconds_saved: float  # at each pruned trial's own pace per epoch

    @property
    def best(self) -> FrozenTrial | None:
        """The best COMPLETE trial within all bounds; of several metrics the best by the first."""
        return self.front[0] if self.front else None

    @property
    def by_state(self) -> dict[str, int]:
        """The number of trials in each state."""
        states = ("complete", "pruned", "infeasible", "failed", "running", "waiting")
        return {state: getattr(self, state) for state in states}

    @property
    def finished(self) -> int:
        """What the budget has spent."""
        return self.complete + self.pruned + self.infeasible + self.failed


def summarise(study: StoredStudy) -> Summary:
    """Return the summary of a study as it stands."""
    trials = study.trials()
    by_state = {state: [t for t in trials if t.state == state] for state in TrialState}
    infeasible = [t for t in by_state[TrialState.PRUNED] if t.user_attrs.get(INFEASIBLE)]
    pruned = [t for t in by_state[TrialState.PRUNED] if not t.user_attrs.get(INFEASIBLE)]
    ran = compute_run_seconds(study, pruned)
    saved_epochs, saved_seconds = 0, 0.0
    for trial in pruned:
        done = len(trial.intermediate_values)
        if done and trial._trial_id in ran:
            left = study.spec.epochs - done
            saved_epochs += left
            saved_seconds += ran[trial._trial_id] / done * left
    return Summary(
        complete=len(by_state[TrialState.COMPLETE]),
        pruned=len(pruned),
        infeasible=len(infeasible),
        failed=len(by_state[TrialState.FAIL]),
        running=len(by_state[TrialState.RUNNING]),
        waiting=len(by_state[TrialState.WAITING]),
        front=tuple(find_pareto_front(trials, study.spec.maximized)),
        out_of_bounds=sum(not is_feasible(t) for t in by_state[TrialState.COMPLETE]),
        epochs_run=sum(len(t.intermediate_values) for t in trials),
        epochs_saved=saved_epochs,
        untracked=sum(TRACKING in t.user_attrs for t in trials),
        seconds_saved=saved_seconds,
    )


def format_value(value: object) -> str:
    """Return a parameter's value for a table: floats with four digits that count."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def format_seconds(seconds: float) -> str:
    """Return a length of time for a person: ``42 s``, ``3.5 min``, ``2.1 h``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def study_page(dashboard_url: str, study_id: int) -> str:
    """Return the study's page in the Optuna dashboard."""
    return f"{dashboard_url.rstrip('/')}/dashboard/studies/{study_id}"
