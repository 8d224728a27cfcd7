"""What a trial's run says of the code and the machine it was trained with, so that it can be repeated."""

from __future__ import annotations

import inspect
from pathlib import Path

from hpsearch.objectives.base import BaseObjective
from hpsearch.objectives.training.ranks import current
from hpsearch.objectives.training.reproducibility.environment import environment
from hpsearch.objectives.training.trainer import device_named

_VERSIONS = ("python", "torch", "numpy", "scikit-learn", "torchmetrics", "pytorch-optimizer")


def run_tags(objective: BaseObjective, device: str | None) -> dict[str, str]:
    """Return tags for the runs of a worker: commit, versions, device. `config.yaml` of a run has all of it.

    Raises:
        ObjectiveError: there is no such device.
    """
    source = inspect.getsourcefile(type(objective))
    found = environment(device_named(device), Path(source).resolve() if source else None)
    tags = {
        "hpsearch.versions": ", ".join(f"{name} {found[name]}" for name in _VERSIONS if found.get(name)),
        "hpsearch.device": str(found["device_name"]),
        "hpsearch.devices": str(current().world),  # that train a trial together
        "hpsearch.objective_sha256": str(found["source_sha256"] or ""),
    }
    if sha := found.get("git_sha"):
        # The name that MLflow's UI shows as the run's source version.
        tags |= {"mlflow.source.git.commit": sha, "hpsearch.git_dirty": str(found["git_dirty"]).lower()}
    return tags
