"""The objective of a study as its workers take it: judged by the study's metrics, on a device that can measure them."""

from __future__ import annotations

from hpsearch.objectives.base import BaseObjective
from hpsearch.objectives.loading import load_objective
from hpsearch.objectives.training.trainer import device_named
from hpsearch.search.errors import SearchError
from hpsearch.search.spec.spec import StudySpec


def judged_objective(spec: StudySpec) -> BaseObjective:
    """Return the study's objective, which reports all that the study asks for.

    Raises:
        ObjectiveError: it cannot be loaded, or does not have such a metric.
    """
    objective = load_objective(spec.objective)
    objective.judge_by(spec.metric, spec.direction)
    objective.also_report(spec.also_reported)
    return objective


def require_measurable(spec: StudySpec, device: str | None) -> None:
    """Refuse to train where each trial would fail, for what a study asks for cannot be measured.

    Raises:
        SearchError: it cannot on that device.
        ObjectiveError: there is no such device.
    """
    if "peak_memory_mb" in spec.also_reported and (kind := device_named(device).type) != "cuda":
        raise SearchError(
            f"study {spec.name!r} asks for peak_memory_mb, which is measured on CUDA devices, and here it would be "
            f"trained on {kind}: train it where there is a GPU, or search by model_mb or parameters"
        )
