"""From a request to a study that workers can join: created or joined, its parent run made."""

from __future__ import annotations

import logging
import time
from typing import Any

import optuna
import torch

from objectives import Objective, load_objective
from objectives.loading import objective_reference
from objectives.training import TrainConfig
from search.finalists.companion import parent_of
from search.samplers import derive_seed, make_sampler
from search.services import Services
from search.spec import StudySpec
from search.study import RUN_ID, RUN_URL, STARTED_AT, TRACKING_URI, StudyHandle, complete_settings, create_or_join
from storage.claims import running_now
from storage.locks import study_lock
from storage.studies import engine_of, open_storage
from storage.tracking import Tracking


def prepare_study(services: Services, settings: dict[str, Any], objective: Objective) -> tuple[StudyHandle, bool]:
    """Create or join the study and make it ready for workers; return it and whether it is new.

    Raises:
        SearchError: a setting is wrong or differs from the stored spec.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = open_storage(services.storage_url, application_name="hpsearch run")
    handle, created = create_or_join(storage, settings, objective, rehearse=rehearse)
    tracking = services.open_tracking()
    handle.set_attr(TRACKING_URI, tracking.uri)
    if STARTED_AT not in handle.attrs or not running_now(engine_of(storage), handle.study_id):
        handle.set_attr(STARTED_AT, time.time())
    return handle, created


def open_parent_run(handle: StudyHandle, tracking: Tracking) -> str:
    """Return the study's parent run, made if it is missing; all who ask at once get the same one.

    One that is there is found without the study's lock, which a frozen process may hold.

    Raises:
        StorageError: its run, or the experiment, was deleted.
        MlflowException: the server does not answer, or refuses.
    """
    attrs = handle.attrs
    known = attrs.get(RUN_ID)
    if known is not None and attrs.get(TRACKING_URI) == tracking.uri and tracking.has_run(known):
        return str(known)
    with study_lock(engine_of(handle.storage), handle.study_id):
        return ensure_parent_run(handle, tracking)


def ensure_parent_run(handle: StudyHandle, tracking: Tracking) -> str:
    """Return the study's parent run, made if it is missing; call it under the study's lock.

    The runs of finalists are children of the run of the search that they are of.
    """
    spec = handle.spec
    if spec.finalists_of is not None:
        parent = parent_of(handle)
        with study_lock(engine_of(parent.storage), parent.study_id):
            run_id = ensure_parent_run(parent, tracking)
        for key in (RUN_ID, RUN_URL, TRACKING_URI):
            handle.set_attr(key, parent.attrs[key])
        return run_id
    known = handle.attrs.get(RUN_ID)
    run_id = tracking.study_run(
        spec.name, handle.study_id, params=_parameters(spec.model_dump(exclude={"finalists_of"})), known=known
    )
    handle.set_attr(RUN_ID, run_id)
    handle.set_attr(RUN_URL, tracking.run_url(run_id))
    handle.set_attr(TRACKING_URI, tracking.uri)
    return run_id


def _parameters(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec flat: ``sampler.n_startup_trials`` and so on."""
    flat: dict[str, Any] = {}
    for key, value in spec.items():
        if isinstance(value, dict):
            flat[key] = value["name"]
            flat |= {f"{key}.{k}": v for k, v in value.items() if k != "name"}
        else:
            flat[key] = value
    return flat


def load_for_search(settings: dict[str, Any]) -> tuple[dict[str, Any], Objective]:
    """Load the objective that `settings` name; return the settings with its storable reference, and the objective.

    Raises:
        ObjectiveError: there is no such objective, or it cannot be imported.
    """
    reference = str(settings["objective"])
    objective = load_objective(reference)
    settings = {**settings, "objective": objective_reference(reference)}
    whole = complete_settings(settings, objective)
    objective.judge_by(whole["metric"], whole["direction"])
    return settings, objective


def rehearse(objective: Objective, spec: StudySpec) -> None:
    """Run every part of the objective's code once, on values that the sampler might suggest.

    A typo is found here, before there is a study, rather than by a night's trials.

    Raises:
        ObjectiveError: with the file and line of the mistake.
    """
    from objectives.training.build import build

    config, seed = suggested(objective, spec), derive_seed(spec.seed, "trial", 0)
    build(objective, config, epochs=spec.epochs, seed=seed, split_seed=spec.seed, device=torch.device("cpu"))


def suggested(objective: Objective, spec: StudySpec) -> TrainConfig:
    """Return a configuration that the sampler might suggest.

    Raises:
        ObjectiveError: with the file and line of a mistake in the objective's `suggest`.
    """
    from objectives.errors import users_code

    logging.getLogger("optuna").setLevel(logging.WARNING)
    scratch = optuna.create_study(sampler=make_sampler(spec.sampler, study_seed=spec.seed, trial_number=0))
    with users_code(f"{type(objective).__name__}.suggest"):
        return objective.configure(scratch.ask())
