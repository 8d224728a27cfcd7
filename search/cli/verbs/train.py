"""``hpsearch train``: one training run, alone, without a study or a database."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpsearch.search.cli.assignments import Device, Objective_, RunSeed, Set, configured
from hpsearch.search.process import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from hpsearch.objectives.objective import BaseObjective
    from hpsearch.objectives.training.result import RunResult


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(train)


def train(
    objective: Objective_,
    *,
    settings: Set = None,
    epochs: Annotated[int | None, typer.Option("--epochs", min=1, help="  [default: the objective's]")] = None,
    seed: RunSeed = 0,
    device: Device = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="Folder of the run; give it again to go on  [default: runs/NAME-TIME]"),
    ] = None,
    test: Annotated[bool, typer.Option("--test", help="Open the held-out test split at the end, once.")] = False,
    keep: Annotated[int, typer.Option("--keep", min=1, help="How many checkpoints to keep for resuming.")] = 2,
    save_every: Annotated[
        float, typer.Option("--save-every", min=0, help="Minutes between checkpoints; 0 saves every epoch.")
    ] = 0.0,
    snapshot_every: Annotated[
        int | None, typer.Option("--snapshot-every", min=1, help="Epochs between checkpoints that stay.")
    ] = None,
    profile: Annotated[int, typer.Option("--profile", min=0, help="Steps of the first epoch to profile.")] = 0,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write event files for TensorBoard.")] = False,
) -> int:
    """Train one configuration to its end and write its report; killed or stopped, it goes on from --run-dir."""
    from hpsearch.objectives.fit import Where, fit, model_objective
    from hpsearch.objectives.loading import load_objective
    from hpsearch.objectives.training.loop.guards import DeviceMemoryError, NonFiniteError
    from hpsearch.objectives.training.loop.instruments import Instruments
    from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
    from hpsearch.objectives.training.session import LocalSession, Verdict

    class Printing(LocalSession):
        def report(self, record: EpochRecord) -> Verdict:
            typer.echo(_line(record.epoch, record.metrics, found.metric))
            return super().report(record)

    found = load_objective(objective)
    found.also_report([*found.directions, *found.constraints])
    config = configured(found, settings)
    folder = run_dir or Path("runs") / f"{found.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    session = Printing(folder, keep=keep, interval=60 * save_every, snapshot_every=snapshot_every)
    where: Where = {"epochs": epochs or found.epochs, "seed": seed, "session": session, "device": device}
    if profile or tensorboard:
        model_objective(found, "--profile" if profile else "--tensorboard")
        where["instruments"] = Instruments(profile_steps=profile, tensorboard=tensorboard)
    try:
        with _warnings_shown():
            result = fit(found, config, **where)
    except (NonFiniteError, DeviceMemoryError) as error:
        typer.echo(f"hpsearch: {error}", err=True)
        return 1
    except KeyboardInterrupt:
        typer.echo(f"hpsearch: stopped; go on with --run-dir {folder}", err=True)
        return EXIT_INTERRUPTED
    _conclude(found, result, folder, test=test)
    return 0


@contextmanager
def _warnings_shown() -> Iterator[None]:
    """Prints what the run warns of, a line each: its log is in a file."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("hpsearch: %(message)s"))
    logger = logging.getLogger("hpsearch.objectives.training")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _line(epoch: int, metrics: dict[str, float], metric: str) -> str:
    names = ["train_loss", "val_loss", *([f"val_{metric}"] if metric != "loss" else []), "lr"]
    shown = "  ".join(f"{name} {metrics[name]:.5g}" for name in names if name in metrics)
    return f"epoch {epoch + 1:3}  {shown}  {metrics['epoch_seconds']:.2f} s"


def _conclude(objective: BaseObjective, result: RunResult, folder: Path, *, test: bool) -> None:
    from hpsearch.objectives.fit import restore
    from hpsearch.objectives.measured import value_of
    from hpsearch.objectives.training.reproducibility import checkpoint

    best = f"best {objective.metric} {result.best_value:.6g} at epoch {result.best_epoch + 1}"
    report = folder / "report.md"
    typer.echo(f"{best}; {report if report.exists() else folder}")
    if result.best_metrics and objective.reported:
        typer.echo("  ".join(f"{name} {value_of(result.best_metrics, name):.6g}" for name in objective.reported))
    if result.resume_note:
        typer.echo(result.resume_note)
    if test and result.best_path is not None:
        scores = restore(objective, checkpoint.read(result.best_path)).test()
        typer.echo("test " + "  ".join(f"{name} {value:.6g}" for name, value in scores.items()))
