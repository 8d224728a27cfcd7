"""The report of a run: what was trained and why so, what came out, and what looks wrong about it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpsearch.objectives.training.evaluation.metrics import largest_class
from hpsearch.objectives.training.reports.diagnosis import instabilities, leakage

if TYPE_CHECKING:
    from hpsearch.objectives.objective import Objective
    from hpsearch.objectives.training.loop.run import Run
    from hpsearch.objectives.training.result import FitResult


def write_report(
    path: Path, steps: Sequence[dict[str, Any]], *, run: Run, result: FitResult, objective: Objective
) -> None:
    """Writes `report.md` for a run that has ended.

    Args:
        path: the file to write; plots, checkpoints and the smoke test's result are looked for beside it.
        steps: the records of the run's `StepLog`.
        run: with its best weights in place.
        result: what it came to.
        objective: what was trained.
    """
    unstable = instabilities(run, result, steps) or ["None seen."]
    chosen, defaults = _configuration(run, objective)
    sections = {
        f"{objective.name}: {result.status}, best {objective.metric} {result.best_value:.6g}": _summary(run, result),
        "Configuration, and why": chosen,
        "Smoke test": _smoke(path.parent),
        "Train against validation": [
            *_gap(run, result, objective),
            *image(path, "curves.png", "Curves over the epochs"),
        ],
        "Possible leakage": _leakage(run, result),
        "Instabilities, and what was done": [
            *unstable,
            *image(path, "gradients.png", "Norm of the gradient in each layer, step by step"),
        ],
        "Checkpoints": _checkpoints(result),
        "Defaults": defaults,  # last, for MLflow's view folds nothing
    }
    write_sections(path, sections)


def write_sections(path: Path, sections: Mapping[str, Sequence[str]]) -> None:
    """Writes lines under headings, the first of which is the page's."""
    parts = [
        f"{'#' if number == 0 else '##'} {title}\n\n" + "\n".join(lines)
        for number, (title, lines) in enumerate(sections.items())
    ]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def image(report: Path, name: str, words: str) -> list[str]:
    """The lines that show a plot beside the report; none where it was not drawn."""
    return ["", f"![{words}]({name})"] if (report.parent / name).exists() else []


def _leakage(run: Run, result: FitResult) -> list[str]:
    if run.refit is not None:
        return [
            "A refit is trained on the validation samples too: their numbers check the model, and estimate nothing."
        ]
    return leakage(run, result) or ["None seen."]


def _summary(run: Run, result: FitResult) -> list[str]:
    lines = [
        f"- best epoch {result.best_epoch + 1} of {len(result.history)} trained, {run.epochs} planned",
        f"- seed {run.seed}, split seed {run.identity['split_seed']}, split {result.split_hash[:12]}",
        f"- {run.step} optimizer steps of {run.config.batch_size * run.config.accumulate} samples on {run.device}",
    ]
    if result.memory is not None:
        lines.append(f"- peak device memory {result.memory / 2**20:.0f} MiB")
    if result.resume_note:
        lines.append(f"- {result.resume_note}")
    return lines


def _configuration(run: Run, objective: Objective) -> tuple[list[str], list[str]]:
    """What differs from the defaults, and these, folded."""
    default = objective.default_config()
    chosen, defaults = [], []
    for item in dataclasses.fields(run.config):
        value, usual = getattr(run.config, item.name), getattr(default, item.name)
        plain = item.default if item.default is not dataclasses.MISSING else {}
        row = f"| `{item.name}` | `{code(value)}` |"
        if value != usual:
            chosen.append(f"{row} set for this run; the objective's default is `{code(usual)}` |")
        elif value != plain:
            chosen.append(f"{row} the objective's default |")
        else:
            defaults.append(row)
    table = ["| setting | value | why |", "|---|---|---|", *chosen] if chosen else ["All settings are the defaults."]
    fold = f"<details><summary>{len(defaults)} settings have their defaults</summary>"
    return table, [fold, "", "| setting | value |", "|---|---|", *defaults, "", "</details>"]


def code(value: object) -> str:
    """A value as it stands between backticks in a table."""
    return json.dumps(value).replace("|", "\\|").replace("`", "'")


def _smoke(folder: Path) -> list[str]:
    try:
        smoke = json.loads((folder / "smoke.json").read_text())
        first, last, passed = smoke["losses"][0], smoke["losses"][-1], smoke["passed"]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return ["Not run here; `hpsearch smoke` overfits one batch."]
    verdict = "passed" if passed else "FAILED: do not trust this model before you know why"
    return [f"One batch of {smoke['samples']} samples: loss {first:.4g} -> {last:.4g}, {verdict}."]


def _gap(run: Run, result: FitResult, objective: Objective) -> list[str]:
    """Both splits judged alike, by the best weights in evaluation mode: losses while training are of other weights."""
    train, val = result.train_scores or {}, result.best_metrics
    lines = ["| | train | validation | gap |", "|---|---|---|---|"]
    for name, value in train.items():
        other = val[f"val_{name}"]
        lines.append(f"| {name} | {value:.6g} | {other:.6g} | {other - value:+.4g} |")
    if "val_accuracy" in result.best_metrics and (share := largest_class(run.splits.train)) is not None:
        lines.append(f"| (largest class) | {share:.6g} | {largest_class(run.splits.val):.6g} | |")
    better = 1 if objective.direction == "maximize" else -1
    gap = better * (train[objective.metric] - val[f"val_{objective.metric}"])
    last = result.history[-1].metrics
    risen = last["val_loss"] - min(record.metrics["val_loss"] for record in result.history)
    verdict = "Overfit" if gap > _share(train, objective) else "No wide gap"
    lines += ["", f"{verdict}: train is {gap:+.4g} ahead in {objective.metric}."]
    if risen > 0.1 * abs(last["val_loss"]):
        lines.append(f"The validation loss ended {risen:.4g} above its lowest: later epochs overfitted.")
    if risen == 0.0 and len(result.history) == run.epochs > 1 and _falling(result):
        lines.append("The validation loss was still falling at the end: more epochs may do better (underfit).")
    return lines


def _falling(result: FitResult) -> bool:
    """Whether the last fifth of the run lowered the validation loss by at least a quarter of its even share.

    A loss that has come to rest falls by less and less.
    """
    losses = [record.metrics["val_loss"] for record in result.history]
    tail = max(len(losses) // 5, 1)
    return losses[-1 - tail] - losses[-1] > 0.25 * tail / (len(losses) - 1) * (losses[0] - losses[-1])


def _share(train: dict[str, float], objective: Objective) -> float:
    """What makes a gap wide: five points of a score, or a fifth of an error."""
    return 0.05 if objective.direction == "maximize" else 0.2 * abs(train[objective.metric])


def _checkpoints(result: FitResult) -> list[str]:
    named = (("best, for promotion", result.best_path), ("last, for resuming", result.last_path))
    return [f"- {name}: `{path}`" for name, path in named if path] or ["Kept by the session, not in this folder."]
