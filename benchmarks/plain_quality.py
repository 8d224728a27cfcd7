"""Searches with Optuna and Ray Tune as their users write them, for bench_quality.py, with hpsearch's training loop.

They log nothing and have no checkpoints.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import torch

from benchmarks.search_quality.curves import Kept
from benchmarks.search_quality.peers import Flat, hyperopt, ray_domain
from benchmarks.search_quality.problems import Problem
from hpsearch import BaseObjective, EpochRecord, NonFiniteError, Verdict
from hpsearch.objectives.fit import fit
from hpsearch.objectives.loading import load_objective
from hpsearch.objectives.training.config import RunPlan
from hpsearch.search.samplers.suggest import derive_seed


class Reported(Kept):
    """A session that passes the metric of each epoch to a function."""

    def __init__(self, metric: str, report: Callable[[float, int], Verdict]) -> None:
        super().__init__(metric)
        self._report = report

    def report(self, record: EpochRecord) -> Verdict:
        super().report(record)
        return self._report(self.values[-1], record.epoch)


def train(
    objective: BaseObjective, trial: Any, number: int, epochs: int, report: Callable[[float, int], Verdict]
) -> Any:
    """Train one trial."""
    session = Reported(objective.metric, report)
    seeds = {"seed": derive_seed(0, "trial", number), "split_seed": 0}
    return fit(objective, objective.configure(trial), RunPlan(epochs, **seeds), session=session, device="cpu")


def measure_truth(reference: str, params: dict[str, Any], *, epochs: int, fresh: int) -> float:
    """Return the mean best value of a configuration over fresh seeds; infinitely bad if a training diverges."""
    torch.set_num_threads(1)
    objective = load_objective(reference)
    found = []
    for number in range(fresh):
        try:
            session = Kept(objective.metric)
            seeds = {"seed": derive_seed(0, "fresh", number), "split_seed": 0}
            config = objective.configure(optuna.trial.FixedTrial(params))
            found.append(
                float(fit(objective, config, RunPlan(epochs, **seeds), session=session, device="cpu").best_value)
            )
        except NonFiniteError:
            return math.inf if objective.direction == "minimize" else -math.inf
    return statistics.fmean(found)


def by_optuna(given: argparse.Namespace) -> None:
    """Run one of the processes that share a study, with sampler options for many workers."""
    objective = load_objective(given.objective)
    study = optuna.load_study(
        study_name=given.name,
        storage=os.environ["BENCH_STORAGE"],
        sampler=optuna.samplers.TPESampler(seed=given.seed, multivariate=True, group=True, constant_liar=True),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=2),
    )

    def one(trial: optuna.Trial) -> float:
        def report(value: float, epoch: int) -> Verdict:
            trial.report(value, epoch)
            late = time.time() > end
            return Verdict.PRUNE if late or trial.should_prune() else Verdict.CONTINUE

        result = train(objective, trial, trial.number, given.epochs, report)
        if result.status == "pruned":
            raise optuna.TrialPruned
        return float(result.best_value)

    end = time.time() + given.seconds
    study.optimize(one, timeout=given.seconds, catch=NonFiniteError)


def by_ray(given: argparse.Namespace) -> None:
    """Run Ray Tune's ASHA with random search or HyperOpt."""
    import ray
    from ray import tune
    from ray.tune.schedulers import AsyncHyperBandScheduler
    from ray.tune.search import ConcurrencyLimiter
    from ray.tune.search.hyperopt import HyperOptSearch  # noqa: F401 fails early if it is not installed

    objective = load_objective(given.objective)
    flat, mode = Flat(Problem(type(objective), "tuning")), objective.direction[:3]
    domains = flat.domains(ray_domain)

    def trainable(config: dict[str, Any]) -> None:
        torch.set_num_threads(1)

        def report(value: float, epoch: int) -> Verdict:
            tune.report({"value": value, "time": time.time(), "training_iteration": epoch + 1})
            return Verdict.CONTINUE

        number = derive_seed(*map(str, config.values()))
        train(
            load_objective(given.objective), optuna.trial.FixedTrial(flat.params(config)), number, given.epochs, report
        )

    class Times(tune.Callback):
        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **_: Any) -> None:
            with Path(given.results).open("a") as file:
                file.write(json.dumps([result["time"], result["value"], flat.params(result["config"])]) + "\n")

    search = None
    if given.searcher == "hyperopt":
        search = ConcurrencyLimiter(hyperopt(domains, "value", mode, given.seed), given.workers)
    Path(given.results).touch()
    ray.init(num_cpus=given.workers, include_dashboard=False, log_to_driver=False)
    tune.Tuner(
        trainable,
        param_space=None if search else domains,
        tune_config=tune.TuneConfig(
            metric="value",
            mode=mode,
            scheduler=AsyncHyperBandScheduler(max_t=given.epochs, grace_period=1, reduction_factor=3),
            search_alg=search,
            num_samples=-1,
            time_budget_s=given.seconds,
            max_concurrent_trials=None if search else given.workers,
        ),
        run_config=tune.RunConfig(callbacks=[Times()], verbose=0, name=given.name),
    ).fit()
    ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("kind", "objective", "name"):
        parser.add_argument(name)
    parser.add_argument("--seconds", type=float, required=True)
    for name in ("--epochs", "--seed"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--workers", type=int)
    for name in ("--searcher", "--results"):
        parser.add_argument(name)
    given = parser.parse_args()
    {"optuna": by_optuna, "ray": by_ray}[given.kind](given)


if __name__ == "__main__":
    main()
