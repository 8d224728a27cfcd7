"""The text report of a run, with the diagnosis of its curves."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import torch

from hpsearch.objectives.training.config import FIELDS, TrainConfig, format_type
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.tree import tensors
from hpsearch.objectives.training.evaluation.metrics import compute_majority_share

if TYPE_CHECKING:
    from hpsearch.objectives.objective import Objective
    from hpsearch.objectives.training.loop.run import Run
    from hpsearch.objectives.training.result import FitResult


_LOSS_TOLERANCE = 0.01  # relative; two independent losses differ by more
_VANISHED_NORM = 1e-7  # of a layer's gradient
_MIN_STEPS = 8  # evenly spaced records that represent a run
_EXPLODED_FACTOR = 100  # relative to the first quarter of the run, because a summed loss always has large gradients


def _describe_leakage(run: Run, result: FitResult) -> list[str]:
    """List signs of leakage: inputs in both splits, or a validation loss that equals the training loss."""
    if run.plan.refit is not None:
        return ["A refit trains on the validation samples too; their metrics check the model but estimate nothing."]
    found = []
    shared = count_shared_inputs(run.splits.train, run.splits.val)
    if shared:
        found.append(
            f"- {shared} of {len(run.splits.val)} validation inputs are also training inputs, bit for bit: "
            "split by group, or remove the duplicates"
        )
    if is_same_curve(
        [record.metrics["train_loss"] for record in result.history],
        [record.metrics["val_loss"] for record in result.history],
    ):
        found.append(
            f"- the validation loss stayed within {_LOSS_TOLERANCE:.0%} of the training loss from epoch to epoch: "
            "look for duplicates in both splits, or features that contain the target"
        )
    return found or ["None found."]


def is_same_curve(train: Sequence[float], val: Sequence[float]) -> bool:
    """Return whether two falling loss curves are closer than those of different samples would be."""
    if len(train) < 3 or not train[-1] < 0.9 * train[0]:
        return False
    return all(abs(b - a) <= _LOSS_TOLERANCE * abs(a) for a, b in zip(train[1:], val[1:], strict=True))


def count_shared_inputs(train: Dataset, other: Dataset) -> int:
    """Return the number of inputs of `other` that `train` has too; 0 for data that are not in memory."""
    if not train.in_memory:
        return 0
    seen = set(_digests(train))
    return sum(digest in seen for digest in _digests(other))


def _digests(data: Dataset) -> list[bytes]:
    parts = [
        tensor.detach().cpu().contiguous().reshape(len(data), -1).view(torch.uint8).numpy()
        for _, tensor in tensors(data.x)
    ]
    rows = (b"".join(row.tobytes() for row in sample) for sample in zip(*parts, strict=True))
    return [hashlib.blake2b(row, digest_size=16).digest() for row in rows]


def list_instabilities(run: Run, result: FitResult, steps: Sequence[dict[str, Any]]) -> list[str]:
    """List skipped and clipped steps, jumps of the loss, and layers with vanished or exploded gradients."""
    found = []
    if run.guard.skipped_in_all:
        found.append(f"- {run.guard.skipped_in_all} of {run.step} steps overflowed in fp16; skipped, loss scale halved")
    # Each of the first steps has a record: evenly spaced ones represent the run, if there are enough of them.
    even = [record for record in steps if record["step"] % (run.config.log_every or 1) == 0]
    steps, limit = even if len(even) >= _MIN_STEPS else steps, run.config.clip_grad_norm
    norms = [record["grad_norm"] for record in steps if record.get("grad_norm") is not None]
    over = sum(norm > limit for norm in norms) if limit else 0
    if over and limit:
        found.append(f"- {over} of {len(norms)} recorded steps had a gradient norm above {limit:g} and were clipped")
    losses = [record.metrics["train_loss"] for record in result.history]
    found += [
        f"- the training loss rose from {losses[epoch - 1]:.4g} to {losses[epoch]:.4g} in epoch {epoch + 1}: "
        "lower the learning rate or lengthen the warm-up"
        for epoch in range(1, len(losses))
        if losses[epoch] > 1.5 * losses[epoch - 1] + 1e-3
    ]
    for layer, norms in _collect_norms(steps).items():
        name, quarter, whole = layer or "the model", max(len(norms) // 4, 1), statistics.median(norms)
        first, last = statistics.median(norms[:quarter]), statistics.median(norms[-quarter:])
        if whole < _VANISHED_NORM:
            found.append(f"- the gradient of `{name}` vanished: its median norm is {whole:.2g}")
        elif last > _EXPLODED_FACTOR * first or math.isinf(last):
            found.append(f"- the gradient of `{name}` exploded: its median norm went from {first:.2g} to {last:.2g}")
    return found


def _collect_norms(steps: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    norms: dict[str, list[float]] = {}
    for record in steps:
        for layer, norm in record.get("layers", {}).items():
            norms.setdefault(layer, []).append(math.inf if norm is None else norm)
    return norms


def write_report(
    path: Path, steps: Sequence[dict[str, Any]], *, run: Run, result: FitResult, objective: Objective
) -> None:
    """Write `report.md` for a run that has ended, whose `StepLog` recorded `steps`."""
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
        "Possible leakage": _describe_leakage(run, result),
        "Instabilities": [
            *instabilities,
            *format_image(path, "gradients.png", "Gradient norm of each layer by step"),
        ],
        "Checkpoints": _list_checkpoints(result),
        "Defaults": defaults,  # last, because MLflow does not fold details
    }
    write_sections(path, sections)


def write_sections(path: Path, sections: Mapping[str, Sequence[str]]) -> None:
    """Write lines under headings; the first heading is the title."""
    parts = [
        f"{'#' if number == 0 else '##'} {title}\n\n" + "\n".join(lines)
        for number, (title, lines) in enumerate(sections.items())
    ]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def format_image(report: Path, name: str, description: str) -> list[str]:
    """Return the lines that embed a plot next to the report; empty if the plot does not exist."""
    return ["", f"![{description}]({name})"] if (report.parent / name).exists() else []


def _summarize(run: Run, result: FitResult) -> list[str]:
    lines = [
        f"- best epoch {result.best_epoch + 1} of {len(result.history)} trained, {run.plan.epochs} planned",
        f"- seed {run.plan.seed}, split seed {run.plan.split_seed}, split {result.split_hash[:12]}",
        f"- {run.step} optimizer steps of {run.config.batch_size * run.config.gradient_accumulation_steps} samples "
        f"on {run.device}",
    ]
    if result.memory is not None:
        lines.append(f"- peak device memory {result.memory / 2**20:.0f} MiB")
    if result.resume_note:
        lines.append(f"- {result.resume_note}")
    return lines


def _list_configuration(run: Run, objective: Objective) -> tuple[list[str], list[str]]:
    """Return a table of the settings that differ from the defaults, and the folded defaults."""
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
    fold = f"<details><summary>{len(defaults)} settings have their defaults</summary>"
    return table, [fold, "", "| setting | value |", "|---|---|", *defaults, "", "</details>"]


def format_value(value: object) -> str:
    """Return a value as JSON that is valid between backticks in a table."""
    return json.dumps(value).replace("|", "\\|").replace("`", "'")


def _describe_smoke_test(folder: Path) -> list[str]:
    try:
        smoke = json.loads((folder / "smoke.json").read_text())
        first, last, passed = smoke["losses"][0], smoke["losses"][-1], smoke["passed"]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return ["Not run; `hpsearch smoke` overfits one batch."]
    verdict = "passed" if passed else "FAILED: find the cause before you use this model"
    return [f"One batch of {smoke['samples']} samples: loss {first:.4g} -> {last:.4g}, {verdict}."]


def _compare_splits(run: Run, result: FitResult, objective: Objective) -> list[str]:
    """Compare both splits with the best weights in evaluation mode."""
    train, val = result.train_scores or {}, result.best_metrics
    lines = ["| | train | validation | gap |", "|---|---|---|---|"]
    for name, value in train.items():
        other = val[f"val_{name}"]
        lines.append(f"| {name} | {value:.6g} | {other:.6g} | {other - value:+.4g} |")
    if "val_accuracy" in result.best_metrics and (share := compute_majority_share(run.splits.train)) is not None:
        lines.append(f"| (largest class) | {share:.6g} | {compute_majority_share(run.splits.val):.6g} | |")
    better = 1 if objective.direction == "maximize" else -1
    gap = better * (train[objective.metric] - val[f"val_{objective.metric}"])
    losses = [record.metrics["val_loss"] for record in result.history]
    rise = losses[-1] - min(losses)
    limit = 0.05 if objective.direction == "maximize" else 0.2 * abs(train[objective.metric])
    verdict = "Overfit" if gap > limit else "No large gap"
    lines += ["", f"{verdict}: training is {gap:+.4g} better in {objective.metric}."]
    if rise > 0.1 * abs(losses[-1]):
        lines.append(f"The validation loss ended {rise:.4g} above its minimum; the later epochs overfitted.")
    if rise == 0.0 and len(losses) == run.plan.epochs > 1 and _is_falling(losses):
        lines.append("The validation loss was still falling at the end; more epochs may improve it (underfit).")
    return lines


def _is_falling(losses: list[float]) -> bool:
    """Return whether the last fifth of the run still lowered the validation loss by a quarter of its even share."""
    tail = max(len(losses) // 5, 1)
    return losses[-1 - tail] - losses[-1] > 0.25 * tail / (len(losses) - 1) * (losses[0] - losses[-1])


def _list_checkpoints(result: FitResult) -> list[str]:
    named = (("best, for promotion", result.best_path), ("last, for resuming", result.last_path))
    return [f"- {name}: `{path}`" for name, path in named if path] or ["Stored by the session, not in this folder."]


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
