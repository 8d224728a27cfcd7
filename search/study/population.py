"""The population of a new study with the pruner `pbt`: the parameters that can change during the training."""

from __future__ import annotations

import optuna
from optuna.samplers import RandomSampler

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.errors import wrap_user_errors
from hpsearch.objectives.objective import Objective
from hpsearch.objectives.search_space import FixedTrial
from hpsearch.objectives.training.checks.in_flight import InFlightCheck
from hpsearch.objectives.training.config import RunPlan
from hpsearch.search.errors import SearchError, suggest_names
from hpsearch.search.pruners.pbt import PBT, is_numerical
from hpsearch.search.samplers.suggest import derive_seed
from hpsearch.search.spec.spec import StudySpec

_SAMPLE_SIZE = 50  # random configurations that show a search space with its branches


def fit_population(spec: StudySpec, objective: BaseObjective) -> StudySpec:
    """Return the spec of a new study in which the pruner `pbt` has the parameters that it may change.

    Raises:
        SearchError: the objective has a custom loop, a given parameter cannot change, or no parameter can.
        ObjectiveError: the objective's code raised an error.
    """
    pruner = spec.pruner
    if not isinstance(pruner, PBT):
        return spec
    if not isinstance(objective, Objective):
        raise SearchError(
            f"--pruner pbt is not available for {objective.name}, which has a custom loop; use --pruner asha"
        )
    obstacles = find_obstacles(objective, spec)
    for name in pruner.parameters or ():
        if name not in obstacles:
            hint = suggest_names(name, list(obstacles))
            raise SearchError(f"pruner.parameters: {objective.name} has no parameter {name!r}{hint}")
        if (reason := obstacles[name]) is not None:
            raise SearchError(f"pruner.parameters: {name} cannot change during the training: {reason}; remove {name}")
    found = pruner.parameters or [name for name, reason in obstacles.items() if reason is None]
    if not found:
        reasons = ", ".join(f"{name}: {reason}" for name, reason in obstacles.items())
        fault = f"no parameter of {objective.name} can change during the training ({reasons})"
        raise SearchError(f"--pruner pbt: {fault}; use --pruner asha")
    return spec.model_copy(update={"pruner": pruner.model_copy(update={"parameters": sorted(set(found))})})


def find_obstacles(objective: Objective, spec: StudySpec) -> dict[str, str | None]:
    """Return, for each parameter of the search space, why it cannot change during the training; None if it can.

    A conditional parameter is checked in one of the configurations that have it.
    """
    plan = RunPlan(spec.epochs, derive_seed(spec.seed, "trial", 0), spec.seed)
    trials, obstacles = _sample(objective, spec.seed), dict[str, str | None]()
    checks: dict[int, InFlightCheck] = {}
    for name in {name: None for trial in trials for name in trial.params}:
        number = next(n for n, trial in enumerate(trials) if name in trial.params)
        trial, distribution = trials[number], trials[number].distributions[name]
        if not is_numerical(distribution):
            obstacles[name] = "it is not a number with several values"
        elif any(other.distributions.get(name, distribution) != distribution for other in trials):
            obstacles[name] = "its range depends on other parameters"
        else:
            if number not in checks:
                checks[number] = InFlightCheck(objective, objective.configure(FixedTrial(trial.params)), plan)
            obstacles[name] = _find_obstacle(objective, checks[number], trial, name)
    return obstacles


def _sample(objective: Objective, seed: int) -> list[optuna.Trial]:
    study = optuna.create_study(sampler=RandomSampler(derive_seed(seed, "in flight")))
    trials = [study.ask() for _ in range(_SAMPLE_SIZE)]
    for trial in trials:
        with wrap_user_errors(f"{type(objective).__name__}.suggest"):
            objective.configure(trial)
    return trials


def _find_obstacle(objective: Objective, check: InFlightCheck, trial: optuna.Trial, name: str) -> str | None:
    distribution = trial.distributions[name]
    for value in (distribution.low, distribution.high):  # type: ignore[attr-defined]  # numerical
        fixed = optuna.trial.FixedTrial({**trial.params, name: value})
        try:
            config = objective.configure(fixed)
        except ValueError:  # another branch, with other parameters
            return "other parameters depend on it"
        if fixed.distributions != trial.distributions:
            return "other parameters depend on it"
        if (reason := check.find_obstacle(config)) is not None:
            return reason
    return None
