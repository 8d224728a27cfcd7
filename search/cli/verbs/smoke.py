"""``hpsearch smoke``: can the model fit one batch at all?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpsearch.search.cli.assignments import Device, Objective_, RunSeed, Set, configured

_LINES = 20  # of the curve that is printed


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(smoke)


def smoke(
    objective: Objective_,
    *,
    settings: Set = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="In the batch.")] = 32,
    steps: Annotated[int, typer.Option("--steps", min=25, help="To take at most, with each rate tried.")] = 1000,
    seed: RunSeed = 0,
    device: Device = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Folder for smoke.json and smoke.png  [default: none]")
    ] = None,
) -> int:
    """Overfit one batch: a model that cannot bring its loss near zero has a fault. Exit code 1 when it does not."""
    import dataclasses

    from hpsearch.objectives.fit import model_objective
    from hpsearch.objectives.loading import load_objective
    from hpsearch.objectives.training.checks.smoke import smoke as overfit
    from hpsearch.objectives.training.trainer import device_named

    found = model_objective(load_objective(objective), "smoke")
    config = configured(found, settings)
    result = overfit(found, config, seed=seed, samples=samples, steps=steps, device=device_named(device))
    last = len(result.losses) - 1
    for number in sorted({*range(0, last, max(last // _LINES, 1)), last}):
        typer.echo(f"step {number:5}  loss {result.losses[number]:.6g}")
    if run_dir is not None:
        result.write(run_dir)
    told = dataclasses.asdict(result)
    if result.passed:
        typer.echo("passed: {samples} samples fitted to below {target:.4g} at learning rate {lr:g}".format(**told))
        return 0
    typer.echo(f"hpsearch: failed: {result.reason}", err=True)
    return 1
