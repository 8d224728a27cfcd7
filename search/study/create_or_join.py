"""A study is created with its spec, or joined by its name; refused where the spec differs."""

from __future__ import annotations

import functools
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
import sqlalchemy as sa
from optuna.trial import FrozenTrial

from hpsearch.objectives.base import BaseObjective
from hpsearch.objectives.loading import source_hash
from hpsearch.search.console import command
from hpsearch.search.errors import SearchError
from hpsearch.search.sampling.given import default_params, waiting_trial
from hpsearch.search.spec.differences import differences
from hpsearch.search.spec.several import USUAL, metrics_of
from hpsearch.search.spec.spec import (
    BUDGETS,
    MOST_TRIALS,
    StudySpec,
    parse_spec,
    searched_by,
    typed,
    usual_trials,
    with_room,
)
from hpsearch.search.study.enqueue import enqueue, require_room
from hpsearch.search.study.release import note_release
from hpsearch.search.study.study import StoredStudy, find_study
from hpsearch.search.study.warm_start import told_by_earlier
from hpsearch.storage.attributes import FOLDER, SOURCE, SPEC
from hpsearch.storage.database.locks import LockLostError, name_lock, still_held
from hpsearch.storage.database.retry import retrying
from hpsearch.storage.study_storage import PostgresStorage
from hpsearch.storage.study_storage.studies import set_attrs_by
from hpsearch.storage.trials.spending import open_spending


def complete_settings(settings: dict[str, Any], objective: BaseObjective) -> dict[str, Any]:
    """Return `settings` with the objective's own defaults where they say nothing."""
    from hpsearch.objectives.training.evaluation.metrics import DIRECTIONS

    settings = {**_several(settings, objective), **settings}
    metric = settings.get("metric", objective.metric)
    own_way = objective.direction if metric == objective.metric else DIRECTIONS.get(metric, objective.direction)
    metered = bool({"budget_epochs", "budget_seconds"} & settings.keys())
    defaults = {
        "name": objective.name,
        "metric": metric,
        "direction": own_way,
        "epochs": objective.epochs,
        "n_trials": usual_trials(settings, otherwise=MOST_TRIALS if metered else objective.n_trials),
    }
    return {**defaults, **settings}


def _several(settings: dict[str, Any], objective: BaseObjective) -> dict[str, Any]:
    """Return the objective's own directions and constraints, where the settings ask for no other metrics."""
    found: dict[str, Any] = {}
    ways = settings.get("directions")
    if ways is None and "metric" not in settings and objective.directions:
        ways = found["directions"] = dict(objective.directions)
    if "constraints" not in settings and objective.constraints:
        found["constraints"] = dict(objective.constraints)
    if ways is not None:
        found |= {
            key: value for key, value in metrics_of({"directions": ways}).items() if key in ("metric", "direction")
        }
    return found


def create_or_join(
    storage: PostgresStorage,
    settings: dict[str, Any],
    objective: BaseObjective,
    *,
    rehearse: Callable[[BaseObjective, StudySpec], None],
    enqueued: Sequence[FrozenTrial] = (),
) -> tuple[StoredStudy, bool]:
    """Create the study, or join it when its stored spec agrees with every one of `settings`.

    Settings that are not given are taken from the stored spec on joining, from the objective on creating.
    `rehearse` is called before a study is created, and raises when the objective cannot be searched. The `enqueued`
    trials are in a new study from its beginning; they are added to one that is joined, each once.

    Returns:
        The study, and whether it was created now.

    Raises:
        SearchError: a setting is wrong, or the stored spec has it otherwise.
    """
    settings = _named_as_stored(storage, settings, objective)
    wanted = parse_spec(complete_settings(with_room(settings), objective))
    made: list[int] = []

    @functools.cache  # once, however often a connection is cut
    def rehearsed() -> StudySpec:
        spec = _fitted(wanted, settings, objective)
        rehearse(objective, spec)
        return spec

    def once() -> tuple[StoredStudy, bool]:
        study, created = _create_or_join(storage, wanted, settings, objective, rehearsed, made, enqueued)
        if enqueued and not created:
            enqueue(study, enqueued)
        return study, created or bool(made)

    return retrying(also=LockLostError)(once)


def _named_as_stored(storage: PostgresStorage, settings: dict[str, Any], objective: BaseObjective) -> dict[str, Any]:
    """Return the settings; options of a sampler or pruner that has no name are those of the stored study's, if any."""
    tables = {key: settings[key] for key in USUAL if isinstance(settings.get(key), dict)}
    nameless = {key: table for key, table in tables.items() if "name" not in table}
    if not nameless or (study_id := find_study(storage, settings.get("name", objective.name))) is None:
        return settings
    stored = storage.get_study_user_attrs(study_id).get(SPEC)
    if stored is None:
        return settings
    return {**settings, **{key: {"name": stored[key]["name"], **options} for key, options in nameless.items()}}


def _fitted(spec: StudySpec, settings: dict[str, Any], objective: BaseObjective) -> StudySpec:
    """Return the spec of a new study, with what its sampler makes of the objective's search space."""
    try:
        sampler = spec.sampler.for_objective(objective)
    except ValueError as error:
        raise SearchError(str(error)) from None
    budget = {"n_trials": settings.get("n_trials", sampler.most() or spec.n_trials)}
    return parse_spec({**spec.model_dump(), "sampler": sampler.model_dump(), **budget})


def _create_or_join(
    storage: PostgresStorage,
    wanted: StudySpec,
    settings: dict[str, Any],
    objective: BaseObjective,
    rehearse: Callable[[], StudySpec],
    made: list[int],
    enqueued: Sequence[FrozenTrial],
) -> tuple[StoredStudy, bool]:
    """Do so once; `made` takes the number of a study that is created."""
    with name_lock(storage.engine, wanted.name) as lock:
        study_id = find_study(storage, wanted.name)
        if study_id is None:
            if (searched := searched_by(wanted.name)) is not None:
                raise SearchError(
                    f"--name {wanted.name!r} is kept for the finalists of {searched!r}: train them with "
                    f"{command('finalists', searched)}, or choose another --name"
                )
            _check_budget(wanted)
            earlier = told_by_earlier(storage, wanted, objective)
            spec = rehearse()
            first = _first_trials(spec, objective, enqueued)
            still_held(lock)
            study_id = storage.create_filled_study(
                study_directions(spec),
                spec.name,
                user_attrs=_first_attrs(spec, objective),
                trials=first,
                also=_filling(spec, earlier),
            )
            made.append(study_id)
            return _made(spec, storage, study_id), True
        stored = storage.get_study_user_attrs(study_id).get(SPEC)
        if stored is not None:
            if (of := parse_spec(stored).finalists_of) is not None:
                again = StoredStudy(parse_spec(stored), storage, study_id).go_on
                raise SearchError(
                    f"study {wanted.name!r} holds {of.what}: run them with {again}, or choose another --name"
                )
            if settings.get("directions") is not None:  # first: a stored pruner may know one metric alone
                ways = {"directions": wanted.directions}
                _require_same(wanted.name, differences({"directions": stored.get("directions")}, ways))
            spec = parse_spec(_merge(stored, {**settings, "name": wanted.name}))
            # Parsed first: a setting that a later version has, with its default, is no difference.
            lines = differences(parse_spec(stored).model_dump(), spec.model_dump())
            grown = [key for key in BUDGETS if getattr(spec, key) not in (stored.get(key), None)]
            option = [f"{word}" for key in grown[:1] for word in (typed(key), getattr(spec, key))]
            more = f"; its budget is changed by hpsearch extend {wanted.name} {' '.join(option)}" if grown else ""
            _require_same(wanted.name, lines, more)
            return StoredStudy(spec, storage, study_id), False
        if storage.get_n_trials(study_id):
            raise SearchError(f"study {wanted.name!r} exists and was not made by hpsearch: choose another --name")
        earlier = told_by_earlier(storage, wanted, objective)
        spec = rehearse()
        storage.import_trials(study_id, _first_trials(spec, objective, enqueued))
        with storage.engine.begin() as connection:
            _filling(spec, earlier)(connection, study_id)
        for key, value in _first_attrs(spec, objective).items():
            storage.set_study_user_attr(study_id, key, value)
        return _made(spec, storage, study_id), True


def _require_same(name: str, lines: Sequence[str], more: str = "") -> None:
    """Refuse to join a study whose spec differs."""
    if lines:
        raise SearchError(
            f"study {name!r} exists with another spec ({'; '.join(lines)}): leave these settings out to go on with it, "
            f"or choose another --name{more}"
        )


def _first_trials(spec: StudySpec, objective: BaseObjective, enqueued: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the trials that a new study is made with: the objective's default, then what somebody enqueued.

    A grid lists what is run, and has no default.
    """
    if enqueued:
        require_room(spec, len(enqueued))
    default = default_params(objective) if spec.default_first and not spec.sampler.by_number else None
    if default is None:
        return list(enqueued)
    others = [trial for trial in enqueued if trial.system_attrs["fixed_params"] != default]
    require_room(spec, 1 + len(others))
    return [waiting_trial(default, "default"), *others]


def _first_attrs(spec: StudySpec, objective: BaseObjective) -> dict[str, Any]:
    """Return what a new study has; the spec is last: one that has it is whole."""
    folder = f"{spec.name}-{secrets.token_hex(8)}"
    return {SOURCE: source_hash(objective), FOLDER: folder, SPEC: spec.model_dump()}


def _filling(spec: StudySpec, earlier: Mapping[str, Any]) -> Callable[[sa.Connection, int], None]:
    """Return what gives a new study its budgets in epochs and seconds, and what earlier studies tell it."""

    def fill(connection: sa.Connection, study_id: int) -> None:
        if spec.metered:
            open_spending(connection, study_id, epochs=spec.budget_epochs, seconds=spec.budget_seconds)
        set_attrs_by(connection, study_id, earlier, kind="system")

    return fill


def _made(spec: StudySpec, storage: PostgresStorage, study_id: int) -> StoredStudy:
    name_metric(storage, spec)
    note_release(made := StoredStudy(spec, storage, study_id))
    return made


def _check_budget(spec: StudySpec) -> None:
    if spec.budget_epochs is not None and spec.budget_epochs < spec.epochs:
        raise SearchError(
            f"--budget-epochs {spec.budget_epochs} is less than one full trial of {spec.epochs} epochs: none would run "
            "to its end; raise it, or lower --epochs"
        )


def name_metric(storage: PostgresStorage, spec: StudySpec) -> None:
    """Tell the dashboard what the values of a study are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.load_study(study_name=spec.name, storage=storage).set_metric_names(list(spec.ways))


def study_directions(spec: StudySpec) -> list[optuna.study.StudyDirection]:
    """Return Optuna's directions of the metrics that a study optimises."""
    return [optuna.study.StudyDirection[way.upper()] for way in spec.ways.values()]


def _merge(stored: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Lay `settings` over a stored spec; options of the same sampler or pruner are laid over one by one."""
    if settings.get("directions") is not None and "metric" not in settings:
        stored = {key: value for key, value in stored.items() if key not in ("metric", "direction")}
    merged = {**stored, **settings}
    for key in ("sampler", "pruner"):
        given = settings.get(key)
        if isinstance(given, dict) and given.get("name", stored[key]["name"]) == stored[key]["name"]:
            merged[key] = {**stored[key], **given}
    return merged
