"""The summary of a study: counts, best trials, Pareto front, rungs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.console import format_number, pluralize
from hpsearch.search.pruners.study_pruner import make_rungs
from hpsearch.search.spec.spec import MAX_TRIALS, StudySpec
from hpsearch.search.study.ranking import find_pareto_front, is_feasible
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import FOLDS_ERROR, INFEASIBLE, PRUNING, RUNG, TRACKING, VIOLATIONS
from hpsearch.storage.rungs.generations import read_generations
from hpsearch.storage.rungs.rungs import read_rung_counts
from hpsearch.storage.trials.history import read_attempts

_MAX_LISTED = 12  # maximum number of trials of the Pareto front in the text


def format_values(spec: StudySpec, trial: FrozenTrial) -> str:
    """Return a trial's values as text: ``accuracy 0.9871, latency_ms 1.92``."""
    values = trial.values or ()
    return ", ".join(
        f"{name} {format_number(value)}" for name, value in zip(spec.direction_by_metric, values, strict=False)
    )


def format_folds(spec: StudySpec, trial: FrozenTrial) -> str:
    """Return the number of folds, and the standard error of their mean; empty for a trial without folds."""
    error = trial.user_attrs.get(FOLDS_ERROR)
    if not isinstance(error, float):  # missing or damaged
        return ""
    return f" (mean of {spec.folds} folds, standard error {error:.2g})"


def list_violations(spec: StudySpec, trial: FrozenTrial) -> list[str]:
    """Return a line for each constraint that a finished trial violates: ``model_mb 12.5 is not <= 10``."""
    if not spec.constraints or not trial.state.is_finished():
        return []
    if lines := trial.user_attrs.get(VIOLATIONS):
        return [str(line) for line in lines]
    # A trial that was pruned while it was paused at a rung has only Optuna's constraint values.
    violations = {bound: trial.constraints.get(bound.metric, 0.0) for bound in spec.constraint_bounds}
    return [
        bound.format_violation(bound.limit + excess if bound.operator == "<=" else bound.limit - excess)
        for bound, excess in violations.items()
        if excess > 0
    ]


def format_front(spec: StudySpec, front: Sequence[FrozenTrial]) -> list[str]:
    """Return the Pareto front as lines of text: a title, and one line per trial, in the given order."""
    lines = [f"Pareto front: {pluralize(len(front), 'trial')}"]
    rows = [("trial", *spec.direction_by_metric)]
    rows += [(str(trial.number), *(format_number(value, 6) for value in trial.values)) for trial in front[:_MAX_LISTED]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["    " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    if len(front) > _MAX_LISTED:
        lines.append(f"    and {len(front) - _MAX_LISTED} more trials")
    return lines


def compute_run_seconds(study: StoredStudy, trials: Sequence[FrozenTrial]) -> dict[int, float]:
    """Return the seconds for which each trial ran, by trial id; pauses at rungs do not count."""
    paused = [trial._trial_id for trial in trials if RUNG in trial.user_attrs]
    found = {trial._trial_id: trial.duration.total_seconds() for trial in trials if trial.duration is not None}
    attempts = read_attempts(study.engine, paused)
    return found | {trial_id: sum(each.seconds for each in made) for trial_id, made in attempts.items()}


def format_rungs(study: StoredStudy) -> list[str]:
    """Return one line per rung that a trial has reached; with the pruner `pbt`, one line on the generations."""
    if (rungs := make_rungs(study.spec)) is None:
        return []
    if rungs.decide is not None:
        found = read_generations(study.engine, study.study_id)
        ended, copied = len({each.generation for each in found}), sum(each.parent is not None for each in found)
        total = pluralize(len(rungs.epochs), "generation")
        return [f"{ended} of {total} ended; {'1 copy' if copied == 1 else f'{copied} copies'}"]
    lines = []
    for at in read_rung_counts(study.engine, study.study_id):
        epochs = pluralize(rungs.epochs[at.rung], "epoch")
        waiting = f", {at.waiting} paused" if at.waiting else ""
        pruned = f", {at.pruned} pruned" if at.pruned else ""
        lines.append(f"rung {at.rung}, {epochs}: {at.reached} reached, {at.promoted} promoted{waiting}{pruned}")
    return lines


@dataclass(frozen=True)
class Summary:
    """Summary of a study: numbers of trials, the best trials, and the epochs that pruning saved.

    Attributes:
        complete, pruned, failed, running, waiting: numbers of trials by state.
        infeasible: number of trials that diverged or ran out of memory. Optuna's state is PRUNED, but `pruned` does not
            count them.
        front: trials on the Pareto front; in a single-objective study, the best trial.
        out_of_bounds: number of COMPLETE trials that violate a constraint.
        epochs_run: number of trained epochs.
        epochs_saved: number of epochs that were not trained because of pruning; 0 without a limit of trials.
        untracked: number of trials that are not completely in MLflow.
    """

    complete: int
    pruned: int
    infeasible: int
    failed: int
    running: int
    waiting: int
    front: tuple[FrozenTrial, ...] = field(repr=False)
    out_of_bounds: int
    epochs_run: int
    epochs_saved: int
    untracked: int

    @property
    def best(self) -> FrozenTrial | None:
        """The best feasible COMPLETE trial by the first metric; None if there is none."""
        return self.front[0] if self.front else None

    @property
    def by_state(self) -> dict[str, int]:
        """The number of trials in each state."""
        states = ("complete", "pruned", "infeasible", "failed", "running", "waiting")
        return {state: getattr(self, state) for state in states}

    @property
    def finished(self) -> int:
        """The number of finished trials, in any final state."""
        return self.complete + self.pruned + self.infeasible + self.failed


def summarise(study: StoredStudy) -> Summary:
    """Return the current summary of a study."""
    trials = study.trials()
    by_state = {state: [t for t in trials if t.state == state] for state in TrialState}
    infeasible = [t for t in by_state[TrialState.PRUNED] if t.user_attrs.get(INFEASIBLE)]
    pruned = [t for t in by_state[TrialState.PRUNED] if not t.user_attrs.get(INFEASIBLE)]
    # Without a limit of trials, pruned trials leave their epochs to others. The end of a budget also prunes trials.
    saving = [t for t in pruned if PRUNING in t.user_attrs] if study.spec.n_trials < MAX_TRIALS else []
    return Summary(
        complete=len(by_state[TrialState.COMPLETE]),
        pruned=len(pruned),
        infeasible=len(infeasible),
        failed=len(by_state[TrialState.FAIL]),
        running=len(by_state[TrialState.RUNNING]),
        waiting=len(by_state[TrialState.WAITING]),
        front=tuple(find_pareto_front(trials, study.spec.maximize_each)),
        out_of_bounds=sum(not is_feasible(t) for t in by_state[TrialState.COMPLETE]),
        epochs_run=sum(len(t.intermediate_values) for t in trials),
        epochs_saved=sum(study.spec.epochs - len(t.intermediate_values) for t in saving if t.intermediate_values),
        untracked=sum(TRACKING in t.user_attrs for t in trials),
    )


def format_value(value: object) -> str:
    """Return a parameter's value as text for a table. Floats have four significant digits."""
    return format_number(value) if isinstance(value, float) else str(value)


def format_seconds(seconds: float) -> str:
    """Return a duration as text: ``42 s``, ``3.5 min``, ``2.1 h``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def get_study_page(dashboard_url: str, study_id: int) -> str:
    """Return the URL of the study's page in the Optuna dashboard."""
    return f"{dashboard_url.rstrip('/')}/dashboard/studies/{study_id}"
