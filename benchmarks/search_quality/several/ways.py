"""The compared multi-objective search methods by their names in tables.

Kept searches are identified by these names: a method with other options needs another name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import optuna
from optuna.samplers import NSGAIISampler, RandomSampler, TPESampler

from benchmarks.search_quality.several.peers import Optuna, SyneTune, as_intended, as_shipped
from benchmarks.search_quality.several.problems import TwoMetrics
from benchmarks.search_quality.several.production import Production
from benchmarks.search_quality.ways import optuna_tpe

Make = Callable[[TwoMetrics, int], Any]

# Optuna has no pruning with several metrics.
PEERS: dict[str, Make] = {
    "Optuna random": lambda training, seed: Optuna(training, RandomSampler(seed)),
    "Optuna NSGA-II": lambda training, seed: Optuna(training, NSGAIISampler(seed=seed)),
    "Optuna TPE": lambda training, seed: Optuna(training, TPESampler(seed=seed)),
    "Optuna TPE, multivariate": lambda training, seed: Optuna(training, optuna_tpe(seed)),
    "Syne Tune MO-ASHA": lambda training, seed: SyneTune(training, seed=seed, priority=as_shipped),
    "Syne Tune MO-ASHA, ranks corrected": lambda t, seed: SyneTune(t, seed=seed, priority=as_intended),
}


def ours(sampler: object, pruner: object = "asha") -> Make:
    return lambda training, seed: Production(training, sampler, pruner, seed=seed)


OURS: dict[str, Make] = {
    "hpsearch random + asha": ours("random"),
    "hpsearch nsga2 + asha": ours("nsga2"),
    "hpsearch tpe + asha": ours("tpe"),
    "hpsearch freeze_thaw + asha": ours("freeze_thaw"),
    "hpsearch freeze_thaw + none": ours("freeze_thaw", "none"),
}

WAYS = PEERS | OURS


def make(name: str, training: TwoMetrics, seed: int) -> Any:
    """Return a search method for one search."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    return WAYS[name](training, seed)
