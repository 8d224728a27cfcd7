"""Base class of the training loops, with the session, the files and the device of a run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from hpsearch.objectives.errors import ObjectiveError, get_first_line
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.ranked_session import wrap_session
from hpsearch.objectives.training.ranks import current_ranks
from hpsearch.objectives.training.reports.run_dir import RunDir
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.reproducibility.seeds import enable_repeatable_cublas
from hpsearch.objectives.training.result import derive_status
from hpsearch.objectives.training.session import Curve, LocalSession, Session, Verdict


class BaseTrainer:
    """Base class of training loops, with the session, files and device of a run.

    Args:
        config: configuration to train.
        plan: epochs, seeds and splits of the run.
        session: session that saves the run and may end it; None uses `LocalSession(run_dir)`.
        run_dir: directory for configuration, log and metrics; None uses the directory of the session.
        device: device name, such as "cpu" or "cuda:1"; None uses a GPU if available.
    """

    def __init__(
        self,
        config: Any,
        plan: RunPlan,
        *,
        session: Session | None = None,
        run_dir: Path | None = None,
        device: str | None = None,
    ) -> None:
        if run_dir is None and session is not None:
            run_dir = session.run_dir
        run_dir = None if run_dir is None else Path(run_dir)  # users may pass a string
        self.config, self.plan, self.ranks = config, plan, current_ranks()
        if not self.ranks.is_rank_zero:  # only rank 0 uses the session and writes files
            session = run_dir = None
        self.own_session = LocalSession(run_dir) if session is None and run_dir is not None else session
        self.session = self.own_session if self.ranks.is_single_process else wrap_session(self.own_session, self.ranks)
        self.files = RunDir(run_dir, should_log=self.ranks.is_rank_zero)
        self.device = resolve_device(device)
        self.curve = None if self.session is None else self.session.curve

    def _open(self, curve: Curve, resolved: dict[str, Any], changes: str, *, resumed_at: int | None) -> Verdict:
        """Write the run's configuration, and report the epochs of a restored curve again."""
        self.files.start(resolved, changes, resumed_at=resumed_at)
        for record in curve.history:
            if (verdict := self._report(record)) != Verdict.CONTINUE:
                return verdict
        return Verdict.CONTINUE

    def _report(self, record: EpochRecord) -> Verdict:
        """Report an epoch to the session, then write its record."""
        # The report comes first: if the trial is lost, the session raises, and the run changes no file.
        verdict = Verdict.CONTINUE if self.session is None else self.session.report(record)
        self.files.record(record)
        return verdict

    def _shared_result(self, curve: Curve, verdict: Verdict, notes: list[str], *, finished: bool) -> dict[str, Any]:
        """Return the common fields of a `RunResult`; `finished` states whether the training is complete."""
        return {
            "status": derive_status(verdict, finished=finished),
            "verdict": verdict,
            "curve": curve,
            "best_path": self.files.find("best.pt"),
            "last_path": self.files.find("last.pt"),
            "resume_note": "; ".join(notes) or None,
        }

    def _log_files(self, paths: Iterable[Path]) -> None:
        """Pass files of the run to the session."""
        for path in paths:
            if self.session is not None:
                self.session.log(path)


def format_metrics(metrics: dict[str, float]) -> str:
    """Return metrics as one line of text."""
    return " ".join(f"{name}={value:.5g}" for name, value in metrics.items())


def resolve_device(name: str | None) -> torch.device:
    """Return the device called `name`; None uses a GPU if available.

    Raises:
        ObjectiveError: the device is not available.
    """
    enable_repeatable_cublas()
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
        if device.type == "meta":
            raise RuntimeError("it stores no data; give cpu, cuda or cuda:N")
    except (RuntimeError, AssertionError, ImportError) as error:  # ImportError: the device needs another package
        detail = get_first_line(error)
        raise ObjectiveError(f"device {name!r} is not available: {detail}") from error
    return device
