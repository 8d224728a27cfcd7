"""Studies: created with their spec, joined by name, refused when the spec differs."""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optuna
import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from objectives import Objective
from objectives.loading import source_hash
from search.console import command
from search.errors import SearchError, nearest
from search.spec.spec import StudySpec, differences, parse_spec, searched_by
from search.study.ranking import rank_trials
from storage.attributes import FOLDER, SOURCE, SPEC, STARTED_AT
from storage.database.locks import name_lock
from storage.study_storage import PostgresStorage


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
        """How many trials the study is to have by now: `hpsearch extend` changes it while others have it open."""
        return int(self.attrs[SPEC]["n_trials"])

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
            return command("finalists", of.study)
        return command("run", self.spec.objective, "--name", self.spec.name)

    def set_attr(self, key: str, value: Any) -> None:
        """Set a user attribute of the study."""
        self.storage.set_study_user_attr(self.study_id, key, value)

    def source_warning(self, objective: Objective) -> str | None:
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

    def best_trials(self) -> list[FrozenTrial]:
        """Return the trials that have run to their end, the best one first; of equal values the earliest."""
        return rank_trials(self.trials(TrialState.COMPLETE), maximize=self.spec.maximize)


def complete_settings(settings: dict[str, Any], objective: Objective) -> dict[str, Any]:
    """Return `settings` with the objective's own defaults where they say nothing."""
    from objectives.training.evaluation.metrics import DIRECTIONS

    metric = settings.get("metric", objective.metric)
    own_way = objective.direction if metric == objective.metric else DIRECTIONS.get(metric, objective.direction)
    defaults = {
        "name": objective.name,
        "metric": metric,
        "direction": own_way,
        "epochs": objective.epochs,
        "n_trials": objective.n_trials,
    }
    return {**defaults, **settings}


def create_or_join(
    storage: PostgresStorage,
    settings: dict[str, Any],
    objective: Objective,
    *,
    rehearse: Callable[[Objective, StudySpec], None],
) -> tuple[StoredStudy, bool]:
    """Create the study, or join it when its stored spec agrees with every one of `settings`.

    Settings that are not given are taken from the stored spec on joining, from the objective on creating.
    `rehearse` is called before a study is created, and raises when the objective cannot be searched.

    Returns:
        The study, and whether it was created now.

    Raises:
        SearchError: a setting is wrong, or the stored spec has it otherwise.
    """
    wanted = parse_spec(complete_settings(settings, objective))
    with name_lock(storage.engine, wanted.name):
        study_id = _study_id(storage, wanted.name)
        if study_id is None:
            if (searched := searched_by(wanted.name)) is not None:
                raise SearchError(
                    f"--name {wanted.name!r} is kept for the finalists of {searched!r}: train them with "
                    f"{command('finalists', searched)}, or choose another --name"
                )
            rehearse(objective, wanted)
            direction = optuna.study.StudyDirection[wanted.direction.upper()]
            study_id = storage.create_new_study([direction], wanted.name)
        stored = storage.get_study_user_attrs(study_id).get(SPEC)
        if stored is not None:
            if (of := parse_spec(stored).finalists_of) is not None:
                raise SearchError(
                    f"study {wanted.name!r} holds the finalists of {of.study!r}: run them with "
                    f"{command('finalists', of.study)}, or choose another --name"
                )
            spec = parse_spec(_merge(stored, {**settings, "name": wanted.name}))
            # Parsed first: a setting that a later version has, with its default, is no difference.
            if lines := differences(parse_spec(stored).model_dump(), spec.model_dump()):
                more = f"; its budget is changed by hpsearch extend {wanted.name} --trials {spec.n_trials}"
                raise SearchError(
                    f"study {wanted.name!r} exists with another spec ({'; '.join(lines)}): "
                    "leave these settings out to go on with it, or choose another --name"
                    + (more if spec.n_trials != stored["n_trials"] else "")
                )
            return StoredStudy(spec, storage, study_id), False
        # No spec: made by somebody else, or by a process that died between the two steps.
        if storage.get_n_trials(study_id):
            raise SearchError(f"study {wanted.name!r} exists and was not made by hpsearch: choose another --name")
        storage.set_study_user_attr(study_id, SOURCE, source_hash(objective))
        storage.set_study_user_attr(study_id, FOLDER, f"{wanted.name}-{study_id}-{secrets.token_hex(4)}")
        storage.set_study_user_attr(study_id, SPEC, wanted.model_dump())
        name_metric(storage, wanted)
        return StoredStudy(wanted, storage, study_id), True


def name_metric(storage: PostgresStorage, spec: StudySpec) -> None:
    """Tell the dashboard what the values of a study are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.load_study(study_name=spec.name, storage=storage).set_metric_names([spec.metric])


def load_study(storage: PostgresStorage, name: str) -> StoredStudy:
    """Return the study of that name.

    Raises:
        SearchError: there is none, or hpsearch did not make it.
    """
    study_id = _study_id(storage, name)
    if study_id is None:
        names = [s.study_name for s in storage.get_all_studies()]
        hint = nearest(name, names) if names else "; there are none yet"
        raise SearchError(f"no study {name!r}{hint}")
    stored = storage.get_study_user_attrs(study_id).get(SPEC)
    if stored is None:
        raise SearchError(f"study {name!r} has no spec: it was not made by hpsearch")
    return StoredStudy(parse_spec(stored), storage, study_id)


def _study_id(storage: PostgresStorage, name: str) -> int | None:
    try:
        return storage.get_study_id_from_name(name)
    except KeyError:
        return None


def _merge(stored: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Lay `settings` over a stored spec; options of the same sampler or pruner are laid over one by one."""
    merged = {**stored, **settings}
    for key in ("sampler", "pruner"):
        given = settings.get(key)
        if isinstance(given, dict) and given.get("name", stored[key]["name"]) == stored[key]["name"]:
            merged[key] = {**stored[key], **given}
    return merged


def parent_of(chosen: StoredStudy) -> StoredStudy:
    """Return the study whose finalists a study holds.

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
        raise SearchError(
            f"study {of.study!r}, whose finalists {chosen.spec.name!r} holds, was deleted: "
            f"delete them too: {command('delete', chosen.spec.name)}"
        )
    return parent
