"""Commands that need an objective but no study: create, show, train and check the objective."""

from __future__ import annotations

import json
import logging
import shlex
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpsearch.search.cli.app import OBJECTIVES_SECTION, add_group, echo, register
from hpsearch.search.console import EscapingFormatter, format_command
from hpsearch.search.process import EXIT_INTERRUPTED
from hpsearch.search.spec.spec import OBJECTIVE_HELP

if TYPE_CHECKING:
    from hpsearch.objectives.base_objective import BaseObjective
    from hpsearch.objectives.training.reports.report import Setting
    from hpsearch.objectives.training.result import RunResult


@register(OBJECTIVES_SECTION)
def init(path: Annotated[Path, typer.Argument(metavar="FILE.py", help="Path of the new file")]) -> None:
    """Write a small working objective as a template."""
    from hpsearch.objectives.template import write_template

    write_template(path)
    echo(f"wrote {path}; run it with: {format_command('run', str(path))}")


ObjectiveArgument = Annotated[str, typer.Argument(metavar="OBJECTIVE", help=OBJECTIVE_HELP)]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Training setting, such as lr=1e-3 or model.width=64; repeatable; 'objective show' lists all settings",
    ),
]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:N  [default: cuda if available]")]
RunSeed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the data split, initial weights and data order")]


def make_config(objective: BaseObjective, pairs: list[str] | None) -> Any:
    """Return the objective's default configuration, overridden by ``KEY=VALUE`` settings.

    Raises:
        SearchError: a setting is not KEY=VALUE, or is missing in the default configuration.
        ObjectiveError: a setting is unknown or its value is invalid.
    """
    from hpsearch.objectives.custom_loop.loop_objective import LoopObjective, config_from_json, config_to_json
    from hpsearch.objectives.errors import ObjectiveError
    from hpsearch.objectives.training.config import TrainConfig
    from hpsearch.search.errors import SearchError, as_search_error
    from hpsearch.search.spec.resolve import parse_options

    given = {key: _to_number(value) for key, value in parse_options("--set", pairs or [], example="lr=1e-3").items()}
    if isinstance(objective, LoopObjective):
        own = dict(config_to_json(objective.default_config(), f"{type(objective).__name__}.suggest"))
        for key, value in given.items():
            if isinstance(own.get(key), float | int) and isinstance(value, str):
                raise SearchError(f"--set {key}: {key} must be a number, not {value!r}")
            _replace(own, key, value, f"--set {key}: objective {objective.name}")
        return config_from_json(objective, own)
    values = objective.default_config().to_dict()
    for key, value in given.items():
        if key.startswith("model."):
            _replace(values["model"], key.removeprefix("model."), value, f"--set {key}: the model of {objective.name}")
        else:
            values[key] = value
    with as_search_error("--set: " if given else "", ObjectiveError):
        return TrainConfig(**values)


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
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


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


def _replace(values: dict[str, Any], name: str, value: Any, owner: str) -> None:
    """Replace the value of an existing key.

    Raises:
        SearchError: `values` has no key `name`.
    """
    from hpsearch.search.errors import SearchError, suggest_names

    if name not in values:
        hint = suggest_names(name, values) if values else "; the default configuration has no settings"
        raise SearchError(f"{owner} has no setting {name!r}{hint}")
    values[name] = value


def _to_number(value: Any) -> Any:
    """Return a value with texts such as ``1e-3`` converted to numbers, because YAML reads them as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


@register(OBJECTIVES_SECTION)
def train(
    objective: ObjectiveArgument,
    *,
    settings: SetOption = None,
    epochs: Annotated[int | None, typer.Option("--epochs", min=1, help="Epochs  [default: the objective's]")] = None,
    seed: RunSeed = 0,
    device: Device = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="Folder of the run; an existing run is resumed  [default: runs/NAME-TIME]"),
    ] = None,
    test: Annotated[bool, typer.Option("--test", help="Evaluate the best weights on the test split")] = False,
    keep: Annotated[int, typer.Option("--keep", min=1, help="Number of latest checkpoints to keep")] = 2,
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
    from hpsearch.objectives.fit import fit, require_model_objective
    from hpsearch.objectives.objective import Objective
    from hpsearch.objectives.training.checks.data_leaks import find_data_leaks
    from hpsearch.objectives.training.config import RunPlan
    from hpsearch.objectives.training.loop.guards import DeviceMemoryError, NonFiniteError
    from hpsearch.objectives.training.loop.prepare import prepare_splits
    from hpsearch.objectives.training.loop.profiling import NO_INSTRUMENTS, Instruments
    from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
    from hpsearch.objectives.training.session import LocalSession, Verdict
    from hpsearch.objectives.training.trainer import resolve_device
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
    folder = run_dir or Path("runs") / f"{found.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    _make_run_dir(folder)
    absolute = folder.absolute()  # the objective may change the working folder
    session = PrintingSession(absolute, keep=keep, interval=60 * save_every, snapshot_every=snapshot_every)
    try:
        with _print_warnings():
            result = fit(found, config, plan, session=session, device=device, instruments=instruments)
    except (NonFiniteError, DeviceMemoryError) as error:
        echo(f"hpsearch: {error}", err=True)
        return 1
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

    from hpsearch.objectives.fit import require_model_objective
    from hpsearch.objectives.training.checks.smoke import run_smoke_test
    from hpsearch.objectives.training.trainer import resolve_device
    from hpsearch.search.cli.probe import load_probed_objective

    found = require_model_objective(load_probed_objective(objective), "smoke")
    config = make_config(found, settings)
    if run_dir is not None:
        _make_run_dir(run_dir, "smoke.json", "smoke.png")
        run_dir = run_dir.absolute()  # the objective may change the working folder
    result = run_smoke_test(found, config, seed=seed, samples=samples, steps=steps, device=resolve_device(device))
    last = len(result.losses) - 1
    for number in sorted({*range(0, last, max(last // _MAX_LOSS_LINES, 1)), last}):
        echo(f"step {number:5}  loss {result.losses[number]:.6g}")
    if run_dir is not None:
        with _name_run_dir(run_dir):
            result.write(run_dir)
    details = dataclasses.asdict(result)
    if result.passed:
        echo("smoke test passed: the loss of {samples} samples is below {target:.4g} at lr {lr:g}".format(**details))
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
    steps: Annotated[int, typer.Option("--steps", help="Number of steps with increasing learning rate")] = 200,
    seed: RunSeed = 0,
    device: Device = None,
    run_dir: Annotated[Path, typer.Option("--run-dir", help="Folder for lr-range.json and lr-range.png")] = Path(),
) -> None:
    """Suggest a learning rate by a learning-rate range test.

    The command trains with an increasing learning rate until the loss diverges, and writes a plot.
    """
    from hpsearch.objectives.fit import require_model_objective
    from hpsearch.objectives.training.checks.lr_range import run_lr_range_test
    from hpsearch.objectives.training.trainer import resolve_device
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


_objective = add_group("objective", OBJECTIVES_SECTION, "Show the settings and search space of an objective.")


@_objective.command()
def show(objective: ObjectiveArgument, settings: SetOption = None) -> None:
    """Show the settings and search space of an objective."""
    from hpsearch.objectives.custom_loop.loop_objective import LoopObjective
    from hpsearch.objectives.training.reports import report
    from hpsearch.search.cli.probe import load_probed_objective
    from hpsearch.search.console import PlainConsole
    from hpsearch.search.study.create import sample_search_space

    found = load_probed_objective(objective)
    config = make_config(found, settings)
    space = {name: _format_range(values) for name, values in sample_search_space(found)[0].items()}
    console = PlainConsole()
    console.print(f"{found.name}: {found.direction} {found.metric}, {found.epochs} epochs, {found.n_trials} trials")
    if found.directions:
        console.print("directions: " + ", ".join(f"{better} {name}" for name, better in found.directions.items()))
    if found.constraints:
        console.print("constraints: " + ", ".join(f"{name} {bound}" for name, bound in found.constraints.items()))
    if isinstance(found, LoopObjective):
        own = report.list_custom_settings(config)
        # If a parameter has another name than its setting, it is unknown which settings are searched.
        fixed = "the same in every trial" if space.keys() <= {item.name for item in own} else ""
        searched = {name: f"searched: {values}" for name, values in space.items()}
        rows = [(_format_setting(item), _join(item.help, searched.get(item.name, fixed))) for item in own]
        space = {name: values for name, values in space.items() if name not in {item.name for item in own}}
    else:
        rows = [row for item in report.list_settings(config) for row in _rows(item)]
    for title, block in (("settings", rows), ("search space", list(space.items()))):
        if block:
            console.print(f"\n{title}", style="bold")
            for line in format_list(block, console.width):
                console.print(line)


def _format_range(values: Any) -> str:
    """Return an Optuna distribution as text: `0.001 to 0.1 on a log scale`."""
    if hasattr(values, "choices"):
        return "one of " + ", ".join(map(str, values.choices))
    is_stepped = values.step is not None and not (values.step == 1 and isinstance(values.step, int))
    extra = " on a log scale" if values.log else f" in steps of {values.step:g}" if is_stepped else ""
    return f"{values.low:g} to {values.high:g}{extra}"


def _rows(item: Setting) -> list[tuple[str, str]]:
    """Return the lines of a setting as (name, text): one line, or one per entry of a dictionary, named as for --set."""
    if isinstance(item.value, dict) and item.value:
        text = "setting of the objective's model"
        return [(f"{item.name}.{name} = {json.dumps(value)}", text) for name, value in item.value.items()]
    kind = f" ({item.type.replace(' | ', ' or ')})" if " | " in item.type else ""  # otherwise the value shows the type
    return [(_format_setting(item), f"{item.help}{kind}")]


def _format_setting(item: Setting) -> str:
    return f"{item.name} = {json.dumps(item.value)}"


def _join(*texts: str) -> str:
    return "; ".join(text for text in texts if text)


_MAX_WIDTH = 120  # longer lines are hard to read
_MIN_TEXT_WIDTH = 36  # for a text next to the name
_MAX_NAME_WIDTH = 34
_INDENT = "    "


def format_list(rows: Iterable[tuple[str, str]], columns: int) -> Iterator[str]:
    """Yield the lines of a list of (name, text). A text is next to its name, or below the name in a narrow terminal."""
    columns = min(columns, _MAX_WIDTH)
    found = list(rows)
    left = min(max((len(name) for name, _ in found), default=0), _MAX_NAME_WIDTH) + 2
    for name, text in found:
        if columns - left >= _MIN_TEXT_WIDTH and len(name) + 2 <= left:
            yield from _wrap(f"{name:{left}}{text}", columns, " " * left)
        else:
            yield from _wrap(name, columns, _INDENT)
            yield from _wrap(_INDENT + text, columns, _INDENT) if text else ()


def _wrap(text: str, columns: int, indent: str) -> list[str]:
    return textwrap.wrap(text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
