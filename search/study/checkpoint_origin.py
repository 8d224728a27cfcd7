"""Checks of a checkpoint's content before the objective uses it.

Other users of the database and of MLflow can replace the file. Its configuration would reach the objective's code,
which may use it to choose a file, a class or a package. So the objective gets the configuration that `suggest` returns
for the trial, and none from the file. Its extra states would reach `set_extra_state` of the model's layers, which may
unpickle them, as those of TransformerEngine do. Therefore, a file that others can replace is rejected if it has extra
states.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from optuna.trial import FrozenTrial

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.custom_loop.loop_objective import config_to_json
from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.search_space import FixedTrial
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.reproducibility.loaded_state import find_extra_state
from hpsearch.search.errors import SearchError
from hpsearch.search.samplers.suggest import derive_training_seed
from hpsearch.search.study.ranking import get_first_value, get_last_params
from hpsearch.search.study.study import StoredStudy

_ALLOW = "HPSEARCH_ALLOW_EXTRA_STATE"


def find_foreign_part(study: StoredStudy, trial: FrozenTrial, best: Mapping[str, Any]) -> str | None:
    """Return a description of the parts of a `best.pt` that another training run has; None if it is the trial's."""
    wanted = {
        "seed": derive_training_seed(study.spec, trial.number),
        "split_seed": study.spec.seed,
        "value": get_first_value(trial),
        "folds": study.spec.folds,
    }
    found = [f"{key} {best.get(key)}, not {value}" for key, value in wanted.items() if best.get(key) != value]
    return ", ".join(found) or None


def replace_config(objective: BaseObjective, trial: FrozenTrial, best: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a `best.pt` with the configuration that the objective suggests for the trial.

    Raises:
        SearchError: the objective rejects the parameters of the trial.
    """
    fixed = FixedTrial(get_last_params(trial))
    fixed.number = trial.number
    try:
        config = objective.configure(fixed)
        is_standard = isinstance(config, TrainConfig)
        plain = config.to_dict() if is_standard else config_to_json(config, f"{objective.name}.suggest")
    except ObjectiveError as error:
        raise SearchError(f"trial {trial.number}: {error}; restore the search space of the study") from error
    return {**best, "config": plain}


def find_unsafe_part(state: Mapping[str, Any], confirmation: str = f"set {_ALLOW}=1") -> str | None:
    """Return the reason to reject a checkpoint that other users can replace; None if there is none.

    The variable `HPSEARCH_ALLOW_EXTRA_STATE` disables the check.

    Args:
        state: content of the checkpoint.
        confirmation: remedy for the message: the option or command that permits the file.
    """
    if os.environ.get(_ALLOW) == "1" or (name := find_extra_state(state)) is None:
        return None
    return (
        f"{name} is extra state of a layer, which can run code, and other users can write the file; if you trust them, "
        f"{confirmation}"
    )
