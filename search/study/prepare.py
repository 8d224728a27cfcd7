"""From a request to a study that workers can join: created or joined, after the objective's code was tried."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import optuna
import torch
from optuna.trial import FrozenTrial

from hpsearch.objectives.base import BaseObjective
from hpsearch.objectives.errors import MetricError
from hpsearch.objectives.loading import load_objective, objective_reference
from hpsearch.objectives.measured import MEASURED
from hpsearch.objectives.objective import Objective
from hpsearch.search.errors import SearchError
from hpsearch.search.sampling.seeds import derive_seed, make_sampler
from hpsearch.search.services import Services
from hpsearch.search.spec.spec import StudySpec, parse_spec
from hpsearch.search.study.create_or_join import complete_settings, create_or_join
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import STARTED_AT, TRACKING_URI
from hpsearch.storage.study_storage.opening import open_storage
from hpsearch.storage.trials.claims import running_now


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
