"""Compare searches in which all folds of a trial train together with searches in which a trial begins with few folds:

    python -m benchmarks.fold_fidelity [--studies 20] [--workers 1] [--raw FILE] [--from FILE]

The data sets are those of `benchmarks.small_data`. Each search spends at most 800 epochs of single folds, as many as
eight trials of five folds and 20 epochs. All searches of a study draw the same random configurations in the same order,
and stages take the place of the rungs of `asha`: a third of the trials at a stage is promoted, and the last part of the
budget completes three trials. hpsearch offers the first two ways.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna

from benchmarks.overstatement import Small, evaluate_model
from benchmarks.small_data import DATA, EPOCHS, FOLDS, Scores, format_mean, prepare_study, run_studies
from hpsearch import TrainConfig, Trainer
from hpsearch.objectives.fit import fit
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.data.folds import Fold
from hpsearch.objectives.training.loop.guards import NonFiniteError
from hpsearch.objectives.training.loop.run import Run
from hpsearch.objectives.training.reproducibility.seeds import derive_seed, make_reproducible
from hpsearch.search.samplers.suggest import derive_seed as derive_study_seed
from hpsearch.search.study.ranking import sort_best_first

BUDGET, FACTOR, MIN_COMPLETE = 800, 3, 3
# The stages of a trial: number of folds, and of epochs of each.
WAYS: dict[str, list[tuple[int, int]]] = {
    "five folds": [(5, 20)],
    "five folds, asha": [(5, 2), (5, 6), (5, 18), (5, 20)],
    "first fold, then five": [(1, 20), (5, 20)],
    "first fold with asha, then five": [(1, 2), (1, 6), (1, 20), (5, 20)],
    "more folds at each rung": [(1, 2), (3, 6), (5, 18), (5, 20)],
}
BASE = "five folds, asha"


class Trials:
    """The configurations of a study, whose folds train as far as a search needs them."""

    def __init__(self, objective: Small, number: int) -> None:
        self._objective, self._number = objective, number
        self._configs: list[TrainConfig] = []
        self._runs: dict[tuple[int, int], tuple[Trainer, Run]] = {}  # by trial and fold
        self._curves: dict[tuple[int, int], list[float]] = {}
        self._study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=number))

    def get_config(self, trial: int) -> TrainConfig:
        while len(self._configs) <= trial:
            self._configs.append(replace(self._objective.suggest(self._study.ask()), vectorize_folds=False))
        return self._configs[trial]

    def get_seed(self, trial: int) -> int:
        return derive_study_seed(self._number, "trial", trial)

    def get_value(self, trial: int, folds: int, epochs: int) -> float:
        """Return the best mean of the metric over the first `folds` folds, up to a number of epochs."""
        curves = [self._train(trial, fold, epochs) for fold in range(folds)]
        return max(statistics.fmean(values) for values in zip(*curves, strict=True))

    def _train(self, trial: int, fold: int, epochs: int) -> list[float]:
        place = trial, fold
        if place not in self._runs:
            seed, one = derive_seed(self.get_seed(trial), "fold", fold), Fold(fold, FOLDS)
            options: dict[str, Any] = {"epochs": EPOCHS, "seed": seed, "split_seed": self._number, "fold": one}
            trainer = Trainer(self._objective, self.get_config(trial), device="cpu", **options)
            self._runs[place] = trainer, trainer.build()
            self._curves[place] = []
        (trainer, run), curve = self._runs[place], self._curves[place]
        while len(curve) < epochs:
            try:
                trainer.run_epoch(run)
            except NonFiniteError:
                curve += [-math.inf] * (EPOCHS - len(curve))
            else:
                curve.append(run.curve.history[-1].metrics[f"val_{self._objective.metric}"])
        return curve[:epochs]


def search(trials: Trials, stages: list[tuple[int, int]]) -> tuple[int, float]:
    """Return the best complete trial and its value."""
    costs, last = [folds * epochs for folds, epochs in stages], len(stages) - 1
    values: list[dict[int, float]] = [{} for _ in stages]  # of the trials that have reached a stage
    promoted: list[set[int]] = [set() for _ in stages]
    spent = 0

    def find_paused(quota: int | None) -> tuple[int, int] | None:
        """Return (trial, stage) of the best paused trial at the highest stage, among the best 1 / `quota`."""
        for stage in range(last - 1, -1, -1):
            best = sort_best_first(values[stage], maximize=True)
            paused = [trial for trial in best[: len(best) // (quota or 1)] if trial not in promoted[stage]]
            if paused:
                return paused[0], stage
        return None

    def get_cost(paused: tuple[int, int] | None) -> int:
        return costs[0] if paused is None else costs[paused[1] + 1] - costs[paused[1]]

    while True:
        paused = find_paused(FACTOR)
        missing = MIN_COMPLETE - len(values[last])
        if last and missing > 0 and BUDGET - spent - get_cost(paused) < missing * (costs[last] - costs[0]):
            paused = find_paused(None)
        if spent + get_cost(paused) > BUDGET:
            break
        if paused is None:
            trial, stage = len(values[0]), 0
        else:
            promoted[paused[1]].add(paused[0])
            trial, stage = paused[0], paused[1] + 1
        spent += get_cost(paused)
        values[stage][trial] = trials.get_value(trial, *stages[stage])
    best = sort_best_first(values[last], maximize=True)[0]
    return best, values[last][best]


def run_study(given: tuple[str, int]) -> Scores:
    """Run a study in all ways; return the best value of the search and the test score of its ensemble by way."""
    number = given[1]
    objective, splits, unseen = prepare_study(*given)
    trials, scores = Trials(objective, number), dict[int, float]()
    found = {}
    with make_reproducible(deterministic=True):
        for way, stages in WAYS.items():
            best, value = search(trials, stages)
            if best not in scores:
                config, plan = trials.get_config(best), RunPlan(EPOCHS, trials.get_seed(best), number, folds=FOLDS)
                result: Any = fit(objective, config, plan, device="cpu")
                scores[best] = evaluate_model(objective, config, result, splits, unseen)
            found[way] = {"search": value, "test": scores[best]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=20)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--raw", type=Path, help="file to write the scores to")
    parser.add_argument("--from", dest="read", type=Path, help="file of --raw to read instead of running studies")
    given = parser.parse_args()
    if given.studies < 2:
        parser.error(f"--studies must be at least 2 for standard errors, not {given.studies}")
    raw: dict[str, list[Scores]] = json.loads(given.read.read_text()) if given.read else {}
    if not given.read:
        jobs = [(name, number) for number in range(given.studies) for name in DATA]
        raw = run_studies(run_study, jobs, n_processes=given.workers, file=given.raw)
    for name, studies in raw.items():
        print(f"{name} ({DATA[name].metric}), {len(studies)} studies")
        for way in WAYS:
            tests = [each[way]["test"] for each in studies]
            gain = [test - each[BASE]["test"] for test, each in zip(tests, studies, strict=True)]
            print(f"  {way:32} test score {statistics.fmean(tests):.4f}, {format_mean(gain)} points above {BASE}")


if __name__ == "__main__":
    main()
