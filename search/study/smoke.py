"""Smoke test of a study before its first trial: check that the objective's model can overfit one batch."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hpsearch.objectives.objective import BaseObjective, Objective
from hpsearch.objectives.training.checks.smoke import SmokeResult, run_smoke_test
from hpsearch.search.console import format_command
from hpsearch.search.study.create import suggest_configuration
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import RUN_ID, SMOKE_TEST
from hpsearch.storage.mlflow.client import Tracking

_SECONDS = 60.0  # a large model on a CPU may be undecided by then


def smoke_test(study: StoredStudy, objective: BaseObjective, tracking: Tracking | None) -> str | None:
    """Run the smoke test once per study, with a configuration of the search space; return a warning if it failed.

    A failure does not end the search, because a search space may contain models that are too small on purpose. The
    result is stored in the study, and the losses are logged to the study's MLflow run, unless `tracking` is None. A
    study with a custom training loop has no smoke test.
    """
    if not isinstance(objective, Objective):
        return None  # a custom loop has no batches that hpsearch could use
    outcome = study.attrs.get(SMOKE_TEST)
    if outcome is None:
        spec = study.spec
        result = run_smoke_test(objective, suggest_configuration(objective, spec), seed=spec.seed, seconds=_SECONDS)
        outcome = _format_result(result)
        if tracking is not None:
            with tempfile.TemporaryDirectory() as folder:
                result.write(Path(folder))
                for file in sorted(Path(folder).iterdir()):
                    tracking.log_file(str(study.attrs[RUN_ID]), file)
        study.set_attr(SMOKE_TEST, outcome)
    if outcome.startswith("passed"):
        return None
    again = format_command("smoke", study.spec.objective)
    return f"warning: smoke test of a random configuration {outcome}; test the default configuration with {again}"


def _format_result(result: SmokeResult) -> str:
    if result.passed:
        losses = f"loss {result.losses[0]:.4g} -> {result.losses[-1]:.4g}"
        return f"passed: one batch of {result.samples} samples fitted, {losses}"
    return f"failed: {result.reason}"
