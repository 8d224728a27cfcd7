"""A new study uses earlier ones as far as they are similar, for parameters in its space."""

from __future__ import annotations

import json

import numpy as np
import optuna
import pytest
import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.study import StudyDirection

from hpsearch.search.freeze_thaw.forecast_text import SUGGESTION_REASON_KEY, format_suggestion_reason
from hpsearch.search.freeze_thaw.gaussian_process import GaussianProcess, Points
from hpsearch.search.freeze_thaw.gp_dataset import HYPERPARAMETERS_KEY, GPDataset
from hpsearch.search.freeze_thaw.observations import MAX_POINTS
from hpsearch.search.freeze_thaw.warm_start import MAX_SOURCE_TRIALS, WARM_START_KEY, WarmStartData
from tests.factories import X
from tests.search.freeze_thaw.support import EPOCHS, curve, pruned, study_of, suggestion

SPACE = {"x": X}


def make_data(*studies: list, space: dict = SPACE, epochs: int = EPOCHS) -> WarmStartData:
    """Return the warm-start data of studies of such trials, after a round trip through JSON."""
    named = {f"s{place}": trials for place, trials in enumerate(studies, 1)}
    drawn = [{"x": x} for x in np.linspace(0, 1, 5)]
    kind = {"distributions": space, "sampled": drawn, "direction": StudyDirection.MINIMIZE, "epochs": epochs}
    found = WarmStartData.from_studies(named, **kind, random=np.random.default_rng(0))
    return WarmStartData.from_json(json.loads(json.dumps(found.to_json())))


def warm(xs: list[float], *, flipped: bool = False) -> optuna.Study:
    """Return a study without trials that has warm-start data; a flipped earlier study was best where this is worst."""
    study = study_of([])
    trials = study_of([1.4 - x if flipped else x for x in xs]).trials if not flipped else []
    if flipped:
        trials = [
            pruned({"x": x}, {"x": X}, {e: -loss for e, loss in curve(x).items() if e in {0, EPOCHS - 1}}) for x in xs
        ]
    study._storage.set_study_system_attr(study._study_id, WARM_START_KEY, make_data(trials).to_json())
    return study


def test_the_first_suggestion_uses_an_earlier_study():
    study = warm(list(np.linspace(0, 1, 12)))
    assert suggestion(study) == pytest.approx(0.7, abs=0.1)
    assert study._storage.get_study_system_attrs(study._study_id)[HYPERPARAMETERS_KEY]["trials"] == 10
    assert SUGGESTION_REASON_KEY not in study.trials[0].system_attrs, (
        "a study without values of its own has no forecast in its unit"
    )


def test_an_earlier_study_with_few_trials_counts_at_the_start():
    drawn = suggestion(study_of([]), 3)
    assert suggestion(warm([0.1, 0.5]), 3) == drawn
    assert suggestion(warm(list(np.linspace(0, 1, 10))), 3) != drawn


def test_own_trials_override_a_misleading_earlier_study():
    study = warm(list(np.linspace(0, 1, 16)), flipped=True)
    for x in np.linspace(0, 1, 14):
        study.add_trial(pruned({"x": x}, {"x": X}, curve(x)))
    assert suggestion(study) == pytest.approx(0.7, abs=0.1)
    note = study.trials[-1].system_attrs[SUGGESTION_REASON_KEY]
    assert format_suggestion_reason(note).endswith((f"near trial {note['near']}", "of s1", "of many random candidates"))


def test_an_earlier_trial_counts_for_parameters_in_the_new_space():
    narrow = {"x": FloatDistribution(0.4, 0.8), "kind": CategoricalDistribution([1, True])}
    trials = [
        pruned({"x": 0.3}, {"x": X}, {0: 1.0}),  # out of the range
        pruned({"x": 0.5, "more": 2.0}, {"x": X, "more": FloatDistribution(0, 9)}, {0: 1.0, 2: 0.5, 8: 0.1}),
        pruned({"kind": True}, {"kind": CategoricalDistribution([True, False])}, {0: 2.0}),
        pruned({"kind": False}, {"kind": CategoricalDistribution([True, False])}, {0: 2.0}),
        pruned({"more": 2.0}, {"more": FloatDistribution(0, 9)}, {0: 2.0}),
    ]
    found = make_data(trials, space=narrow, epochs=3)
    assert [t.params for t in found.trials] == [{"x": 0.5}, {"kind": True}]
    assert [s for s, _ in found.trials[0].points] == [0.0, 1.0], "epochs beyond the new study's length are left out"
    with pytest.raises(ValueError, match="s1: no trial is in the new search space"):
        make_data(trials[:1], space=narrow)


def test_too_many_points_are_reduced_to_the_best_and_own_ones_come_first():
    trials = [pruned({"x": i / 500}, {"x": X}, curve(i / 500, 2 if i % 5 else EPOCHS)) for i in range(500)]
    found = make_data(trials, trials)
    assert len(found.trials) == MAX_SOURCE_TRIALS
    assert {t.study for t in found.trials} == {1, 2}
    long = [t for t in found.trials[: MAX_SOURCE_TRIALS // 4] if len(t.points) == 2 and t.points[-1][0] == 1.0]
    assert len(long) == MAX_SOURCE_TRIALS // 4
    points = sum(len(t.points) for t in found.trials)
    assert points <= MAX_POINTS // 2
    for own, others in ((0, points), (MAX_POINTS - 7, 7), (MAX_POINTS, 0)):
        began = [pruned({"x": i / 700}, {"x": X}, curve(i / 700, 1)) for i in range(own)]
        random = np.random.default_rng(0)
        dataset = GPDataset.from_trials(began, SPACE, maximize=True, epochs=EPOCHS, random=random, warm_start=found)
        assert (len(dataset.observations.log_epoch), int((dataset.points.study > 0).sum())) == (own, others)


def alike(process: GaussianProcess) -> float:
    return float(process.theta[-1].sigmoid())


def test_the_correlation_of_studies_follows_from_their_similarity():
    x = torch.full((3, 1), 0.5, dtype=torch.float64)
    points = Points(x, torch.ones(3).double(), torch.arange(3), torch.tensor([0, 0, 1]))
    process = GaussianProcess.from_prior(np.array([0]), multi_study=True)
    level, slope, config = process.theta[:3].exp().tolist()
    covariance = process.covariance(points, points)
    assert float(covariance[0, 1]) == pytest.approx(level + slope + config, rel=1e-6)
    assert float(covariance[0, 2]) == pytest.approx(level + slope + config * alike(process), rel=1e-6)
    assert torch.linalg.eigvalsh(process.noisy_covariance(points)).min() > 0


def test_the_similarity_of_studies_is_learnt():
    random = np.random.default_rng(0)
    x = random.random((40, 1))
    points = Points(
        torch.from_numpy(np.concatenate([x, x])), torch.ones(80).double(), torch.arange(80), torch.arange(80) // 40
    )
    one = np.sin(7 * x[:, 0])
    found = []
    for other in (one, np.cos(9 * x[:, 0])):
        y = torch.from_numpy(np.concatenate([one, other]) + 0.02 * random.standard_normal(80))
        found.append(alike(GaussianProcess.from_prior(np.array([0]), multi_study=True).fit(points, y)))
    assert found[0] > 0.9
    assert found[1] < 0.6
