"""The run in MLflow that all trials of a study hang under."""

from __future__ import annotations

from typing import Any

from hpsearch.search.study.study import StoredStudy, parent_of
from hpsearch.storage.attributes import RUN_ID, RUN_URL, TRACKING_URI
from hpsearch.storage.database.locks import still_held, study_lock
from hpsearch.storage.mlflow.client import Tracking


def open_parent_run(study: StoredStudy, tracking: Tracking) -> str:
    """Return the study's parent run, made if it is missing; all who ask at once get the same one.

    One that is there is found without the study's lock, which a frozen process may hold.

    Raises:
        StorageError: its run, or the experiment, was deleted; or somebody else is at it for long.
        MlflowException: the server does not answer, or refuses.
    """
    attrs = study.attrs
    known = attrs.get(RUN_ID)
    if known is not None and attrs.get(TRACKING_URI) == tracking.uri and tracking.has_run(known):
        if attrs.get(RUN_URL) != (url := tracking.run_url(known)):  # MLflow is shown under another address by now
            study.set_attr(RUN_URL, url)
        return str(known)
    return _ensure_parent_run(study, tracking)


def _ensure_parent_run(study: StoredStudy, tracking: Tracking) -> str:
    """Make the study's parent run under its lock, unless somebody else was faster.

    The runs of finalists are children of the run of the search that they are of.
    """
    spec = study.spec
    if spec.finalists_of is not None:
        parent = parent_of(study)
        run_id = open_parent_run(parent, tracking)
        for key in (RUN_ID, RUN_URL, TRACKING_URI):
            study.set_attr(key, parent.attrs[key])
        return run_id
    with study_lock(study.engine, study.study_id) as connection:
        run_id = tracking.study_run(
            spec.name,
            study.study_id,
            params=_parameters(spec.model_dump(exclude={"finalists_of"})),
            known=study.attrs.get(RUN_ID),
            may_create=lambda: still_held(connection),
        )
        still_held(connection)
        study.set_attr(RUN_ID, run_id)
        study.set_attr(RUN_URL, tracking.run_url(run_id))
        study.set_attr(TRACKING_URI, tracking.uri)
    return run_id


def _parameters(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec flat: ``sampler.n_startup_trials`` and so on."""
    flat: dict[str, Any] = {}
    for key, value in spec.items():
        if isinstance(value, dict):
            flat |= {key: value["name"]} if "name" in value else {}
            flat |= {f"{key}.{k}": v for k, v in value.items() if k != "name"}
        else:
            flat[key] = value
    return flat
