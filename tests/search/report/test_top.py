"""The live view of a study: no column is lost with long reasons."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta

import pytest
from optuna.trial import TrialState, create_trial
from rich.console import Console

from hpsearch.search.cli import run_command
from hpsearch.search.console import PlainConsole, format_number
from hpsearch.search.report.top import StudyStatus, format_counts, read_status, render_status
from hpsearch.search.report.trial_table import shorten_reason
from hpsearch.storage.attributes import INFEASIBLE
from hpsearch.storage.study_storage.storage import open_storage
from hpsearch.storage.trials.history import Progress, read_progress
from hpsearch.storage.trials.worker_registry import AttemptEnd, WorkerIdentity, WorkerRow
from tests.search.finalists.support import search

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def standing() -> StudyStatus:
    who = WorkerIdentity("node-17:1234-abcd", "node-17", 1234, "slurm", "99_7", "cuda:0", "0.1.0")
    worker = WorkerRow(who, "running", 141, 12, 3, NOW, NOW, 58.0, None)
    reason = "median pruner at epoch 3 of 27: best accuracy 0.9 is below 0.918056, the median of 12 trials"
    ago = NOW - timedelta(minutes=75)
    events = [AttemptEnd(ago, 140, "pruned", "w", reason), AttemptEnd(ago, 139, "released", "w", None)]
    progress = Progress(budget=200, pruned=1)
    return StudyStatus("s", "accuracy", "maximize", 27, None, progress, [worker], events, {1: 2}, None, NOW)


def test_infeasible_trials_do_not_count_as_pruned(database_url: str) -> None:
    ends = [{}, {}, {INFEASIBLE: True}]
    trials = [create_trial(state=TrialState.PRUNED, user_attrs=attrs) for attrs in ends]
    study = search(open_storage(database_url, application_name="test"), "s", trials)
    progress = read_progress(study.engine, study.study_id, "maximize")
    assert format_counts(progress).startswith("3/3 trials: 0 complete, 2 pruned, 1 infeasible, 0 failed")
    assert progress.trials_with_result == 3


def test_the_number_of_wanted_workers_is_compared_with_the_active_ones(
    database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPSEARCH_STORAGE_URL", database_url)
    monkeypatch.setenv("HPSEARCH_TRACKING_URI", "http://127.0.0.1:1")
    study = search(open_storage(database_url, application_name="test"), "s", [], budget=5)
    assert run_command(["fleet", "size", "s", "500"]) == 0
    assert "study s should have 500 workers" in capsys.readouterr().out
    assert run_command(["fleet", "size", "s", "-1"]) == 2
    study.refresh()
    status = read_status(study)
    assert status.wanted_workers == 500
    console = Console(width=80)
    with console.capture() as capture:
        console.print(render_status(status, None, width=80))
    assert "0 of 500 wanted active workers" in capture.get()


@pytest.mark.parametrize("width", [60, 80, 112, 200])
def test_the_columns_of_ended_trials_fit_with_long_reasons(width: int) -> None:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(render_status(standing(), 1.0, width=width))
    lines = capture.get().splitlines()
    [head] = [line for line in lines if line.startswith("ended")]
    assert head.split() == ["ended", "trial", "outcome", "reason"]
    rows = lines[lines.index(head) + 1 :]
    assert [row.split("ago")[1].split()[0] for row in rows] == ["140", "139"]
    assert rows[0].rstrip().endswith("  0.9 < 0.918056 at epoch 3")
    assert all(len(line) <= width for line in lines)


def test_a_narrow_view_is_a_list_without_cut_values() -> None:
    console = PlainConsole(width=50, file=io.StringIO())
    with console.capture() as capture:
        console.print(render_status(standing(), 1.0, width=50))
    lines = capture.get().splitlines()
    assert "…" not in capture.get()
    assert max(map(len, lines)) <= 50
    assert lines[-4:] == [
        "ended 1.2 h ago, trial 140, outcome pruned",
        "  reason 0.9 < 0.918056 at epoch 3",
        "ended 1.2 h ago, trial 139, outcome released",
        "  reason by w",
    ]


@pytest.mark.parametrize(
    ("reason", "short"),
    [
        ("median pruner at epoch 3 of 9: best loss 0.9 is above 0.8, the median of 12 trials", "0.9 > 0.8 at epoch 3"),
        ("threshold pruner at epoch 1 of 9: loss 3 is above the threshold 2", "3 > 2 at epoch 1"),
        ("asha pruner at epoch 1 of 6: rank 6 of 8 at rung 0, only 3 of 8 are promoted", "rank 6 of 8 at epoch 1"),
        ("median pruner at epoch 1 of 9: loss is NaN in all epochs", "epoch 1: loss is NaN in all epochs"),
        ("KeyError: 'x'\nTraceback", "KeyError: 'x'"),
    ],
)
def test_reasons_are_shortened(reason: str, short: str) -> None:
    assert shorten_reason(reason) == short


@pytest.mark.parametrize(
    ("value", "text"),
    [(29162.0, "29162"), (-123456.7, "-123457"), (0.98765, "0.9877"), (1.234e-5, "1.234e-05"), (1e20, "1e+20")],
)
def test_numbers_keep_their_integer_part(value: float, text: str) -> None:
    assert format_number(value) == text
