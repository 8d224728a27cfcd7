"""The objective vector of a multi-objective trial: all values of the best epoch by the first metric."""

import math

import numpy as np
import pytest
from optuna.trial import TrialState, create_trial

from hpsearch.search.freeze_thaw.multi_objective import get_objective_vector, read_values_by_epoch, track_incumbent
from hpsearch.storage.attributes import INFEASIBLE, VALUES

MAXIMIZE = [True, False]


def test_secondary_metrics_are_those_of_the_best_epoch_so_far():
    found = track_incumbent({1: [0.5, 3.0], 2: [0.9, 7.0], 3: [0.7, 1.0], 4: [0.9, 2.0]}, MAXIMIZE)
    assert {epoch: vector.tolist() for epoch, vector in found.items()} == {
        1: [-0.5, 3.0],
        2: [-0.9, 7.0],
        3: [-0.9, 7.0],
        4: [-0.9, 7.0],  # the earlier of equal epochs
    }


def test_nan_is_an_infinite_loss():
    found = track_incumbent({1: [math.nan, 3.0], 2: [0.1, math.nan]}, MAXIMIZE)
    assert found[1].tolist() == [np.inf, np.inf]
    assert found[2].tolist() == [-0.1, np.inf]


def trial(**shape: object):
    return create_trial(**{"state": TrialState.PRUNED, "intermediate_values": {0: 0.2, 1: 0.4}, **shape})


def test_the_objective_vector_equals_the_shown_values():
    shown = trial(system_attrs={VALUES: {"0": [0.2, 5.0]}})
    found = read_values_by_epoch(shown, 2)
    assert found[1] == [0.2, 5.0]
    assert found[2] == pytest.approx([0.4, math.nan], nan_ok=True)  # reported later
    assert get_objective_vector(shown, MAXIMIZE).tolist() == [-0.4, np.inf]


@pytest.mark.parametrize("shape", [{"user_attrs": {INFEASIBLE: "diverged"}}, {"intermediate_values": {}}])
def test_diverged_and_empty_trials_have_infinite_losses(shape):
    assert get_objective_vector(trial(**shape), MAXIMIZE).tolist() == [np.inf, np.inf]
