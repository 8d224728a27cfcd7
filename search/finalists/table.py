"""The table of a study's finalists: what the search said of each, and what fresh seeds say."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.console import command
from hpsearch.search.errors import SearchError
from hpsearch.search.finalists.winner import Choice, Expected, Scored, choose, expect, scored_of
from hpsearch.search.study.ranking import first_value
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.storage.attributes import FRESH, INFEASIBLE
from hpsearch.storage.rungs.fronts import dominating, losses_of
from hpsearch.storage.rungs.fronts import front as front_places
from hpsearch.storage.trials.history import finalist_studies


@dataclass(frozen=True)
class FinalistRow:
    """One finalist.

    Attributes:
        trial: its number in the search.
        search_value: what it scored there, chosen as one of the best of many: too good by that choice.
        values: what it scored on each of the fresh seeds, by cross-fitting where the set has fresh divisions; None
            where it has not ended, failed or diverged.
        mean: of the values there are; None without any.
        spread: sample standard deviation (n - 1) of the values there are; None of fewer than two.
        reasons: why a value is missing, for each of the seeds; None where it is there.
        scored: what the values rest on; None of a run on the study's own division.
        searched: of several metrics, what it scored by all of them in the search; those above are of the first.
        means: likewise on the fresh seeds there are; empty without any.
    """

    trial: int
    search_value: float
    values: tuple[float | None, ...]
    mean: float | None
    spread: float | None
    reasons: tuple[str | None, ...] = ()
    scored: tuple[Scored | None, ...] = ()
    searched: tuple[float, ...] = ()
    means: tuple[float, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it has a value for every seed: none wins without."""
        return None not in self.values


@dataclass(frozen=True)
class Finalists:
    """The finalists of a study.

    Attributes:
        winner: number, in the search, of the best trial on the fresh seeds; None until all have ended, and where none
            has a value for every seed. Of several metrics that which dominates all others, where there is one.
        tie: the trials that fresh seeds cannot tell from the winner, which is not among them; the better one first.
        seeds: on which all of them were trained.
        rows: in the order of the search.
        study: name of the study that they are trained in.
        pending: how many of its trials have not ended.
        error: standard error of the difference of two means; None where nothing can be said of it.
        expected: what new data will show of the winner; None without one, and where runs are not on fresh divisions.
        front: of several metrics, the trials that no other dominates by its means, the best by the first metric first;
            empty until all have ended.
    """

    winner: int | None
    tie: tuple[int, ...]
    seeds: tuple[int, ...]
    rows: tuple[FinalistRow, ...]
    study: str = ""
    pending: int = 0
    error: float | None = None
    expected: Expected | None = None
    front: tuple[int, ...] = ()

    @property
    def decided(self) -> bool:
        """Whether fresh seeds have said who wins, or who is on the front."""
        return self.winner is not None or bool(self.front)

    def stands(self, trial: int) -> bool:
        """Whether fresh seeds confirm a trial: it wins, cannot be told from the winner, or is on the front."""
        return trial == self.winner or trial in self.tie or trial in self.front

    def dominating(self, row: FinalistRow, maximize: Sequence[bool]) -> list[int]:
        """Return the trials of the front that dominate a finalist by their means."""
        pairs = ((trial, losses_of([self.row(trial).means, row.means], maximize)) for trial in self.front)
        return [trial for trial, losses in pairs if trial != row.trial and dominating(losses)[1]]

    @property
    def scored(self) -> list[Scored]:
        """The scores of the runs that have ended."""
        return [run for row in self.rows for run in row.scored if run is not None]

    @property
    def divided(self) -> bool:
        """Whether the runs that have ended were on fresh divisions of the data, and not on fresh seeds alone."""
        return bool(self.scored) and all(run.divided for run in self.scored)

    def verdict(self, row: FinalistRow) -> Literal["winner", "tie", "front", "dominated", "confirmed", "incomplete"]:
        """Return what became of a finalist: without a value for every seed it cannot win."""
        if row.trial == self.winner:
            return "winner"
        if self.front and row.whole:
            return "front" if row.trial in self.front else "dominated"
        if row.trial in self.tie:
            return "tie"
        return "confirmed" if row.whole else "incomplete"

    def row(self, trial: int) -> FinalistRow:
        """Return the row of a finalist."""
        return next(row for row in self.rows if row.trial == trial)


def finalist_sets(study: StoredStudy) -> Iterator[StoredStudy]:
    """Yield the studies that hold finalists of a study, the one made last first."""
    for name in reversed(finalist_studies(study.engine, study.study_id)):
        with suppress(SearchError):  # it was deleted just now
            yield load_study(study.storage, name)


def newest_set(study: StoredStudy) -> StoredStudy | None:
    """Return the study that holds the finalists that were chosen last; None without any."""
    return next(finalist_sets(study), None)


def counting_set(study: StoredStudy) -> tuple[StoredStudy, Finalists] | None:
    """Return the set that counts: the newest that has a winner, or without any the newest; None without a set.

    A set that is chosen anew replaces another when it has a winner itself, and not before.
    """
    tables = ((chosen, tabulate(study, chosen)) for chosen in finalist_sets(study))
    first = next(tables, None)
    if first is None or first[1].decided:
        return first
    return next((table for table in tables if table[1].decided), first)


def read_finalists(study: StoredStudy) -> Finalists | None:
    """Return the finalists of a study that count, as they stand, or None when none were chosen yet."""
    counting = counting_set(study)
    return None if counting is None else counting[1]


def decided_winner(study: StoredStudy, trial: int | None) -> tuple[StoredStudy, int]:
    """Return the set of finalists that counts, and its winner.

    Args:
        study: the search.
        trial: number of the expected winner; with several metrics it selects a trial of the front.

    Raises:
        SearchError: there are no finalists, the newest set is not done, or the winner is not `trial`.
    """
    name, again = study.spec.name, command("finalists", study.spec.name)
    counting, newest = counting_set(study), newest_set(study)
    if counting is None or newest is None:
        raise SearchError(f"study {name!r} has no finalists, which confirm a winner: choose them with {again}")
    chosen, found = counting
    if pending := tabulate(study, newest).pending:  # an earlier set may have a winner, which is about to be replaced
        where = f"the finalists of {name!r}, in {newest.spec.name},"
        raise SearchError(f"{where} are not done, {pending} are left: go on with {again}")
    if trial is not None and trial in found.front:
        return chosen, trial
    if found.winner is None and found.front:
        front = ", ".join(map(str, found.front))
        raise SearchError(
            f"no other finalist of {name!r} dominates trials {front}: choose one with --trial or --prefer"
        )
    if found.winner is None:
        raise SearchError(f"the finalists of {name!r} have no winner: see {again}")
    if trial not in {None, found.winner}:
        raise SearchError(
            f"--trial {trial}: the winner among the finalists of {name!r} is trial {found.winner}: leave it out"
        )
    return chosen, found.winner


def tabulate(study: StoredStudy, chosen: StoredStudy) -> Finalists:
    """Return the table of the finalists of `study` that the study `chosen` holds."""
    of = chosen.spec.finalists_of
    assert of is not None
    spec = study.spec
    searched = {trial.number: tuple(trial.values or ()) for trial in study.trials()}
    ran = {of.assignment(trial.number): trial for trial in chosen.trials() if trial.number < chosen.spec.n_trials}
    rows = tuple(_row(number, searched[number], [ran.get((number, seed)) for seed in of.seeds]) for number in of.trials)
    pending = chosen.spec.n_trials - sum(trial.state.is_finished() for trial in ran.values())
    whole = {row.trial: [value for value in row.values if value is not None] for row in rows if row.whole}
    if spec.several:
        front = () if pending else _front([row for row in rows if row.whole], spec.maximized)
        choice = Choice(front[0] if len(front) == 1 else None, (), None)
    else:
        front, choice = (), choose({} if pending else whole, maximize=spec.maximize)
    return Finalists(
        winner=choice.winner,
        tie=choice.tie,
        seeds=tuple(of.seeds),
        rows=rows,
        study=chosen.spec.name,
        pending=pending,
        error=choice.error,
        expected=None if spec.several else _expected(study, rows, choice),
        front=front,
    )


def _front(rows: Sequence[FinalistRow], maximize: Sequence[bool]) -> tuple[int, ...]:
    """The trials that no other dominates by its means, the best by the first metric first."""
    members = [rows[place] for place in front_places(losses_of([row.means for row in rows], maximize))]
    sign = -1 if maximize[0] else 1
    return tuple(row.trial for row in sorted(members, key=lambda row: (sign * row.means[0], row.trial)))


def _expected(study: StoredStudy, rows: Sequence[FinalistRow], choice: Choice) -> Expected | None:
    runs = {row.trial: [run for run in row.scored if run is not None] for row in rows if row.whole}
    if any(len(found) < len(rows[0].values) for found in runs.values()):
        return None  # the set was chosen before runs had such scores, or is of an own loop
    return expect(runs, choice, metric=study.spec.metric, maximize=study.spec.maximize)


def _row(number: int, searched: tuple[float, ...], trials: list[FrozenTrial | None]) -> FinalistRow:
    values = tuple(first_value(t) if t is not None and t.state == TrialState.COMPLETE else None for t in trials)
    there = [value for value in values if value is not None]
    vectors = [t.values for t in trials if t is not None and t.state == TrialState.COMPLETE]
    several = len(searched) > 1
    return FinalistRow(
        trial=number,
        search_value=searched[0],
        searched=searched if several else (),
        means=tuple(map(statistics.fmean, zip(*vectors, strict=True))) if several else (),
        values=values,
        mean=statistics.fmean(there) if there else None,
        spread=statistics.stdev(there) if len(there) > 1 else None,
        reasons=tuple(why_missing(trial) for trial in trials),
        scored=tuple(
            None if value is None or trial is None else scored_of(value, trial.user_attrs.get(FRESH))
            for value, trial in zip(values, trials, strict=True)
        ),
    )


def why_missing(trial: FrozenTrial | None) -> str | None:
    """Return why a run has no value; None where it has one."""
    if trial is None or trial.state == TrialState.WAITING:
        return "waiting"
    if trial.state == TrialState.COMPLETE:
        return None
    if trial.state == TrialState.RUNNING:
        return "running"
    return "diverged" if trial.user_attrs.get(INFEASIBLE) else "failed"
