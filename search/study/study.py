"""A study with the spec that is stored in it, loaded by its name."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import optuna
import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from hpsearch.objectives.base import BaseObjective
from hpsearch.objectives.loading import source_hash
from hpsearch.search.console import command
from hpsearch.search.errors import SearchError, nearest
from hpsearch.search.spec.spec import StudySpec, parse_spec
from hpsearch.search.study.ranking import front_of, rank_trials
from hpsearch.storage.attributes import FOLDER, SOURCE, SPEC, STARTED_AT
from hpsearch.storage.study_storage import PostgresStorage
from hpsearch.storage.trials.giving_up import GivenUp
from hpsearch.storage.trials.spending import Spending, done, read_spending


@dataclass(frozen=True)
class StoredStudy:
    """A study together with the spec stored in it."""

    spec: StudySpec
    storage: PostgresStorage
    study_id: int

    @property
    def engine(self) -> sa.Engine:
        """The database that the study is kept in."""
        return self.storage.engine

    @property
    def attrs(self) -> dict[str, Any]:
        """The study's user attributes as they are now."""
        return self.storage.get_study_user_attrs(self.study_id)

    @property
    def budget(self) -> int:
        """How many trials the study may have by now: it is extended while others have it open."""
        return int(self.attrs[SPEC]["n_trials"])

    @property
    def given_up(self) -> GivenUp | None:
        """That the rest of the budget was given up, and why; None while it was not."""
        return GivenUp.of(self.attrs)

    @property
    def spending(self) -> Spending | None:
        """What is spent of its budgets in epochs and seconds; None where it has none."""
        return read_spending(self.engine, self.study_id) if self.spec.metered else None

    def is_spent(self, finished: int) -> bool:
        """Whether the budget is, in trials, epochs or seconds, or its rest given up, with so many trials ended."""
        attrs = self.attrs
        budget, given_up = int(attrs[SPEC]["n_trials"]), GivenUp.of(attrs)
        last = budget if given_up is None else min(budget, given_up.started)
        return finished >= last or ((spending := self.spending) is not None and spending.over)

    def done(self, finished: int) -> str:
        """Return for a person what is spent, with so many trials that have ended: ``12 of 50 trials``."""
        if (spending := self.spending) is None:
            return f"{finished} of {self.budget} trials"
        return done(finished, self.budget, spending).replace("/", " of ")

    @property
    def out_of_time(self) -> bool:
        """Whether the study's time is up: nothing new is begun."""
        if self.spec.timeout is None:
            return False
        started = self.attrs.get(STARTED_AT)
        return started is not None and time.time() >= float(started) + self.spec.timeout

    @property
    def folder(self) -> str:
        """The name of the study's folders, for run directories and checkpoints; no other study has it."""
        # The number is the database's: a study deleted and made again must not find the old one's checkpoints.
        return str(self.attrs.get(FOLDER, f"{self.spec.name}-{self.study_id}"))

    @property
    def go_on(self) -> str:
        """The command that runs what is left of the study."""
        if (of := self.spec.finalists_of) is not None:
            return command("finalists", of.study) if of.refit is None else command("promote", of.study, "--refit")
        return command("run", self.spec.objective, "--name", self.spec.name)

    def set_attr(self, key: str, value: Any) -> None:
        """Set a user attribute of the study."""
        self.storage.set_study_user_attr(self.study_id, key, value)

    def source_warning(self, objective: BaseObjective) -> str | None:
        """Return a warning when the objective's code is no longer what the study was created with."""
        if self.attrs.get(SOURCE, source_hash(objective)) == source_hash(objective):
            return None
        return (
            f"the code of {self.spec.objective} has changed since study {self.spec.name!r} was created: "
            "its trials may not be comparable; choose another --name to search the new code"
        )

    def open(self) -> optuna.Study:
        """Return Optuna's study with the spec's pruner; the sampler is set anew for each trial."""
        return optuna.load_study(
            study_name=self.spec.name,
            storage=self.storage,
            sampler=optuna.samplers.RandomSampler(),
            pruner=self.spec.pruner.build(),
        )

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return all trials, or those in the given states, without the deep copy that `study.trials` makes."""
        return self.storage.get_all_trials(self.study_id, deepcopy=False, states=states or None)

    def best_trials(self, *, infeasible: bool = False) -> list[FrozenTrial]:
        """Return the trials that have run to their end within all bounds, the best one first; see `rank_trials`."""
        return rank_trials(self.trials(TrialState.COMPLETE), self.spec.maximized, infeasible=infeasible)

    def front(self, *, infeasible: bool = False) -> list[FrozenTrial]:
        """Return those that no other dominates, the best by the first metric first; of one metric the best alone."""
        return front_of(self.trials(TrialState.COMPLETE), self.spec.maximized, infeasible=infeasible)


def load_study(storage: PostgresStorage, name: str) -> StoredStudy:
    """Return the study of that name.

    Raises:
        SearchError: there is none, or hpsearch did not make it.
    """
    study_id = find_study(storage, name)
    if study_id is None:
        names = [s.study_name for s in storage.get_all_studies()]
        hint = nearest(name, names) if names else "; there are none yet"
        raise SearchError(f"no study {name!r}{hint}")
    stored = storage.get_study_user_attrs(study_id).get(SPEC)
    if stored is None:
        raise SearchError(f"study {name!r} has no spec: it was not made by hpsearch")
    return StoredStudy(parse_spec(stored), storage, study_id)


def find_study(storage: PostgresStorage, name: str) -> int | None:
    """Return the number of the study of that name, if there is one."""
    try:
        return storage.get_study_id_from_name(name)
    except KeyError:
        return None


def parent_of(chosen: StoredStudy) -> StoredStudy:
    """Return the study whose finalists, or whose refit, a study holds.

    Raises:
        SearchError: it was deleted.
    """
    of = chosen.spec.finalists_of
    assert of is not None
    try:
        parent = load_study(chosen.storage, of.study)
    except SearchError:
        parent = None
    if parent is None or parent.study_id != of.study_id:
        whose = "finalists" if of.refit is None else "refit"
        raise SearchError(
            f"study {of.study!r}, whose {whose} {chosen.spec.name!r} holds, was deleted: "
            f"delete them too: {command('delete', chosen.spec.name)}"
        )
    return parent
