"""The shared view of a study in the MLflow UI: its table of trial runs with filter, order and columns set.

MLflow stores a shared view as a tag of the experiment. The page opens a view by its key, a query parameter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hpsearch.storage.mlflow.client import Tracking, sanitize_name
from hpsearch.storage.mlflow.tag_names import REASON, STATE

_TAG_PREFIX = "mlflow.sharedViewState."
_MAX_CHARACTERS = 20_000  # of a tag of an experiment


def get_view_url(run_url: str, parent: str) -> str | None:
    """Return the URL of the view of a study, which `share_view` has stored.

    Args:
        run_url: the URL of the study's run in the MLflow UI.
        parent: the id of the study's run.

    Returns:
        None if `run_url` is not the URL of this run.
    """
    experiment, found, _ = run_url.partition(f"/runs/{parent}")
    return f"{experiment}/runs?viewStateShareKey={parent}&workflowType=machine_learning" if found else None


def share_view(
    tracking: Tracking,
    parent: str,
    *,
    metrics: Sequence[str],
    params: Sequence[str],
    tags: Sequence[str] = (),
    order_by_tag: str | None = None,
    is_ascending: bool = False,
) -> None:
    """Store the view of a study. Repeated calls replace the view. With thousands of parameters, some are left out.

    Args:
        tracking: the tracking server.
        parent: the id of the study's run.
        metrics: the names of the metrics that are shown.
        params: the names of the parameters that are shown.
        tags: the names of the tags that are shown, besides state and reason.
        order_by_tag: the name of the tag by which the runs are ordered; None for the first metric.
        is_ascending: whether the lowest value is first.
    """
    names = {"metrics": metrics, "tags": (*tags, STATE, REASON), "params": params}
    columns = [f"{kind}.`{sanitize_name(name)}`" for kind, group in names.items() for name in group]
    view: dict[str, Any] = {
        "searchFilter": f"tags.`mlflow.parentRunId` = '{parent}'",
        "orderByKey": columns[0] if order_by_tag is None else f"tags.`{order_by_tag}`",
        "orderByAsc": is_ascending,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": ["attributes.`Duration`", *columns],
    }
    excess = len(json.dumps(view)) - _MAX_CHARACTERS
    while excess > 0 and columns:
        excess -= len(json.dumps(columns.pop())) + len(", ")
    view["selectedColumns"] = ["attributes.`Duration`", *columns]
    tracking.client.set_experiment_tag(tracking.experiment_id, f"{_TAG_PREFIX}{parent}", json.dumps(view))
