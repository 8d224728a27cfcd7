"""The compared search methods by their names in tables.

Kept searches are identified by these names: a method with other options needs another name.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import optuna
from optuna.pruners import HyperbandPruner, MedianPruner, PercentilePruner, SuccessiveHalvingPruner
from optuna.samplers import GPSampler, RandomSampler, TPESampler

from benchmarks.search_quality.peers import NePS, Optuna, RayTune, SyneTune
from benchmarks.search_quality.problems import Problem
from benchmarks.search_quality.production import Production
from benchmarks.search_quality.simulation import Way

Make = Callable[[Problem, int], Way]

BASELINE = "Optuna TPE + median"


def optuna_tpe(seed: int) -> TPESampler:
    """Return TPE with options for many workers and conditional spaces, as hpsearch uses it."""
    return TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)


def median() -> MedianPruner:
    return MedianPruner(n_startup_trials=5, n_warmup_steps=2)


def halving() -> SuccessiveHalvingPruner:
    return SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)


def ours(sampler: object, pruner: object) -> Make:
    return lambda problem, seed: Production(problem, sampler, pruner, seed=seed)


def in_postgres(sampler: object, pruner: object) -> Make:
    def made(problem: Problem, seed: int) -> Way:
        from benchmarks.search_quality.stored import Stored  # starts a server on first use

        return Stored(problem, sampler, pruner, seed=seed)

    return made


WAYS: dict[str, Make] = {
    BASELINE: lambda problem, seed: Optuna(problem, optuna_tpe(seed), median(), seed=seed),
    "Optuna TPE + median, its defaults": lambda p, seed: Optuna(p, TPESampler(seed=seed), MedianPruner(), seed=seed),
    "Optuna TPE + SHA 3": lambda problem, seed: Optuna(problem, optuna_tpe(seed), halving(), seed=seed),
    "Optuna TPE + Hyperband": lambda p, seed: Optuna(p, optuna_tpe(seed), HyperbandPruner(1, p.epochs, 3), seed=seed),
    "Optuna TPE + percentile 25": lambda p, seed: Optuna(
        p, optuna_tpe(seed), PercentilePruner(25.0, n_startup_trials=5, n_warmup_steps=2), seed=seed
    ),
    "Optuna random + SHA 3": lambda problem, seed: Optuna(problem, RandomSampler(seed), halving(), seed=seed),
    "Optuna GP + median": lambda problem, seed: Optuna(
        problem, GPSampler(seed=seed, warn_independent_sampling=False), median(), seed=seed
    ),
    "Ray Tune ASHA, random": lambda problem, seed: RayTune(problem, "random", seed=seed),
    "Ray Tune ASHA, HyperOpt": lambda problem, seed: RayTune(problem, "hyperopt", seed=seed),
    "Syne Tune ASHA": lambda problem, seed: SyneTune(problem, seed=seed),
    "NePS Hyperband": lambda problem, seed: NePS(problem, seed=seed),
    "hpsearch tpe + median": ours("tpe", "median"),
    "hpsearch random + successive_halving": ours("random", {"name": "successive_halving", "reduction_factor": 3}),
    "hpsearch tpe + hyperband": ours("tpe", "hyperband"),
    "hpsearch gp + median": ours("gp", "median"),
    "hpsearch freeze_thaw + median": ours("freeze_thaw", "median"),
    "hpsearch random + asha": in_postgres("random", "asha"),
    "hpsearch tpe + asha": in_postgres("tpe", "asha"),
    "hpsearch freeze_thaw + asha": in_postgres("freeze_thaw", "asha"),
    "hpsearch freeze_thaw + asha, near_default_fraction = 0": in_postgres(
        {"name": "freeze_thaw", "near_default_fraction": 0}, "asha"
    ),
}

# Not run by default: their decisions take longest.
SLOW = ("Optuna GP + median", "hpsearch gp + median")


def make(name: str, problem: Problem, seed: int) -> Way:
    """Return a search method for one search."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("syne_tune").setLevel(logging.ERROR)  # its own classes cause warnings
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    return WAYS[name](problem, seed)
