"""Once per study, before its first trial: whether the objective's model can fit one batch at all."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hpsearch.objectives.objective import BaseObjective, Objective
from hpsearch.objectives.training.checks.smoke import SmokeResult, run_smoke_test
from hpsearch.search.console import format_command
from hpsearch.search.study.create import suggested
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import RUN_ID, SMOKE_TEST
from hpsearch.storage.mlflow.client import Tracking

_SECONDS = 60.0  # for a large model on a CPU this decides nothing, and says so


def smoke_test(study: StoredStudy, objective: BaseObjective, tracking: Tracking | None) -> str | None:
    """Overfit one batch with a configuration of the search space, unless this study's was done; a warning if it fails.

    A failure does not end the search: a space may hold models that are too small for it on purpose. The outcome is
    kept in the study, and with its losses in MLflow's run of the study, where `tracking` is there to take them.
    """
    if not isinstance(objective, Objective):
        return None  # nobody knows what one batch of an own loop is
    told = study.attrs.get(SMOKE_TEST)
    if told is None:
        spec = study.spec
        result = run_smoke_test(objective, suggested(objective, spec), seed=spec.seed, seconds=_SECONDS)
        told = _told(result)
        if tracking is not None:
            with tempfile.TemporaryDirectory() as folder:
                result.write(Path(folder))
                for file in sorted(Path(folder).iterdir()):
                    tracking.log_file(str(study.attrs[RUN_ID]), file)
        study.set_attr(SMOKE_TEST, told)
    if told.startswith("passed"):
        return None
    return f"warning: smoke test {told}; look closer with: {format_command('smoke', study.spec.objective)}"


def _told(result: SmokeResult) -> str:
    if result.passed:
        losses = f"loss {result.losses[0]:.4g} -> {result.losses[-1]:.4g}"
        return f"passed: one batch of {result.samples} samples fitted, {losses}"
    return f"failed: {result.reason}"
