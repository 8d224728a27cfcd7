"""The text report of a run, with the diagnosis of its curves."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from hpsearch.objectives.training.config import FIELDS, TrainConfig, format_type
from hpsearch.objectives.training.evaluation.metrics import compute_majority_share
from hpsearch.objectives.training.reports.findings import describe_leakage, is_falling, list_instabilities

if TYPE_CHECKING:
    from hpsearch.objectives.objective import Objective
    from hpsearch.objectives.training.loop.run import Run
    from hpsearch.objectives.training.result import FitResult


def write_report(path: Path, steps: list[dict[str, Any]], *, run: Run, result: FitResult, objective: Objective) -> None:
    """Write `report.md` for a run that has ended; `steps` are the records of its `StepLog`."""
    instabilities = list_instabilities(run, result, steps) or ["None found."]
    changed, defaults = _list_configuration(run, objective)
    sections = {
        f"{objective.name}: {result.status}, best {objective.metric} {result.best_value:.6g}": _summarize(run, result),
        "Configuration": changed,
        "Smoke test": _describe_smoke_test(path.parent),
        "Training and validation": [
            *_compare_splits(run, result, objective),
            *format_image(path, "curves.png", "Learning curves"),
        ],
        "Possible leakage": describe_leakage(run, result),
        "Instabilities": [*instabilities, *format_image(path, "gradients.png", "Gradient norm of each layer by step")],
        "Checkpoints": _list_checkpoints(result),
        "Defaults": defaults,  # at the end, because MLflow does not fold this section
    }
    write_sections(path, sections)


def write_sections(path: Path, sections: Mapping[str, Sequence[str]]) -> None:
    """Write a Markdown file of sections, which are lines by heading; the first heading is the title."""
    parts = [
        f"{'#' if number == 0 else '##'} {title}\n\n" + "\n".join(lines)
        for number, (title, lines) in enumerate(sections.items())
    ]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def format_image(report: Path, name: str, description: str) -> list[str]:
    """Return the lines that embed a plot next to the report; empty if the plot does not exist."""
    return ["", f"![{description}]({name})"] if (report.parent / name).exists() else []


def _summarize(run: Run, result: FitResult) -> list[str]:
    samples = min(run.config.batch_size * run.config.gradient_accumulation_steps, len(run.splits.train))
    lines = [
        f"- best epoch {result.best_epoch + 1} of {len(result.history)} trained, {run.plan.epochs} planned",
        f"- seed {run.plan.seed}, split seed {run.plan.split_seed}, split {result.split_hash[:12]}",
        f"- {run.step} optimizer steps of {samples} samples on {run.device}",
    ]
    if result.memory is not None:
        lines.append(f"- peak device memory {result.memory / 2**20:.0f} MiB")
    if result.resume_note:
        lines.append(f"- {result.resume_note}")
    return lines


def _list_configuration(run: Run, objective: Objective) -> tuple[list[str], list[str]]:
    """Return a table of the settings that differ from the defaults, and a folded table of the other settings."""
    default = objective.default_config()
    changed, defaults = [], []
    for item in dataclasses.fields(run.config):
        value, usual = getattr(run.config, item.name), getattr(default, item.name)
        plain = item.default if item.default is not dataclasses.MISSING else {}
        row = f"| `{item.name}` | `{format_value(value)}` |"
        if value != usual:
            changed.append(f"{row} set for this run; objective default `{format_value(usual)}` |")
        elif value != plain:
            changed.append(f"{row} objective default |")
        else:
            defaults.append(row)
    table = ["| setting | value | source |", "|---|---|---|", *changed] if changed else ["All settings are defaults."]
    fold = f"<details><summary>{len(defaults)} settings have default values</summary>"
    return table, [fold, "", "| setting | value |", "|---|---|", *defaults, "", "</details>"]


def format_value(value: object) -> str:
    """Return a value as JSON that is valid between backticks in a table."""
    return json.dumps(value).replace("|", "\\|").replace("`", "'")


def _describe_smoke_test(folder: Path) -> list[str]:
    try:
        smoke = json.loads((folder / "smoke.json").read_text())
        first, last, passed = smoke["losses"][0], smoke["losses"][-1], smoke["passed"]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return ["Not run in this folder. The smoke test of `hpsearch run` is in the report of the study."]
    verdict = "passed" if passed else "FAILED: find the cause before you use this model"
    return [f"One batch of {smoke['samples']} samples: loss {first:.4g} -> {last:.4g}, {verdict}."]


def _compare_splits(run: Run, result: FitResult, objective: Objective) -> list[str]:
    """Compare the training and validation metrics of the best weights, in evaluation mode."""
    train, val = result.train_scores or {}, result.best_metrics
    lines = ["| | train | validation | gap |", "|---|---|---|---|"]
    for name, value in train.items():
        other = val[f"val_{name}"]
        lines.append(f"| {name} | {value:.6g} | {other:.6g} | {other - value:+.4g} |")
    if "val_accuracy" in result.best_metrics and (share := compute_majority_share(run.splits.train)) is not None:
        lines.append(f"| share of the largest class | {share:.6g} | {compute_majority_share(run.splits.val):.6g} | |")
    # Metrics of `Objective.evaluate` are not measured on the training split.
    metric, direction = (objective.metric, objective.direction) if objective.metric in train else ("loss", "minimize")
    gap = (1 if direction == "maximize" else -1) * (train[metric] - val[f"val_{metric}"])
    losses = [record.metrics["val_loss"] for record in result.history]
    rise = losses[-1] - min(losses)
    limit = 0.05 if direction == "maximize" else 0.2 * abs(train[metric])
    verdict = "Overfit" if gap > limit else "No large gap"
    lines += [
        "",
        f"{verdict}: {metric} is {abs(gap):.4g} {'worse' if gap < 0 else 'better'} in training than in validation.",
    ]
    if rise > 0.1 * abs(losses[-1]):
        lines.append(f"The validation loss ended {rise:.4g} above its minimum; the later epochs overfitted.")
    if rise == 0.0 and len(losses) == run.plan.epochs > 1 and is_falling(losses):
        lines.append("The validation loss was still falling at the end; more epochs may improve it (underfit).")
    return lines


def _list_checkpoints(result: FitResult) -> list[str]:
    named = (
        ("best, for promotion", result.best_path),
        ("last, for resuming; deleted when a trial is complete", result.last_path),
    )
    return [f"- {name}: `{path}`" for name, path in named if path] or [
        "None in this folder; a trial of a study writes them to the study's checkpoint store."
    ]


class Setting(NamedTuple):
    """Name, type, value and description of a training setting."""

    name: str
    type: str
    value: Any
    help: str


def list_settings(config: TrainConfig) -> list[Setting]:
    """Return all fields of a configuration, in their order, with their descriptions."""
    return [
        Setting(name, format_type(field), getattr(config, name), field.description or "")
        for name, field in FIELDS.items()
    ]


def list_custom_settings(config: Any) -> list[Setting]:
    """Return the settings of a custom loop: of a dictionary, or of a dataclass with `Annotated` descriptions."""
    values = dict(config) if isinstance(config, Mapping) else dataclasses.asdict(config)
    texts = {} if isinstance(config, Mapping) else _get_descriptions(type(config))
    return [Setting(str(name), type(value).__name__, value, texts.get(name, "")) for name, value in values.items()]


def _get_descriptions(cls: type) -> dict[str, str]:
    """Return the descriptions in the annotations of a dataclass: texts, or results of `about`."""
    try:
        hints = get_type_hints(cls, include_extras=True)
    except (NameError, TypeError):  # a name is imported only for type checkers
        return {}
    metadata = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    texts = {name: [getattr(part, "description", part) for part in parts] for name, parts in metadata.items()}
    return {name: "; ".join(text for text in found if isinstance(text, str)) for name, found in texts.items()}
