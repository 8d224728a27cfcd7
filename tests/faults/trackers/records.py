"""Read the records of a study in TensorBoard's and Weights & Biases' files."""

from __future__ import annotations

from pathlib import Path

from tests.faults.invariants import Trial


def event_points(folder: Path, number: int, tag: str = "loss/val") -> list[tuple[int, float]]:
    """Return step and value of all points of a trial in TensorBoard; empty if it has no file yet."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trial = folder / f"{number:04d}"
    if not trial.is_dir():
        return []
    found = EventAccumulator(str(trial), size_guidance={"scalars": 0}).Reload()
    return [(each.step, each.value) for each in found.Scalars(tag)] if tag in found.Tags()["scalars"] else []


def wandb_rows(home: Path, number: int) -> list[tuple[int, float]]:
    """Return step and value of all rows in the offline files of a trial's run."""
    from tests.storage.trackers.wandb_runs.history import rows

    files = sorted(home.glob(f"wandb/*/wandb/offline-run-*/run-*-{number:04d}.wandb"))
    return [(row["_step"], row["val_loss"]) for path in files for row in rows(path)]


def wandb_ids(home: Path) -> set[str]:
    """Return the ids of all runs."""
    return {path.stem for path in home.glob("wandb/*/wandb/offline-run-*/*.wandb")}


def assert_sent(trials: list[Trial], events: Path, home: Path) -> None:
    """Assert that each tracker has one run per trial, with each of its epochs once."""
    assert sorted(path.name for path in events.iterdir() if path.is_dir()) == [f"{t.number:04d}" for t in trials]
    assert len(wandb_ids(home)) == len(trials)
    for trial in trials:
        expected = sorted(trial.values.items())
        shown = sorted(event_points(events, trial.number))
        assert [step for step, _ in shown] == [step for step, _ in expected], f"trial {trial.number}"
        assert all(abs(a - b) < 1e-6 * max(abs(b), 1) for (_, a), (_, b) in zip(shown, expected, strict=True))
        assert sorted(wandb_rows(home, trial.number)) == expected, f"trial {trial.number}"
