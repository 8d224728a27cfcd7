"""Train and check an objective without a study: `train`, `smoke` and `lr-range`."""

from __future__ import annotations

import fcntl
import logging
import os
import shlex
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpsearch.changeable_paths import find_changeable_part
from hpsearch.search.cli.app import OBJECTIVES_SECTION, echo, register
from hpsearch.search.cli.objective_settings import Device, ObjectiveArgument, RunSeed, SetOption, make_config
from hpsearch.search.console import EscapingFormatter
from hpsearch.search.process.exits import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from hpsearch.objectives.base_objective import BaseObjective
    from hpsearch.objectives.training.result import RunResult


_RUNS = Path("runs")  # the default folder of run directories, in the working folder


def _make_run_dir(folder: Path, *names: str) -> None:
    """Create the folder of a run before the training, whose result would be lost otherwise.

    The files with these names must not be links, through which the command would change other files.
    """
    from hpsearch.search.errors import SearchError

    with _name_run_dir(folder):
        for name in names:
            if (folder / name).is_symlink():
                raise SearchError(
                    f"--run-dir {str(folder)!r} contains the link {name!r}; remove it, or give another folder"
                )
        missing = [part for part in (folder, *folder.parents) if not os.path.lexists(part)]
        if (found := missing[-1].parent if missing else folder).is_dir():
            _check_unchangeable(found)
        for part in reversed(missing):
            part.mkdir(mode=0o755, exist_ok=True)
        folder.mkdir(exist_ok=True)  # an error if it is no folder
        _check_unchangeable(folder)
        tempfile.TemporaryFile(dir=folder).close()


def _check_unchangeable(folder: Path) -> None:
    """Reject a folder in which other users could replace files by links while the command runs."""
    from hpsearch.search.errors import SearchError

    if (part := find_changeable_part(folder.absolute(), as_folder=True)) is not None:
        raise SearchError(
            f"other users can change or replace {str(part)!r}; give a folder that only you can change with --run-dir"
        )


@contextmanager
def _name_run_dir(folder: Path) -> Iterator[None]:
    """Raise a SearchError with the option if a file in the folder cannot be written."""
    from hpsearch.search.errors import SearchError

    try:
        yield
    except OSError as error:
        raise SearchError(
            f"--run-dir {str(folder)!r} cannot be written ({error.strerror}); give a folder that you may write to"
        ) from None


@register(OBJECTIVES_SECTION)
def train(
    objective: ObjectiveArgument,
    *,
    settings: SetOption = None,
    epochs: Annotated[
        int | None, typer.Option("--epochs", min=1, max=1_000_000, help="Epochs  [default: the objective's]")
    ] = None,
    seed: RunSeed = 0,
    device: Device = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="Folder of the run; an existing run is resumed  [default: runs/NAME-TIME]"),
    ] = None,
    test: Annotated[bool, typer.Option("--test", help="Evaluate the best weights on the test split")] = False,
    keep: Annotated[int, typer.Option("--keep", min=1, max=1000, help="Number of latest checkpoints to keep")] = 2,
    save_every: Annotated[
        float, typer.Option("--save-every", min=0, help="Minutes between checkpoints; 0 saves one after each epoch")
    ] = 0.0,
    snapshot_every: Annotated[
        int | None,
        typer.Option("--snapshot-every", min=1, help="Epochs between additional checkpoints that are never removed"),
    ] = None,
    profile: Annotated[int, typer.Option("--profile", min=0, help="Number of steps of the first epoch to profile")] = 0,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write event files for TensorBoard")] = False,
) -> int:
    """Train one configuration without a study and write a report.

    An interrupted run resumes from --run-dir.
    """
    from hpsearch.objectives.errors import ObjectiveError, wrap_training_errors
    from hpsearch.objectives.fit import fit, require_model_objective
    from hpsearch.objectives.objective import Objective
    from hpsearch.objectives.training.base_trainer import resolve_device
    from hpsearch.objectives.training.checks.data_leaks import find_data_leaks
    from hpsearch.objectives.training.config import RunPlan
    from hpsearch.objectives.training.loop.guards import DeviceMemoryError, NonFiniteError
    from hpsearch.objectives.training.loop.prepare import prepare_splits
    from hpsearch.objectives.training.loop.profiling import NO_INSTRUMENTS, Instruments
    from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
    from hpsearch.objectives.training.session import LocalSession, Verdict
    from hpsearch.search.cli.probe import load_probed_objective

    class PrintingSession(LocalSession):
        def report(self, record: EpochRecord) -> Verdict:
            echo(_format_epoch(record.epoch, record.metrics, found.metric))
            return super().report(record)

    found = load_probed_objective(objective)
    found.set_reported_metrics([*found.directions, *found.constraints])
    config = make_config(found, settings)
    plan, instruments = RunPlan(epochs or found.epochs, seed, seed), NO_INSTRUMENTS
    if isinstance(found, Objective):  # a custom training loop has its own data
        with _print_warnings():
            leaks = find_data_leaks(found, *prepare_splits(found, plan.split_seed))
        for leak in leaks.values():
            echo(f"warning: {leak}", err=True)
    for option, is_given in (("--profile", profile), ("--tensorboard", tensorboard), ("--test", test)):
        if is_given:
            require_model_objective(found, option)
    resolve_device(device)
    if profile or tensorboard:
        instruments = Instruments(profile_steps=profile, tensorboard=tensorboard)
    folder = run_dir or _RUNS / f"{found.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    is_new = not os.path.lexists(folder)  # False if the path may not be read
    _make_run_dir(folder)
    absolute = folder.absolute()  # the objective may change the working folder
    try:
        with _lock_run_dir(folder), _print_warnings():
            session = PrintingSession(absolute, keep=keep, interval=60 * save_every, snapshot_every=snapshot_every)
            with wrap_training_errors(f"{type(found).__name__} in training", includes_torch=False):
                result = fit(found, config, plan, session=session, device=device, instruments=instruments)
    except (NonFiniteError, DeviceMemoryError) as error:
        echo(f"hpsearch: {error}", err=True)
        return 1
    except ObjectiveError:
        if is_new and not (absolute / "config.yaml").exists():  # rejected before the training
            (absolute / "train.log").unlink(missing_ok=True)
            with suppress(OSError):  # it contains files of the objective
                absolute.rmdir()
        raise
    except KeyboardInterrupt:
        echo(
            f"hpsearch: training stopped; repeat the command with --run-dir {shlex.quote(str(folder))} to resume it",
            err=True,
        )
        return EXIT_INTERRUPTED
    report = absolute / "report.md"
    files = f"report: {folder / report.name}" if report.exists() else f"files: {folder}"
    _print_result(found, result, files, test=test)
    return 0


@contextmanager
def _lock_run_dir(folder: Path) -> Iterator[None]:
    """Reject a folder in which another command trains: both would write the same files."""
    from hpsearch.search.errors import SearchError

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # the file system has no locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SearchError(
                    f"another command trains in --run-dir {str(folder)!r}; wait for its end, or give another folder"
                ) from None
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _print_warnings() -> Iterator[None]:
    """Print the warnings of a run on the console, because the run logs to a file."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(EscapingFormatter("hpsearch: %(message)s"))
    logger = logging.getLogger("hpsearch.objectives.training")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _format_epoch(epoch: int, metrics: dict[str, float], metric: str) -> str:
    names = ["train_loss", "val_loss", *([f"val_{metric}"] if metric != "loss" else []), "lr"]
    shown = "  ".join(f"{name} {metrics[name]:.5g}" for name in names if name in metrics)
    return f"epoch {epoch + 1:3}  {shown}  {metrics['epoch_seconds']:.2f} s"


def _print_result(objective: BaseObjective, result: RunResult, files: str, *, test: bool) -> None:
    from hpsearch.objectives.fit import restore_model
    from hpsearch.objectives.model_metric_names import get_metric_value
    from hpsearch.objectives.training.reproducibility import checkpoint

    best = f"best {objective.metric} {result.best_value:.6g} at epoch {result.best_epoch + 1}"
    echo(f"{best}; {files}")
    if result.best_metrics and objective.reported:
        echo("  ".join(f"{key} {get_metric_value(result.best_metrics, key):.6g}" for key in objective.reported))
    if result.resume_note:
        echo(result.resume_note)
    if test and result.best_path is not None:
        scores = restore_model(objective, checkpoint.read(result.best_path)).test()
        echo("test " + "  ".join(f"{name} {value:.6g}" for name, value in scores.items()))


_MAX_LOSS_LINES = 20


@register(OBJECTIVES_SECTION)
def smoke(
    objective: ObjectiveArgument,
    *,
    settings: SetOption = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Number of samples in the batch")] = 32,
    steps: Annotated[int, typer.Option("--steps", min=25, help="Maximum number of steps per learning rate")] = 1000,
    seed: RunSeed = 0,
    device: Device = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="Folder to which smoke.json and smoke.png are written  [default: not written]"),
    ] = None,
) -> int:
    """Check that the model can overfit one batch.

    If the loss does not approach zero, the model or the loss has a fault. Warnings state other signs of faults, such as
    layers that are not trained. Exit code 0 if the model overfits the batch, 1 otherwise.
    """
    import dataclasses

    from hpsearch.objectives.errors import ObjectiveError
    from hpsearch.objectives.fit import require_model_objective
    from hpsearch.objectives.training.base_trainer import resolve_device
    from hpsearch.objectives.training.checks.smoke import run_smoke_test
    from hpsearch.search.cli.probe import load_probed_objective

    found = require_model_objective(load_probed_objective(objective), "smoke")
    config = make_config(found, settings)
    is_new_dir = run_dir is not None and not os.path.lexists(run_dir)  # False if the path may not be read
    if run_dir is not None:
        _make_run_dir(run_dir, "smoke.json", "smoke.png")
        run_dir = run_dir.absolute()  # the objective may change the working folder
    try:
        result = run_smoke_test(found, config, seed=seed, samples=samples, steps=steps, device=resolve_device(device))
    except ObjectiveError:
        if is_new_dir and run_dir is not None:
            with suppress(OSError):  # it has files of the objective
                run_dir.rmdir()
        raise
    last = len(result.losses) - 1
    for number in sorted({*range(0, last, max(last // _MAX_LOSS_LINES, 1)), last}):
        echo(f"step {number:5}  loss {result.losses[number]:.6g}")
    if run_dir is not None:
        with _name_run_dir(run_dir):
            result.write(run_dir)
    details = dataclasses.asdict(result)
    if result.passed:
        change = f"fell from {result.losses[0]:.4g} to {result.losses[-1]:.4g}"
        echo("smoke test passed: the loss of {samples} samples {change} at lr {lr:g}".format(change=change, **details))
        for sign in result.signs:
            echo(f"hpsearch: warning: {sign}", err=True)
        return 0
    echo(f"hpsearch: smoke test failed: {result.reason}", err=True)
    return 1


@register(OBJECTIVES_SECTION)
def lr_range(
    objective: ObjectiveArgument,
    *,
    settings: SetOption = None,
    lowest: Annotated[float, typer.Option("--lowest", help="Learning rate of the first step")] = 1e-6,
    highest: Annotated[float, typer.Option("--highest", help="Learning rate of the last step")] = 10.0,
    steps: Annotated[
        int, typer.Option("--steps", max=1_000_000, help="Number of steps with increasing learning rate")
    ] = 200,
    seed: RunSeed = 0,
    device: Device = None,
    run_dir: Annotated[Path, typer.Option("--run-dir", help="Folder for lr-range.json and lr-range.png")] = Path(),
) -> None:
    """Suggest a learning rate by a learning-rate range test.

    The command trains with an increasing learning rate until the loss diverges, and writes a plot.
    """
    from hpsearch.objectives.fit import require_model_objective
    from hpsearch.objectives.training.base_trainer import resolve_device
    from hpsearch.objectives.training.checks.lr_range import run_lr_range_test
    from hpsearch.search.cli.probe import load_probed_objective

    found = require_model_objective(load_probed_objective(objective), "lr-range")
    config = make_config(found, settings)
    _make_run_dir(run_dir, "lr-range.json", "lr-range.png")
    absolute = run_dir.absolute()  # the objective may change the working folder
    result = run_lr_range_test(
        found,
        config,
        seed=seed,
        lowest=lowest,
        highest=highest,
        steps=steps,
        device=resolve_device(device),
    )
    with _name_run_dir(run_dir):
        result.write(absolute)
    echo(
        f"suggested learning rate {result.suggestion:.2g} (the loss falls fastest); lowest loss at {result.highest:.2g}"
    )
    echo(f"wrote {run_dir / 'lr-range.png'}")
