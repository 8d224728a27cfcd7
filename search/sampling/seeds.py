"""The sampler of one trial, and the seeds of everything, derived from the study's: the same in every process."""

from __future__ import annotations

import hashlib
import warnings

import optuna

from hpsearch.search.samplers import SamplerSpec
from hpsearch.search.spec.spec import StudySpec


def derive_seed(*parts: int | str) -> int:
    """Return a seed below 2**31 from `parts` by SHA-256: the same everywhere, unrelated for related parts."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") >> 1


def training_seed(spec: StudySpec, number: int) -> int:
    """Return the seed of a trial's training: its own in a search, the common fresh one among finalists."""
    if spec.finalists_of is not None:
        return spec.finalists_of.assignment(number)[1]
    return derive_seed(spec.seed, "trial", number)


def division_seed(spec: StudySpec, number: int) -> int | None:
    """Return the seed of a trial's division of the data, common as that of its training; None for the study's own."""
    if spec.finalists_of is None or not spec.finalists_of.divisions:
        return None
    return derive_seed(spec.seed, "division", training_seed(spec, number))


def make_sampler(
    spec: SamplerSpec, *, study_seed: int, trial_number: int, epochs: int, again: int = 0
) -> optuna.samplers.BaseSampler:
    """Return the sampler for one trial.

    A sampler seeded alike in each worker suggests the same start-up points in each; one seeded by the trial's
    number does not, and makes these points a function of the study alone. A QMC sequence is one for the study.
    `again` counts the suggestions for this trial that were not taken.
    """
    seed = derive_seed(study_seed, "sampler", trial_number, *([again] if again else []))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return spec.build(seed=seed, common_seed=derive_seed(study_seed, "qmc"), epochs=epochs)
