"""The table of a study's finalists: their values in the search and on new seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.console import format_command, pluralize
from hpsearch.search.errors import SearchError
from hpsearch.search.finalists.winner import (
    ExpectedScore,
    RunScore,
    WinnerSelection,
    estimate_test_score,
    read_run_score,
    select_winner,
)
from hpsearch.search.study.ranking import get_first_value
from hpsearch.search.study.study import StoredStudy, load_companion
from hpsearch.storage.attributes import BOUNDS, INFEASIBLE, RESPLIT_SCORE
from hpsearch.storage.rungs.fronts import count_dominating, to_losses
from hpsearch.storage.rungs.fronts import find_front as front_places
from hpsearch.storage.trials.history import read_finalist_studies

_STORED_KEYS = {"scores": "scored", "search_values": "searched", "search_trial": "of", "selected_trial": "taken"}
_STORED_KEYS |= {"missing_reasons": "reasons", "standard_error": "error", "expected_score": "expected"}
_STORED_KEYS |= {"train_size": "trained", "val_size": "validated", "test_size": "tested", "has_new_split": "divided"}


@dataclass(frozen=True)
class FinalistRow:
    """One finalist. The fields are stored with promotions.

    Attributes:
        trial: number of the trial in the search.
        search_value: value in the search, which has selection bias.
        values: value per new seed, without the optimism of the epoch choice; None if the value is missing. In a
            multi-objective study, this and the other fields up to `scores` refer to the first metric.
        mean: mean of the existing values; None if all are missing.
        spread: sample standard deviation (n - 1) of the existing values; None if fewer than two exist.
        missing_reasons: per seed, why the value is missing; None if the value exists.
        scores: per seed, the score with its standard error; None if the run has stored no score, as in a custom loop.
        search_values: in a multi-objective study, the values of all metrics in the search; else empty.
        means: in a multi-objective study, the means of all metrics on new seeds; empty if all runs are missing.
    """

    trial: int
    search_value: float
    values: tuple[float | None, ...]
    mean: float | None
    spread: float | None
    missing_reasons: tuple[str | None, ...] = ()
    scores: tuple[RunScore | None, ...] = ()
    search_values: tuple[float, ...] = ()
    means: tuple[float, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether the finalist has a value for every seed. Only complete finalists can win."""
        return None not in self.values


@dataclass(frozen=True)
class Finalists:
    """The finalists of a study. The fields are stored with promotions.

    Attributes:
        winner: trial number of the winner; None until all runs have ended, or if no finalist is complete. In a
            multi-objective study, the finalist that dominates all other finalists; None if no finalist does.
        tie: trials that are tied with the winner, best mean first; see `select_winner`.
        seeds: training seeds that all finalists share.
        rows: one row per finalist, in the order of the search ranking.
        study: name of the finalist study.
        pending: number of unfinished trials.
        standard_error: standard error of the difference of two means; None if unknown.
        tie_margin: largest difference of two means that is a tie; None if any difference may be chance.
        expected_score: expected test score of the winner; None if there is no winner, with one seed, if the errors of
            the runs are unknown, and in a multi-objective study.
        front: in a multi-objective study, the trials of the Pareto front of the means, best mean of the first metric
            first; empty until all runs have ended, and in a single-objective study.
    """

    winner: int | None
    tie: tuple[int, ...]
    seeds: tuple[int, ...]
    rows: tuple[FinalistRow, ...]
    study: str = ""
    pending: int = 0
    standard_error: float | None = None
    tie_margin: float | None = None
    expected_score: ExpectedScore | None = None
    front: tuple[int, ...] = ()

    @property
    def is_decided(self) -> bool:
        """Whether there is a winner or a Pareto front."""
        return self.winner is not None or bool(self.front)

    def is_confirmed(self, trial: int) -> bool:
        """Return whether a trial is the winner, is tied with the winner, or is on the Pareto front."""
        return trial == self.winner or trial in self.tie or trial in self.front

    def find_dominating(self, row: FinalistRow, maximize: Sequence[bool]) -> list[int]:
        """Return the trials of the Pareto front whose means dominate those of a finalist."""
        pairs = ((trial, to_losses([self.get_row(trial).means, row.means], maximize)) for trial in self.front)
        return [trial for trial, losses in pairs if trial != row.trial and count_dominating(losses)[1]]

    @property
    def run_scores(self) -> list[RunScore]:
        """The scores of the completed runs."""
        return [run for row in self.rows for run in row.scores if run is not None]

    @property
    def is_resplit(self) -> bool:
        """Whether the completed runs had new splits of the data, not only new seeds."""
        return bool(self.run_scores) and all(run.has_new_split for run in self.run_scores)

    def verdict(self, row: FinalistRow) -> Literal["winner", "tie", "front", "dominated", "confirmed", "incomplete"]:
        """Return the verdict on a finalist. A finalist without a value for each seed is `incomplete` and cannot win."""
        if row.trial == self.winner:
            return "winner"
        if self.front and row.is_complete:
            return "front" if row.trial in self.front else "dominated"
        if row.trial in self.tie:
            return "tie"
        return "confirmed" if row.is_complete else "incomplete"

    def get_row(self, trial: int) -> FinalistRow:
        """Return the row of the finalist with this trial number."""
        return next(row for row in self.rows if row.trial == trial)


def list_finalist_sets(study: StoredStudy) -> Iterator[StoredStudy]:
    """Yield the finalist studies of a search, newest first."""
    for name in reversed(read_finalist_studies(study.engine, study.study_id)):
        with suppress(SearchError):  # the study was deleted in the meantime
            yield load_companion(study, name)


def find_newest_set(study: StoredStudy) -> StoredStudy | None:
    """Return the newest finalist study of a search; None if there is none."""
    return next(list_finalist_sets(study), None)


def find_effective_set(study: StoredStudy) -> tuple[StoredStudy, Finalists] | None:
    """Return the newest set of finalists with a result, or the newest set if no set has one; None if there is no set.

    A new set replaces an older set only when the new set has a result.
    """
    tables = ((chosen, tabulate_finalists(study, chosen)) for chosen in list_finalist_sets(study))
    first = next(tables, None)
    if first is None or first[1].is_decided:
        return first
    return next((table for table in tables if table[1].is_decided), first)


def read_finalists(study: StoredStudy) -> Finalists | None:
    """Return the finalists of the set that `find_effective_set` selects; None if the study has no finalists."""
    effective = find_effective_set(study)
    return None if effective is None else effective[1]


def find_winner(study: StoredStudy, trial: int | None) -> tuple[StoredStudy, int]:
    """Return the effective set of finalists and its winner.

    Args:
        study: the search.
        trial: number of the expected winner; None accepts any winner. In a multi-objective study, the number selects a
            trial of the Pareto front.

    Raises:
        SearchError: there are no finalists, the newest set is unfinished, or the winner is not `trial`.
    """
    name, command = study.spec.name, format_command("finalists", study.spec.name)
    effective, newest = find_effective_set(study), find_newest_set(study)
    if effective is None or newest is None:
        raise SearchError(f"study {name!r} has no finalists yet; retrain its best trials with {command}")
    chosen, found = effective
    if pending := tabulate_finalists(study, newest).pending:  # the newest set may replace an earlier winner
        where = f"the finalists of {name!r}, in {newest.spec.name},"
        raise SearchError(f"{where} have {pluralize(pending, 'unfinished run')}; continue with {command}")
    if trial is not None and trial in found.front:
        return chosen, trial
    if found.winner is None and found.front:
        front = ", ".join(map(str, found.front))
        raise SearchError(
            f"no finalist of {name!r} dominates all others; choose one with --trial ({front}) or --prefer"
        )
    if found.winner is None:
        raise SearchError(f"the finalists of {name!r} have no winner; see the reasons with {command}")
    if trial not in {None, found.winner}:
        raise SearchError(f"--trial {trial} differs from the winner {found.winner} of {name!r}; remove --trial")
    return chosen, found.winner


def tabulate_finalists(study: StoredStudy, chosen: StoredStudy) -> Finalists:
    """Return the table of the finalists of the search `study` from the results of the finalist study `chosen`."""
    of, spec = chosen.finalists_of, study.spec
    n_metrics = len(spec.maximize_each)
    search_values = {t.number: tuple(t.values) for t in study.trials() if len(t.values or ()) == n_metrics}
    ran = {of.get_trial_and_seed(t.number): t for t in chosen.trials() if t.number < chosen.spec.n_trials}
    rows = tuple(
        _make_row(number, search_values[number], [ran.get((number, seed)) for seed in of.seeds])
        for number in of.trials
        if number in search_values  # a damaged database may lack the value or the trial
    )
    pending = chosen.spec.n_trials - sum(trial.state.is_finished() for trial in ran.values())
    complete = {row.trial: [value for value in row.values if value is not None] for row in rows if row.is_complete}
    if spec.is_multi_objective:
        front = () if pending else _find_front_trials([row for row in rows if row.is_complete], spec.maximize_each)
        choice = WinnerSelection(front[0] if len(front) == 1 else None, (), None)
    else:
        front, choice = (), select_winner({} if pending else complete, maximize=spec.maximize)
    return Finalists(
        winner=choice.winner,
        tie=choice.tie,
        seeds=tuple(of.seeds),
        rows=rows,
        study=chosen.spec.name,
        pending=pending,
        standard_error=choice.standard_error,
        tie_margin=choice.tie_margin,
        expected_score=None if spec.is_multi_objective else _estimate_score(study, rows, choice),
        front=front,
    )


def _find_front_trials(rows: Sequence[FinalistRow], maximize: Sequence[bool]) -> tuple[int, ...]:
    """Return the trials of the Pareto front of the means, best mean of the first metric first."""
    members = [rows[place] for place in front_places(to_losses([row.means for row in rows], maximize))]
    sign = -1 if maximize[0] else 1
    return tuple(row.trial for row in sorted(members, key=lambda row: (sign * row.means[0], row.trial)))


def _estimate_score(study: StoredStudy, rows: Sequence[FinalistRow], choice: WinnerSelection) -> ExpectedScore | None:
    runs = {row.trial: [run for run in row.scores if run is not None] for row in rows if row.is_complete}
    if any(len(found) < len(rows[0].values) for found in runs.values()):
        return None  # a set of an earlier version without scores of runs, or a custom loop
    declared = study.attrs.get(BOUNDS)
    bounds = None
    if declared is not None:
        low, high = declared
        bounds = (-math.inf if low is None else float(low), math.inf if high is None else float(high))
    spec = study.spec
    return estimate_test_score(runs, choice, metric=spec.metric, maximize=spec.maximize, bounds=bounds)


def _make_row(number: int, search_values: tuple[float, ...], trials: list[FrozenTrial | None]) -> FinalistRow:
    is_multi_objective = len(search_values) > 1
    complete = [
        t if t is not None and t.state == TrialState.COMPLETE and len(t.values or ()) == len(search_values) else None
        for t in trials
    ]
    values = tuple(None if t is None else get_first_value(t) for t in complete)
    existing = [value for value in values if value is not None]
    vectors = [t.values for t in complete if t is not None]
    return FinalistRow(
        trial=number,
        search_value=search_values[0],
        search_values=search_values if is_multi_objective else (),
        means=tuple(map(statistics.fmean, zip(*vectors, strict=True))) if is_multi_objective else (),
        values=values,
        mean=statistics.fmean(existing) if existing else None,
        spread=statistics.stdev(existing) if len(existing) > 1 else None,
        missing_reasons=tuple(describe_missing_value(trial) for trial in trials),
        scores=tuple(
            None if value is None or trial is None else read_run_score(value, trial.user_attrs.get(RESPLIT_SCORE))
            for value, trial in zip(values, trials, strict=True)
        ),
    )


def to_record(result: Any) -> dict[str, Any]:
    """Return a dataclass, and the dataclasses in its fields, as dictionaries with the names that the database uses."""
    return asdict(result, dict_factory=lambda items: {_STORED_KEYS.get(key, key): value for key, value in items})


def describe_missing_value(trial: FrozenTrial | None) -> str | None:
    """Return why a run has no value: its state, or how it ended; None if the run has a value."""
    if trial is None or trial.state == TrialState.WAITING:
        return "waiting"
    if trial.state == TrialState.COMPLETE:
        return None if trial.values else "value lost"  # a damaged database may lack it
    if trial.state == TrialState.RUNNING:
        return "running"
    return "diverged" if trial.user_attrs.get(INFEASIBLE) else "failed"
