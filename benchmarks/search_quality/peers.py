"""The samplers, schedulers and searchers of Optuna, Ray Tune, Syne Tune and NePS in the simulation.

They are called as by their own loops. The last three have no conditional parameters: they suggest a value for each
parameter of each branch, and the objective uses the active ones, as their users would write it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler

from benchmarks.search_quality.optuna_study import OptunaStudy
from benchmarks.search_quality.problems import Problem
from benchmarks.search_quality.simulation import Work
from benchmarks.search_quality.space import active, distributions


class Optuna:
    """A sampler and a pruner of Optuna, called by `ask`, `report`, `should_prune` and `tell`."""

    def __init__(self, problem: Problem, sampler: BaseSampler, pruner: BasePruner, *, seed: int) -> None:
        self._trials = OptunaStudy(problem, f"{problem.objective.name}-{seed}")
        self._trials.study.sampler, self._trials.study.pruner = sampler, pruner

    def next_work(self) -> Work:
        return self._trials.begin()

    def report(self, trial: int, epoch: int, value: float) -> bool:
        self._trials.note(trial, epoch, value)
        running = self._trials.running.get(trial)
        if running is None:
            return False
        if pruned := running.should_prune():
            self._trials.prune(trial)
        return not pruned


class Flat:
    """The search space without conditions, as domains of another tool; choices are given by their index."""

    def __init__(self, problem: Problem) -> None:
        self._objective = problem.objective
        self._distributions = distributions(problem.objective)

    def domains(self, of: Callable[[BaseDistribution], Any]) -> dict[str, Any]:
        return {name: of(distribution) for name, distribution in self._distributions.items()}

    def params(self, flat: dict[str, Any]) -> dict[str, Any]:
        """Return the active parameters with the values of the objective."""
        return active(self._objective, {name: self._value(name, value) for name, value in flat.items()})

    def _value(self, name: str, value: Any) -> Any:
        match self._distributions[name]:
            case CategoricalDistribution(choices=choices):
                return choices[int(value)]
            case IntDistribution():
                return int(value)
            case _:
                return float(value)


class RayTune:
    """Ray Tune's ASHA with HyperOpt or random search; the searcher uses the results of ended trials only."""

    def __init__(self, problem: Problem, searcher: str, *, seed: int) -> None:
        from ray.tune.schedulers import AsyncHyperBandScheduler

        mode = problem.objective.direction[:3]
        self._metric, self._epochs = problem.objective.metric, problem.epochs
        self._scheduler = AsyncHyperBandScheduler(
            metric=self._metric, mode=mode, max_t=problem.epochs, grace_period=1, reduction_factor=3
        )
        self._flat = Flat(problem)
        domains = self._flat.domains(ray_domain)
        random = searcher == "random"
        self._searcher = RayRandom(domains, seed) if random else hyperopt(domains, self._metric, mode, seed)
        self._trials: list[Any] = []

    def next_work(self) -> Work:
        number = len(self._trials)
        flat = self._searcher.suggest(str(number))
        trial = Named(str(number))
        self._scheduler.on_trial_add(None, trial)
        self._trials.append(trial)
        return Work(number, self._epochs, self._flat.params(flat))

    def report(self, trial: int, epoch: int, value: float) -> bool:
        result = {self._metric: value, "training_iteration": epoch + 1}
        if self._scheduler.on_trial_result(None, self._trials[trial], result) == "STOP":
            self._scheduler.on_trial_complete(None, self._trials[trial], result)
            self._searcher.on_trial_complete(str(trial), result)
            return False
        self._searcher.on_trial_result(str(trial), result)
        return True


class Named:
    """The attributes of a trial that Ray Tune's scheduler uses."""

    def __init__(self, trial_id: str) -> None:
        self.trial_id = trial_id


class RayRandom:
    """Random search over Ray Tune's domains, which draws like Ray Tune's variant generator."""

    def __init__(self, domains: dict[str, Any], seed: int) -> None:
        from numpy.random import RandomState

        self._domains, self._random = domains, RandomState(seed)

    def suggest(self, trial_id: str) -> dict[str, Any]:
        return {name: domain.sample(random_state=self._random) for name, domain in self._domains.items()}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        pass

    def on_trial_complete(self, trial_id: str, result: dict[str, Any]) -> None:
        pass


def hyperopt(domains: dict[str, Any], metric: str, mode: str, seed: int) -> Any:
    from ray.tune.search.hyperopt import HyperOptSearch

    return HyperOptSearch(domains, metric=metric, mode=mode, random_state_seed=seed)


def ray_domain(distribution: BaseDistribution) -> Any:
    from ray import tune

    match distribution:
        case CategoricalDistribution(choices=choices):
            return tune.choice([str(place) for place in range(len(choices))])
        case FloatDistribution(low=low, high=high, log=log, step=None):
            return tune.loguniform(low, high) if log else tune.uniform(low, high)
        case IntDistribution(low=low, high=high, log=True, step=1):
            return tune.lograndint(low, high + 1)
        case IntDistribution(low=low, high=high, step=1):
            return tune.randint(low, high + 1)
        case IntDistribution(low=low, high=high, log=False, step=step):
            return tune.qrandint(low, high, step)
    raise TypeError(str(distribution))


class SyneTune:
    """Syne Tune's ASHA, which has only the variant that stops trials."""

    def __init__(self, problem: Problem, *, seed: int) -> None:
        from syne_tune.optimizer.baselines import ASHA

        self._metric, self._epochs = problem.objective.metric, problem.epochs
        self._flat = Flat(problem)
        self._scheduler = ASHA(
            self._flat.domains(syne_tune_domain),
            metric=self._metric,
            time_attr="epoch",
            max_t=problem.epochs,
            do_minimize=not problem.maximize,
            random_seed=seed,
        )
        self._trials: list[Any] = []

    def next_work(self) -> Work:
        import datetime

        from syne_tune.backend.trial_status import Trial

        suggestion = self._scheduler.suggest()
        assert suggestion is not None
        number = len(self._trials)
        trial = Trial(number, suggestion.config, datetime.datetime.now(datetime.UTC))
        self._scheduler.on_trial_add(trial)
        self._trials.append(trial)
        return Work(number, self._epochs, self._flat.params(suggestion.config))

    def report(self, trial: int, epoch: int, value: float) -> bool:
        result = {self._metric: value, "epoch": epoch + 1}
        return bool(self._scheduler.on_trial_result(self._trials[trial], result) == "CONTINUE")


def syne_tune_domain(distribution: BaseDistribution) -> Any:
    from syne_tune import config_space

    match distribution:
        case CategoricalDistribution(choices=choices):
            return config_space.choice([str(place) for place in range(len(choices))])
        case FloatDistribution(low=low, high=high, log=log, step=None):
            return config_space.loguniform(low, high) if log else config_space.uniform(low, high)
        case IntDistribution(low=low, high=high, log=log, step=1):
            return config_space.lograndint(low, high) if log else config_space.randint(low, high)
        case IntDistribution(low=low, high=high, log=False, step=step):
            return config_space.finrange(low, high, (high - low) // step + 1, cast_int=True)
    raise TypeError(str(distribution))


class NePS:
    """NePS's Hyperband with random configurations, which NePS chooses if there is no prior knowledge."""

    def __init__(self, problem: Problem, *, seed: int) -> None:
        import neps
        import torch

        torch.manual_seed(seed)  # its source of random numbers
        self._sign = -1 if problem.maximize else 1
        self._flat = Flat(problem)
        epochs = neps.HPOInteger(1, problem.epochs, is_fidelity=True)
        space = neps.SearchSpace({**self._flat.domains(neps_domain), "epochs": epochs})
        self._neps = neps.AskAndTell(neps.algorithms.hyperband(space))
        self._numbers: dict[str, int] = {}  # by configuration
        self._asked: dict[int, Any] = {}  # NePS has a trial for each rung of a configuration

    def next_work(self) -> Work:
        asked = self._neps.ask()
        flat = dict(asked.config)
        until = int(flat.pop("epochs"))
        configuration = asked.id.partition("_")[0]
        is_new = configuration not in self._numbers
        trial = self._numbers.setdefault(configuration, len(self._numbers))
        self._asked[trial] = asked
        return Work(trial, until, self._flat.params(flat) if is_new else None)

    def report(self, trial: int, epoch: int, value: float) -> bool:
        asked = self._asked[trial]
        if epoch + 1 == asked.config["epochs"]:
            self._neps.tell(asked, self._sign * value)
        return True


def neps_domain(distribution: BaseDistribution) -> Any:
    import neps

    match distribution:
        case CategoricalDistribution(choices=choices):
            return neps.HPOCategorical([str(place) for place in range(len(choices))])
        case FloatDistribution(low=low, high=high, log=log, step=None):
            return neps.HPOFloat(low, high, log=log)
        case IntDistribution(low=low, high=high, log=log, step=1):
            return neps.HPOInteger(low, high, log=log)
    raise TypeError(str(distribution))
