"""From the spec's sampler and pruner to Optuna's, the same in every process."""

from __future__ import annotations

import hashlib
import warnings

import optuna

from search.spec.spec import PrunerSpec, SamplerSpec, StudySpec


def derive_seed(*parts: int | str) -> int:
    """Return a seed below 2**31 from `parts` by SHA-256: the same everywhere, unrelated for related parts."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") >> 1


def training_seed(spec: StudySpec, number: int) -> int:
    """Return the seed of a trial's training: its own in a search, the common fresh one among finalists."""
    if spec.finalists_of is not None:
        return spec.finalists_of.assignment(number)[1]
    return derive_seed(spec.seed, "trial", number)


def make_sampler(
    spec: SamplerSpec, *, study_seed: int, trial_number: int, again: int = 0
) -> optuna.samplers.BaseSampler:
    """Return the sampler for one trial.

    A sampler seeded alike in each worker suggests the same start-up points in each; one seeded by the trial's
    number does not, and makes these points a function of the study alone. A QMC sequence is one for the study.
    `again` counts the suggestions for this trial that were not taken.
    """
    options = spec.model_dump(exclude={"name"})
    seed = derive_seed(study_seed, "sampler", trial_number, *([again] if again else []))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        match spec.name:
            case "tpe":
                return optuna.samplers.TPESampler(seed=seed, **options)
            case "random":
                return optuna.samplers.RandomSampler(seed=seed)
            case "gp":
                return optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False, **options)
            case "qmc":
                return optuna.samplers.QMCSampler(
                    seed=derive_seed(study_seed, "qmc"),
                    independent_sampler=optuna.samplers.RandomSampler(seed=seed),
                    warn_independent_sampling=False,
                    **options,
                )


def make_pruner(spec: PrunerSpec) -> optuna.pruners.BasePruner:
    """Return Optuna's pruner with every resource an integer from the spec.

    A sampler asks it for a trial's bracket; the verdicts are :class:`search.pruning.Judge`'s.
    """
    options = spec.model_dump(exclude={"name"})
    match spec.name:
        case "median":
            return optuna.pruners.MedianPruner(**options)
        case "percentile":
            return optuna.pruners.PercentilePruner(**options)
        case "successive_halving":
            return optuna.pruners.SuccessiveHalvingPruner(**options)
        case "hyperband":
            pruner = optuna.pruners.HyperbandPruner(**options)
            # It makes its brackets at its first verdict, which is ours to give: without them the sampler would not
            # tell one bracket's trials from another's.
            pruner._try_initialization(study=None)  # type: ignore[arg-type]
            return pruner
        case "threshold":
            return optuna.pruners.ThresholdPruner(**options)
        case "none":
            return optuna.pruners.NopPruner()
