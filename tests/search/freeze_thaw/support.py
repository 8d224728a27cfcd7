"""Studies with synthetic learning curves."""

from __future__ import annotations

import optuna
from optuna.trial import TrialState, create_trial

from hpsearch.search.freeze_thaw.sampler import FreezeThawSampler
from tests.factories import X

EPOCHS = 9


def curve(x: float, epochs: int = EPOCHS) -> dict[int, float]:
    """Return decreasing losses; the final loss is best at x = 0.7."""
    return {epoch: (x - 0.7) ** 2 + 1 / (epoch + 1) for epoch in range(epochs)}


def study_of(xs: list[float], *, epochs: int = EPOCHS, sign: float = 1.0, **shape: object) -> optuna.Study:
    """Return a study whose trials reported `epochs` epochs and were pruned."""
    study = optuna.create_study(direction="minimize" if sign > 0 else "maximize")
    for x in xs:
        values = {step: sign * value for step, value in curve(x, epochs).items()}
        study.add_trial(pruned({"x": x}, {"x": X}, values, **shape))
    return study


def pruned(params: dict, distributions: dict, values: dict, **shape: object) -> optuna.trial.FrozenTrial:
    kind = {"state": TrialState.PRUNED, "params": params, "distributions": distributions}
    return create_trial(**{**kind, "intermediate_values": values, **shape})


def suggestion(study: optuna.Study, seed: int = 0, **options: object) -> float:
    study.sampler = FreezeThawSampler(seed=seed, epochs=EPOCHS, **{"random_fraction": 0.0, **options})
    trial = study.ask()
    return trial.suggest_float("x", 0.0, 1.0)
