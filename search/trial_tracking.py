"""What a trial leaves in MLflow: its run, opened once however many attempts, and what its end publishes."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from objectives.training import FitResult
from search.spec import StudySpec
from search.study import RUN_ID, RUN_URL, TRACKING
from storage import models
from storage.claims import Claim, Lost
from storage.study_storage import PostgresStorage
from storage.tracking import FINALIST_OF, MODEL_ID, SEED, State, Tracking, TrialRun

log = logging.getLogger(__name__)


class TrialTracking:
    """The tracking of one attempt at a trial. A server that is away costs the trial nothing but its records."""

    def __init__(
        self,
        tracking: Tracking,
        spec: StudySpec,
        claim: Claim,
        storage: PostgresStorage,
        *,
        parent: str,
    ) -> None:
        self._tracking = tracking
        self._spec = spec
        self._claim = claim
        self._storage = storage
        self._parent = parent
        self.run: TrialRun | None = None

    def open(self) -> None:
        """Open the trial's run; the trial notes the run, the run the trial."""
        known = self._storage.get_trial_user_attrs(self._claim.trial_id).get(RUN_ID)
        try:
            self.run = self._tracking.trial_run(
                self._spec.name,
                self._claim.number,
                parent=self._parent,
                known=known,
                search=self._claim.resumed,
            )
        except Exception as error:  # the server is away: the trial goes on, and its end tries again
            log.warning("trial %d: MLflow gives no run (%s)", self._claim.number, error)
            return
        if known is None:
            with self._storage.together(self._claim.trial_id):
                self._note(RUN_ID, self.run.run_id)
                self._note(RUN_URL, self.run.url)
        tags = {"hpsearch.objective": self._spec.objective, "hpsearch.attempt": str(self._claim.attempt)}
        if self._spec.finalists_of is not None:
            trial, seed = self._spec.finalists_of.assignment(self._claim.number)
            tags |= {FINALIST_OF: str(trial), SEED: str(seed)}
        self.run.set_tags(tags)

    def _note(self, key: str, value: str) -> None:
        self._storage.set_trial_user_attr(self._claim.trial_id, key, value)

    def log_params(self) -> None:
        """Log the trial's parameters, once they are suggested."""
        if self.run is not None:
            params = self._storage.get_trial(self._claim.trial_id).params
            self.run.log_params({**params, "seed": self._spec.seed, "epochs": self._spec.epochs})

    def log_file(self, path: Path) -> None:
        """Upload a file of the run directory."""
        if self.run is not None:
            self.run.log_file(path)

    def publish(self, result: FitResult, files: list[Path], *, with_model: bool) -> None:
        """Send what the trial made: its files, its best value and, for a full run, its best checkpoint and model.

        It comes before the trial is settled: a worker that dies in between finds the trial at its last checkpoint
        and publishes again, where the reverse order would leave a winner without a model.
        """
        if not self._whole(result):
            return
        run = self.run
        assert run is not None
        last = result.history[-1]
        best = {f"best_{key}": value for key, value in result.best_metrics.items() if key.startswith("val_")}
        run.log_epoch(last.epoch, last.timestamp, {**best, "best_epoch": float(result.best_epoch)})
        for path in files:
            run.log_file(path)
        if with_model:
            if result.best_path is not None:
                run.log_file(result.best_path, folder="checkpoints")
            self._log_model(run, result)
        run.flush()
        if run.errors:
            self._note(TRACKING, f"incomplete: {run.errors[0]}")

    def _whole(self, result: FitResult) -> bool:
        """Make sure that the run has every epoch; what did not arrive while the server was away is sent again."""
        if self.run is not None:
            self.run.flush()
            if not self.run.errors:
                return True
            self.run.errors.clear()
        else:
            self.open()
            self.log_params()
            if self.run is None:
                self._note(TRACKING, "missing: MLflow was away during the whole trial")
                return False
        for record in result.history:
            self.run.log_epoch(record.epoch, record.timestamp, record.metrics)
        return True

    def _log_model(self, run: TrialRun, result: FitResult) -> None:
        run.flush()
        try:
            if run.tag(MODEL_ID):
                return  # logged by an attempt that died before the trial was settled
            name = f"{self._spec.name}-trial-{self._claim.number}"
            model_id = models.log_model(
                run.run_id,
                result.model,
                result.example,
                name=name,
                step=result.best_epoch,
                tags={"hpsearch.study": self._spec.name, "hpsearch.trial": str(self._claim.number)},
            )
            run.set_tags({MODEL_ID: model_id})
        except Exception as error:  # a model that cannot be exported leaves its checkpoint and the reason
            run.failed("the model", error)

    def tag_pruning(self, record: dict[str, object]) -> None:
        """Note on what grounds the trial is pruned: pruner, epoch (from 0), value, cut-off, peers, rung."""
        if self.run is not None:
            self.run.set_tags({"hpsearch.pruning": json.dumps(record)})

    def finish(self, state: State, reason: str) -> None:
        """End the run as its trial ended."""
        if self.run is not None:
            self.run.finish(state, reason)

    def leave(self) -> None:
        """Leave the run open for the trial's next attempt."""
        if self.run is not None:
            self.run.close()

    def abandon(self, reason: str) -> None:
        """Leave a run whose trial was lost: ended as killed, unless another attempt has the run."""
        if self.run is None:
            return
        if self._storage.get_trial(self._claim.trial_id).state.is_finished():
            self.run.finish("CANCELLED", reason)
        else:
            self.run.close()


def end_lost_run(tracking: Tracking, lost: Lost, run_id: str | None) -> None:
    """End the run of a trial whose workers died; nobody else will."""
    if run_id is not None:
        TrialRun(tracking, str(run_id)).finish("FAIL", lost.reason)
