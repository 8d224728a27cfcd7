"""Create a study or join an existing one with the same spec."""

from __future__ import annotations

import functools
import logging
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import optuna
import sqlalchemy as sa
import torch
from optuna.distributions import BaseDistribution
from optuna.samplers import RandomSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpsearch.objectives.errors import MetricError, users_code
from hpsearch.objectives.loading import load_objective, objective_reference, source_hash
from hpsearch.objectives.measured import MEASURED
from hpsearch.objectives.objective import BaseObjective, Objective
from hpsearch.search.console import command
from hpsearch.search.errors import SearchError
from hpsearch.search.samplers.suggest import derive_seed, make_sampler
from hpsearch.search.services import Services
from hpsearch.search.spec.multi_objective import USUAL, metrics_of
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
from hpsearch.search.study.enqueue import default_params, enqueue, require_room, waiting_trial
from hpsearch.search.study.study import StoredStudy, find_study, load_study, note_release
from hpsearch.storage.attributes import FOLDER, SOURCE, SPEC, STARTED_AT, TRACKING_URI
from hpsearch.storage.database.locks import LockLostError, name_lock, still_held
from hpsearch.storage.database.retry import retrying
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from hpsearch.storage.study_storage.studies import set_attrs_by
from hpsearch.storage.trials.budget import open_spending
from hpsearch.storage.trials.claims import running_now

DRAWS = 50  # configurations by which a search space is known before there are trials: enough to see its branches


def told_by_earlier(storage: PostgresStorage, spec: StudySpec, objective: BaseObjective) -> dict[str, Any]:
    """Return the system attributes of a new study by which its sampler knows what earlier studies tell.

    Their trials are taken as they are now, those that run or wait with what they have reported: nothing that becomes of
    these studies afterwards changes a suggestion of the new one.

    Raises:
        SearchError: an earlier study is none, goes another way, or has nothing to tell of the objective's space.
        ObjectiveError: `suggest` failed.
    """
    if spec.warm_start is None:
        return {}
    found = {name: _trials(_earlier(storage, spec, name)) for name in spec.warm_start}
    distributions, drawn = search_space(objective)
    for name, trials in found.items():
        if not {key for trial in trials for key in trial.params} & distributions.keys():
            has = ", ".join(sorted(distributions))
            raise SearchError(
                f"--warm-start {name}: its trials have none of the parameters of {objective.name} ({has}): "
                "name a study of the same parameters, or leave it out"
            )
    try:
        return spec.sampler.earlier(
            found,
            distributions=distributions,
            drawn=drawn,
            direction=StudyDirection[spec.direction.upper()],
            epochs=spec.epochs,
            seed=spec.seed,
        )
    except ValueError as error:
        raise SearchError(f"--warm-start {error}") from None


def search_space(objective: BaseObjective) -> tuple[dict[str, BaseDistribution], list[dict[str, Any]]]:
    """Return the distributions of an objective's parameters, and the configurations at random that showed them."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    scratch = optuna.create_study(sampler=RandomSampler(0))
    distributions: dict[str, BaseDistribution] = {}
    drawn = []
    for _ in range(DRAWS):
        trial = scratch.ask()
        with users_code(f"{type(objective).__name__}.suggest"):
            objective.configure(trial)
        distributions |= trial.distributions
        drawn.append(trial.params)
    return distributions, drawn


def _earlier(storage: PostgresStorage, spec: StudySpec, name: str) -> StoredStudy:
    try:
        study = load_study(storage, name)
    except SearchError as error:
        raise SearchError(f"--warm-start {name}: {error}") from None
    if (of := study.spec.finalists_of) is not None:
        raise SearchError(f"--warm-start {name}: it holds {of.what}: name {of.study} instead")
    if study.spec.direction != spec.direction:
        raise SearchError(
            f"--warm-start {name}: it is to {study.spec.direction} {study.spec.metric}, this study is to "
            f"{spec.direction} {spec.metric}: name a study of the same direction, or leave it out"
        )
    return study


def _trials(study: StoredStudy) -> list[FrozenTrial]:
    """Return those that have reported something, or ended before they could."""
    trials = study.trials(TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING, TrialState.WAITING)
    told = [t for t in trials if t.params and (t.intermediate_values or t.state.is_finished())]
    if not told:
        raise SearchError(
            f"--warm-start {study.spec.name}: no trial of it has reported anything yet: run it first, or leave it out"
        )
    return told


def differences(stored: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return a line for each setting of `wanted` that `stored` has otherwise: ``"n_trials: 24 -> 50"``."""
    lines = []
    for key in sorted(wanted):
        before, after = stored.get(key), wanted[key]
        # Options of the same sampler or pruner.
        if isinstance(before, dict) and isinstance(after, dict) and "name" in after and before["name"] == after["name"]:
            lines += [f"{key}.{line}" for line in differences(before, after)]
        elif before != after or (key == "directions" and before and list(before) != list(after)):  # the order matters
            lines.append(f"{key}: {_told(before)} -> {_told(after)}")
    return lines


def _told(value: Any) -> str:
    if isinstance(value, dict) and "name" not in value:
        return ", ".join(f"{metric} {said}" for metric, said in value.items())
    return repr(value)


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


def prepare_study(
    services: Services, settings: dict[str, Any], objective: BaseObjective, enqueued: Sequence[FrozenTrial] = ()
) -> tuple[StoredStudy, bool]:
    """Create or join the study and make it ready for workers; return it and whether it is new.

    Args:
        services: where it is kept.
        settings: of it.
        objective: that it searches.
        enqueued: trials that it is to run before others.

    Raises:
        SearchError: a setting is wrong or differs from the stored spec.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = open_storage(services.storage_url, application_name="hpsearch run")
    study, created = create_or_join(storage, settings, objective, rehearse=rehearse, enqueued=enqueued)
    tracking = services.open_tracking()
    study.set_attr(TRACKING_URI, tracking.uri)
    start_clock(study)
    return study, created


def start_clock(study: StoredStudy) -> None:
    """Let the study's timeout begin, unless it has and trials are running."""
    if STARTED_AT not in study.attrs or not running_now(study.engine, study.study_id):
        study.set_attr(STARTED_AT, time.time())


def load_for_search(settings: dict[str, Any]) -> tuple[dict[str, Any], BaseObjective]:
    """Load the objective that `settings` name; return the settings with its storable reference, and the objective.

    Raises:
        ObjectiveError: there is no such objective, or it cannot be imported.
    """
    reference = str(settings["objective"])
    objective = load_objective(reference)
    settings = {**settings, "objective": objective_reference(reference)}
    whole = complete_settings(settings, objective)
    spec = parse_spec(whole)
    with _metric_named(objective, spec):
        objective.judge_by(spec.metric, spec.direction)
        objective.also_report(spec.also_reported)
    _check_ways(objective, spec)
    return settings, objective


def _check_ways(objective: BaseObjective, spec: StudySpec) -> None:
    """Refuse to maximise what is better when it is lower, or the other way round, where that is known."""
    from hpsearch.objectives.training.evaluation.metrics import DIRECTIONS

    known: dict[str, str] = {name: measured.direction for name, measured in MEASURED.items()}
    if isinstance(objective, Objective) and objective.uses_builtin_metrics:
        known |= DIRECTIONS
    for name, way in spec.ways.items():
        if known.get(name, way) != way:
            raise SearchError(f"--directions {name}={way}: it is better the other way round: use {name}={known[name]}")


@contextmanager
def _metric_named(objective: BaseObjective, spec: StudySpec) -> Iterator[None]:
    """Name the setting that a wrong metric came from, unless it is the objective's own."""
    try:
        yield
    except MetricError as error:
        wrong = error.metric
        if wrong == spec.metric == type(objective).metric:
            raise
        own = "--directions" if spec.several else "--metric"
        setting = own if wrong in spec.ways else "--constraints"
        raise SearchError(f"{setting} {wrong!r} {error.why}") from None


def rehearse(objective: BaseObjective, spec: StudySpec) -> None:
    """Run every part of the objective's code once, on values that the sampler might suggest.

    A typo is found here, before there is a study, rather than by a night's trials.

    Raises:
        ObjectiveError: with the file and line of the mistake.
    """
    from hpsearch.objectives.training.loop.build import build

    config, seed = suggested(objective, spec), derive_seed(spec.seed, "trial", 0)
    if not isinstance(objective, Objective):
        return  # an own loop is not known before it runs
    with _metric_named(objective, spec):
        build(objective, config, epochs=spec.epochs, seed=seed, split_seed=spec.seed, device=torch.device("cpu"))


def suggested(objective: BaseObjective, spec: StudySpec) -> Any:
    """Return a configuration that the sampler might suggest.

    Raises:
        ObjectiveError: with the file and line of a mistake in the objective's `suggest`.
    """
    from hpsearch.objectives.errors import users_code

    logging.getLogger("optuna").setLevel(logging.WARNING)
    scratch = optuna.create_study(
        sampler=make_sampler(spec.sampler, study_seed=spec.seed, trial_number=0, epochs=spec.epochs)
    )
    with users_code(f"{type(objective).__name__}.suggest"):
        return objective.configure(scratch.ask())


def check_settings(settings: dict[str, Any]) -> None:
    """Refuse wrong settings before anything is loaded or started; what the objective fills in stands in here."""
    if "finalists_of" in settings:
        raise SearchError("finalists_of cannot be set: leave it out; hpsearch finalists STUDY, after a search, sets it")
    stand_in: dict[str, Any] = {"name": "x", "epochs": 1_000_000}
    if not settings.get("directions"):
        stand_in |= {"metric": settings.get("metric", "x"), "direction": "maximize"}
    known = {key: value for key, value in settings.items() if key not in USUAL}
    for key in USUAL.keys() & settings.keys():
        given = settings[key]
        if isinstance(given, dict) and "name" not in given:
            continue  # whose options they are is known with the objective, or the study that is joined
        # So is which metrics there are.
        known[key] = {name: given[name] for name in given if name != "metric"} if isinstance(given, dict) else given
    parse_spec({**stand_in, "n_trials": usual_trials(settings, 1_000_000), **with_room(known)})
