"""Whether the content of a checkpoint comes from the training of a trial.

Other users of the database and of MLflow can replace the file. Its configuration reaches the objective's code, which
may use it to choose a file, a class or a package. So it must be one that the objective suggests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from optuna.trial import FrozenTrial

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.custom_loop.loop_objective import LoopObjective, config_to_json
from hpsearch.objectives.search_space import FixedTrial
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.search.samplers.suggest import derive_training_seed
from hpsearch.search.study.ranking import get_first_value, get_schedule
from hpsearch.search.study.study import StoredStudy


def find_foreign_part(
    study: StoredStudy, trial: FrozenTrial, objective: BaseObjective, best: Mapping[str, Any]
) -> str | None:
    """Return a description of the parts of a `best.pt` that another training run has; None if it is the trial's.

    Call it before the objective uses the content.

    Raises:
        ObjectiveError: `suggest` rejects the parameters of the trial, or a training setting of the file is invalid.
    """
    spec = study.spec
    wanted = {
        "seed": derive_training_seed(spec, trial.number),
        "split_seed": spec.seed,
        "value": get_first_value(trial),
        "folds": spec.folds,
    }
    found = [f"{key} {best.get(key)}, not {value}" for key, value in wanted.items() if best.get(key) != value]
    if found:
        return ", ".join(found)
    params = [trial.params, *(part["params"] for part in get_schedule(trial) or [])]
    suggested = [_describe_free_settings(objective, objective.configure(FixedTrial(each))) for each in params]
    stored = best.get("config")
    if not isinstance(objective, LoopObjective):
        stored = TrainConfig.from_dict(stored if isinstance(stored, Mapping) else {})
    if _describe_free_settings(objective, stored) not in suggested:
        return "a configuration that suggest() does not return for the trial's parameters"
    return None


def _describe_free_settings(objective: BaseObjective, config: Any) -> str:
    """Return the settings that only the objective checks, as text. `TrainConfig` checks all but `model` itself."""
    if isinstance(config, TrainConfig):
        return json.dumps(config.model, sort_keys=True, default=repr)
    return json.dumps(config_to_json(config, f"{objective.name}.suggest"), sort_keys=True)
