"""Metrics of a cross-validation from those of its folds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev

from hpsearch.objectives.training.result import ResplitScore

# How metrics of the folds are merged; the others are averaged.
_MERGES: dict[str, Callable[[list[float]], float]] = {"epoch_seconds": math.fsum, "peak_memory_bytes": max}


def merge_metrics(folds: Sequence[Mapping[str, float]], key: str) -> dict[str, float]:
    """Return the metrics of a run from those of its folds: means, and for the metric `key` also each fold's value.

    The result also contains the standard error of the mean of `key`, as ``{key}_se``. Folds share training samples, so
    it is too small by an unknown factor (Bengio and Grandvalet 2004, *Journal of Machine Learning Research* 5).
    """
    merged = {name: _MERGES.get(name, fmean)([fold[name] for fold in folds if name in fold]) for name in folds[0]}
    values = [fold[key] for fold in folds]
    merged[f"{key}_se"] = _compute_standard_error(values)
    return merged | {_get_fold_key(key, number): value for number, value in enumerate(values, start=1)}


def select_fold_metrics(metrics: Mapping[str, float], key: str, folds: int) -> list[float]:
    """Return the values of the metric `key` in each fold, from the metrics of a run with folds."""
    return [metrics[_get_fold_key(key, number)] for number in range(1, folds + 1)]


def _get_fold_key(key: str, number: int) -> str:
    return f"{key}_fold_{number}"


def _compute_standard_error(values: list[float]) -> float:
    """Return the standard error of the mean; NaN if a value is not finite, which `stdev` rejects."""
    return stdev(values) / math.sqrt(len(values)) if all(map(math.isfinite, values)) else math.nan


def score_folds(
    curves: list[list[float]], *, maximize: bool, sizes: tuple[int, int, int], has_new_split: bool = True
) -> ResplitScore:
    """Return the score of a cross-validation: each fold is scored at the epoch that the other folds select.

    Args:
        curves: metric by fold and epoch [folds, epochs].
        maximize: whether higher values are better.
        sizes: numbers of training samples of a fold, of validation samples of all folds, and of test samples.
        has_new_split: whether the division into folds differs from that of the study.
    """
    sign = 1.0 if maximize else -1.0
    epochs = range(len(curves[0]))

    def find_best(chosen: list[list[float]]) -> int:
        return max(epochs, key=lambda epoch: (sign * math.fsum(curve[epoch] for curve in chosen), -epoch))

    selected = [find_best(curves[:index] + curves[index + 1 :]) for index in range(len(curves))]
    values = [curve[epoch] for curve, epoch in zip(curves, selected, strict=True)]
    best = find_best(curves)
    return ResplitScore(
        value=fmean(values),
        optimism=fmean(curve[best] for curve in curves) - fmean(values),
        error=_compute_standard_error(values),
        epochs=tuple(selected),
        has_new_split=has_new_split,
        sizes=sizes,
    )
