"""The end of a run: its result, with its best weights put back."""

from __future__ import annotations

import math

from hpsearch.objectives.training.exportable import example_of
from hpsearch.objectives.training.loop.performance import peak_memory, plain
from hpsearch.objectives.training.loop.run import Run
from hpsearch.objectives.training.loop.stepping import call_in
from hpsearch.objectives.training.reports.run_dir import RunDir
from hpsearch.objectives.training.result import FitResult, Status
from hpsearch.objectives.training.session import Verdict


def conclude(run: Run, verdict: Verdict, files: RunDir) -> FitResult:
    """The result of a run that has ended, with its best weights put back."""
    best, val = run.progress.best, run.splits.val
    if best:  # none yet, where the run was left in its first epoch
        run.judged.load_state_dict(run.strategy.own(best["model"], run.judged.state_dict()))
    status = _status(run, verdict)
    reported = run.ranks.told(files.path is not None) and status != "stopped"
    train_scores = run.judge_train() if reported else None
    model = plain(run.strategy.plain(run.judged)).eval()
    fresh = None
    if run.fresh is not None and status == "completed" and run.ranks.first:
        metric = run.progress.key.removeprefix("val_")
        fresh = run.fresh.score(metric, best.get("value", math.nan), run.stepping, run.device)
    return FitResult(
        status=status,
        best_epoch=best.get("epoch", -1),
        best_value=best.get("value", math.nan),
        best_metrics=dict(best.get("metrics", {})),
        history=list(run.progress.history),
        model=model,
        example=example_of(val),
        call=call_in(run.stepping),
        best_path=files.existing("best.pt"),
        last_path=files.existing("last.pt"),
        split_hash=run.identity["split_hash"],
        val=val,
        resume_note="; ".join(run.notes) or None,
        memory=peak_memory(run.device),
        train_scores=train_scores,
        fresh_score=fresh,
    )


def _status(run: Run, verdict: Verdict) -> Status:
    if verdict is Verdict.PRUNE:
        return "pruned"
    if verdict is Verdict.PAUSE:  # also where nothing is left to train: whether it counts is decided elsewhere
        return "stopped"
    return "completed" if run.finished else "stopped"
