"""``hpsearch lr-range``: from which learning rate to start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpsearch.search.cli.assignments import Device, Objective_, RunSeed, Set, configured


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command(name="lr-range")(lr_range)


def lr_range(
    objective: Objective_,
    *,
    settings: Set = None,
    lowest: Annotated[float, typer.Option("--lowest", help="First rate.")] = 1e-6,
    highest: Annotated[float, typer.Option("--highest", help="Last rate.")] = 10.0,
    steps: Annotated[int, typer.Option("--steps", help="From the one to the other.")] = 200,
    seed: RunSeed = 0,
    device: Device = None,
    run_dir: Annotated[Path, typer.Option("--run-dir", help="Folder for lr-range.json and lr-range.png.")] = Path(),
) -> None:
    """Train with a climbing learning rate until the loss diverges; print a rate to start from and draw the loss."""
    from hpsearch.objectives.fit import model_objective
    from hpsearch.objectives.loading import load_objective
    from hpsearch.objectives.training.checks.lr_range import lr_range as climb
    from hpsearch.objectives.training.trainer import device_named

    found = model_objective(load_objective(objective), "lr-range")
    result = climb(
        found,
        configured(found, settings),
        seed=seed,
        lowest=lowest,
        highest=highest,
        steps=steps,
        device=device_named(device),
    )
    result.write(run_dir)
    typer.echo(f"suggested lr {result.suggestion:.2g} (steepest fall); the loss is lowest at {result.highest:.2g}")
    typer.echo(f"wrote {run_dir / 'lr-range.png'}")
