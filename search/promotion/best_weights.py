"""The best weights that a trial logged, fetched again for what is done with them long after it ended."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial

from hpsearch.objectives.base import BaseObjective
from hpsearch.objectives.loading import load_objective
from hpsearch.objectives.training.checks.held_out import Restored
from hpsearch.objectives.training.reproducibility import checkpoint
from hpsearch.search.console import command
from hpsearch.search.errors import SearchError
from hpsearch.search.sampling.seeds import training_seed
from hpsearch.search.study.ranking import first_value
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import REMOVED, RUN_ID
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.health import one_line

_SAME = 0.01  # of the value: another device may judge a sample otherwise; changed code or data is further off


def judged_objective(study: StoredStudy) -> BaseObjective:
    """Load the objective of a study, judged by the study's metric.

    Raises:
        ObjectiveError: it cannot be loaded here.
    """
    objective = load_objective(study.spec.objective)
    objective.judge_by(study.spec.metric, study.spec.direction)
    return objective


@dataclass(frozen=True)
class BestWeights:
    """The best weights of a trial; `undone` ends each refusal: what was not done for want of them."""

    study: StoredStudy
    trial: FrozenTrial
    undone: str

    def fetch(self, tracking: Tracking, folder: Path) -> Path:
        """Bring the best weights that the trial logged.

        Raises:
            SearchError: they are not to be had.
        """
        name, number = self.study.spec.name, self.trial.number
        run_id = self.trial.user_attrs.get(RUN_ID)
        if run_id is None:
            raise SearchError(f"trial {number} of {name!r} has no run in MLflow: its weights are not kept")
        if removed := self.trial.user_attrs.get(REMOVED):
            raise SearchError(f"the weights of trial {number} are not kept ({removed}); {self.undone}")
        try:
            return Path(tracking.client.download_artifacts(str(run_id), "checkpoints/best.pt", str(folder)))
        except Exception as error:  # MLflow's client raises what its transport does
            send = command("sync", name)
            raise SearchError(
                f"the weights of trial {number}, checkpoints/best.pt of its run {run_id} in MLflow, are not to be "
                f"had ({one_line(error)}); {self.undone}; should they wait on a machine, send them: {send}"
            ) from None

    def read(self, path: Path) -> dict[str, Any]:
        """Return what the file holds.

        Raises:
            SearchError: it is torn, or of another training.
        """
        try:
            best = checkpoint.read(path)
        except checkpoint.CheckpointError as error:
            raise SearchError(
                f"the weights of trial {self.trial.number} cannot be used: {error}; {self.undone}"
            ) from None
        spec = self.study.spec
        wanted = {
            "seed": training_seed(spec, self.trial.number),
            "split_seed": spec.seed,
            "value": first_value(self.trial),
        }
        differ = [f"{key} {best.get(key)} for {value}" for key, value in wanted.items() if best.get(key) != value]
        if differ:
            raise SearchError(
                f"checkpoints/best.pt in the run of trial {self.trial.number} is of another training "
                f"({', '.join(differ)}): put back the file that the trial logged; {self.undone}"
            )
        return best

    def require_value(self, restored: Restored) -> None:
        """Make sure that the weights score on the validation data what they scored when they were trained.

        Raises:
            SearchError: they do not: the code has changed.
        """
        metric = self.study.spec.metric
        now, then = restored.validate()[metric], float(first_value(self.trial) or 0.0)
        if not math.isclose(now, then, rel_tol=_SAME, abs_tol=1e-6):
            raise SearchError(
                f"the weights of trial {self.trial.number} give val {metric} {now:.6g} now and gave {then:.6g} in "
                f"the search: put back the code that the study was run with; {self.undone}"
            )
