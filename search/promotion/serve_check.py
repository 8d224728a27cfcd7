"""Check that a registered model reproduces the validation value of its trial when it is loaded as in a model server."""

from __future__ import annotations

import itertools
import logging
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.fit import require_model_objective
from hpsearch.objectives.objective import Objective, overrides
from hpsearch.objectives.private_folders import open_temporary_folder
from hpsearch.objectives.search_space import FixedTrial
from hpsearch.objectives.training.checks.restore_best import RestoredModel, restore_best
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.splits import Splits
from hpsearch.objectives.training.data.tree import tensors
from hpsearch.objectives.training.evaluation.evaluate import (
    EVALUATION_SEED,
    evaluate,
    evaluation_mode,
    get_eval_batch_size,
)
from hpsearch.objectives.training.evaluation.metrics import as_metrics
from hpsearch.objectives.training.loop.prepare import prepare_splits
from hpsearch.objectives.training.loop.step_functions import build_step_function
from hpsearch.search.errors import SearchError, suggest_names
from hpsearch.search.promotion import predict_isolated
from hpsearch.search.promotion.model_files import fetch_model, remove_ids
from hpsearch.search.promotion.sandbox import run_isolated
from hpsearch.search.promotion.weights import BestWeights
from hpsearch.search.study.control import find_trial
from hpsearch.search.study.ranking import get_first_value, get_last_params
from hpsearch.search.study.study import StoredStudy, load_study_by_id
from hpsearch.storage.mlflow import tag_names
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.model import CHECKPOINT_FILE, read_export_failure
from hpsearch.storage.mlflow.registry import Registry, Version
from hpsearch.storage.records.promotions import find_trials_of_runs, select_tagged
from hpsearch.storage.study_storage.storage import PostgresStorage

log = logging.getLogger(__name__)

TOLERANCE = 1e-6
_PREDICTION_TOLERANCE = 1e-4  # relative; the exported program may sum in another order
_PROCESS_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class ServeCheckResult:
    """Result of a serve check.

    Attributes:
        version: the checked version.
        study: name of the study.
        trial: number of the trial.
        metric: the validation metric of the study.
        recorded_value: value of the trial.
        recomputed_value: value of the model's predictions; None if the model could not be loaded or run.
        mismatch: difference between the values, or error of the isolated process; empty if the value is reproduced.
        weights_only: why the model was loaded with the objective's code; empty if it was loaded without that code.
        scored_by_weights: whether the value is that of the trial's weights, because the objective overrides `evaluate`,
            which may call the model with any inputs, or each fold validates its own model; then the predictions are
            compared with those of the weights.
        is_refit: whether the model was trained on the training and validation samples, with those of the score.
    """

    version: Version
    study: str
    trial: int
    metric: str
    recorded_value: float
    recomputed_value: float | None
    mismatch: str
    weights_only: str = ""
    scored_by_weights: bool = False
    is_refit: bool = False


def serve_check(
    storage: PostgresStorage,
    tracking: Tracking,
    reference: str,
    *,
    tolerance: float = TOLERANCE,
    allow_code: bool = False,
) -> ServeCheckResult:
    """Load a model version in a process without this project's code, and score its predictions on the validation split.

    The files of the model are verified first.

    Args:
        storage: storage of the studies.
        tracking: client of the MLflow server.
        reference: ``NAME@ALIAS`` or ``NAME/VERSION``, with or without ``models:/``.
        tolerance: largest accepted absolute difference from the recorded value.
        allow_code: whether to load a model whose files can execute code.

    Raises:
        SearchError: the version does not exist, no study in `storage` has its trial, or the files of the model were
            changed or can execute code.
        ObjectiveError: the objective cannot be loaded on this machine.
        StorageError: MLflow is unavailable or rejects a request.
    """
    version = find_version(Registry(tracking.client), reference)
    run = version.run_id or ""
    with storage.engine.connect() as connection:
        # The promotion has written the tags. Any worker can write trials that name the same run.
        found = select_tagged(find_trials_of_runs(connection, [run]).get(run, []), version.tags)
    if not found:
        raise SearchError(f"{reference}: the trial is not in the database; give the --storage-url of its study")
    if len(found) > 1:
        names = ", ".join(repr(each.study_name) for each in found)
        raise SearchError(f"{reference}: several trials name its run as theirs, of {names}; delete the wrong study")
    study, number = load_study_by_id(storage, found[0].study_id), found[0].number
    trial = find_trial(study, number)
    if (value := get_first_value(trial)) is None:
        raise SearchError(f"{reference}: trial {number} of study {study.spec.name!r} has no value for the comparison")
    scored: float | None
    by_weights = False
    with open_temporary_folder() as folder:
        files = fetch_model(storage.engine, tracking, version, folder, name=reference, allow_code=allow_code)
        objective = require_model_objective(study.objective(), "serve-check")
        splits, _ = prepare_splits(objective, study.spec.seed, None if study.spec.refit is None else "all")
        changed = _describe_changes(study, objective, splits, version)
        if export_failure := read_export_failure(tracking.client, version.model_id):
            best = BestWeights(study, trial, "the model is not checked").read(files / CHECKPOINT_FILE, objective)
            scored, error = restore_best(objective, best).validate()[objective.metric], ""
        else:
            config = objective.configure(FixedTrial(get_last_params(trial)))
            is_custom = overrides(objective, "evaluate") or overrides(objective, "export")
            if by_weights := is_custom or study.spec.folds is not None:
                weights = BestWeights(study, trial, "the model is not checked")
                restored = restore_best(objective, weights.read(weights.fetch(tracking, folder), objective))
                scored = restored.validate()[objective.metric]
                error = _check_predictions(files, restored, folder, allow_code=allow_code)
            else:
                _write_inputs((tensors(splits.val.inputs(rows)) for rows in _list_batches(splits, config)), folder)
                predictions, error = _predict(files, objective, folder, allow_code=allow_code)
                scored = None if predictions is None else _score_predictions(predictions, objective, splits, config)
    difference = 0.0 if scored is None else abs(scored - value)
    if not error and not difference <= tolerance:  # negated, so that NaN is a difference
        error = f"the difference {difference:.3g} exceeds --tolerance {tolerance:g}{changed}"
    name, metric = study.spec.name, study.spec.metric
    is_refit = study.spec.refit is not None
    return ServeCheckResult(version, name, number, metric, value, scored, error, export_failure, by_weights, is_refit)


def find_version(registry: Registry, reference: str) -> Version:
    """Return the model version that ``NAME@ALIAS`` or ``NAME/VERSION`` names.

    Raises:
        SearchError: the reference is invalid, or the version does not exist.
    """
    if not isinstance(reference, str) or not reference.isprintable():
        raise SearchError(f"{reference!r} is not a model version; give NAME@ALIAS (digits@champion) or NAME/VERSION")
    name = reference.removeprefix("models:/")
    if by_alias := re.fullmatch(r"([^/]+)@([^@/]+)", name):
        model, alias = by_alias.groups()
        found, wanted = registry.get_version_by_alias(model, alias), f"model {model!r} with the alias {alias!r}"
    elif by_number := re.fullmatch(r"([^/]+)/(0*[1-9][0-9]*)", name):
        model, number = by_number.groups()
        found, wanted = registry.get_version(model, int(number)), f"version {number} of a model {model!r}"
    else:
        example = f"{name}@champion" if re.fullmatch(r"[\w.-]+", name) else "digits@champion"
        raise SearchError(f"{reference!r} is not a model version; give NAME@ALIAS ({example}) or NAME/VERSION")
    if found is None:
        aliases = registry.list_aliases()
        known = [f"{model}@{alias}" if by_alias else f"{model}/{aliases[model, alias]}" for model, alias in aliases]
        hint = suggest_names(name, known) if known else "; see the registered models in the MLflow UI"
        raise SearchError(f"{reference}: MLflow has no {wanted}{hint}")
    return found


def _describe_changes(study: StoredStudy, objective: Objective, splits: Splits, version: Version) -> str:
    """Return a text with the changes of data and code since the trial ran, to append to a message; empty if none."""
    changed = []
    if version.tags.get(tag_names.DATA_SHA256, splits.hash()) != splits.hash():
        changed.append("the data have changed since the trial ran")
    if study.source_warning(objective):
        changed.append("the objective's code has changed since the study was created")
    return "".join(f"; {change}" for change in changed)


def _predict(files: Path, objective: Objective, folder: Path, *, allow_code: bool) -> tuple[list[Any] | None, str]:
    """Compute the predictions for each validation batch in an isolated process.

    Returns:
        The predictions, or None if the process failed; and the error, or an empty text.
    """
    remove_ids(files)
    outputs, script = folder / "outputs.pt", Path(predict_isolated.__file__)
    blocked = {"hpsearch", type(objective).__module__.partition(".")[0]}
    # -I ignores PYTHONPATH, the user's packages and the current folder. The script blocks the installed packages.
    arguments = [str(files), str(folder), str(outputs), str(EVALUATION_SEED)]
    command = [sys.executable, "-I", str(script), *arguments, *sorted(blocked)]
    variables = {
        "MLFLOW_TRACKING_URI": "http://127.0.0.1:1",  # any address: the files are local, and no server is asked
        "MLFLOW_DEFAULT_PREDICTION_DEVICE": "cpu",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": str(allow_code).lower(),
    }
    try:
        process = run_isolated(
            command, folder=folder, readable=[script], variables=variables, timeout_seconds=_PROCESS_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return None, f"the model did not answer within {_PROCESS_TIMEOUT_SECONDS:.0f} s"
    if process.returncode != 0:
        lines = process.stderr.strip().splitlines()
        return None, f"the model could not run: {lines[-1] if lines else f'exit code {process.returncode}'}"
    return torch.load(outputs, weights_only=True), ""


def _list_batches(splits: Splits, config: TrainConfig) -> list[slice]:
    """Return the rows of the batches in which the validation split is evaluated."""
    rows = get_eval_batch_size(config)
    return [slice(start, start + rows) for start in range(0, len(splits.val), rows)]


def _write_inputs(batches: Iterable[Iterable[tuple[str, Tensor]]], folder: Path) -> None:
    """Write inputs, by name, to `folder`, one file per batch; all batches together may exceed the memory."""
    for number, batch in enumerate(batches):
        parts = {name or predict_isolated.SINGLE_INPUT_KEY: part.numpy() for name, part in batch}
        np.savez(folder / f"{number:06d}.npz", **parts)  # type: ignore[arg-type]  # names of inputs


class _Replay(nn.Module):
    """PyTorch module that returns the stored predictions of the isolated process, one batch per call."""

    def __init__(self, predictions: list[Any], batches: Iterator[Any], name: str) -> None:
        super().__init__()
        self._left, self._batches, self._name = iter(predictions), batches, name

    def __getattr__(self, name: str) -> Any:
        if name in vars(nn.Module()) or name.startswith("_"):
            return super().__getattr__(name)
        raise ObjectiveError(
            f"serve-check cannot score {self._name}: its step uses model.{name}, which an exported model lacks; "
            "change the step to call the model once per batch"
        )

    def forward(self, *inputs: Any, **named: Any) -> Any:
        given = [part.shape for _, part in tensors([*inputs, *named.values()])]
        expected = [part.shape for _, part in tensors(next(self._batches, ()))]
        if given != expected:
            raise ObjectiveError(
                f"serve-check cannot score {self._name}: its step does not call the model exactly once per batch, with "
                "the inputs of the batch"
            )
        return next(self._left, None)


def _score_predictions(predictions: list[Any], objective: Objective, splits: Splits, config: TrainConfig) -> float:
    """Return the metric of the predictions for the validation split, computed as in training."""
    rows = _list_batches(splits, config)
    if len(predictions) != len(rows):
        return float("nan")
    replay = _Replay(predictions, map(splits.val.inputs, rows), objective.name)
    stepping = build_step_function(objective, config, splits, replay, torch.device("cpu"))
    metrics = as_metrics(objective.metrics(splits.train), objective.metric)
    scores = evaluate(replay, splits.val, stepping, metrics, batch_size=get_eval_batch_size(config), device="cpu")
    return scores[objective.metric]


def _check_predictions(files: Path, restored: RestoredModel, folder: Path, *, allow_code: bool) -> str:
    """Compare the predictions of an isolated process with those of the trial's weights.

    The inputs are the validation split, or those that `Objective.export` returns.

    Returns:
        The difference, or the error of the isolated process; empty if the predictions are equal.
    """
    model, val = restored.exportable_model(), restored.splits.val
    batches = [model.inputs]
    if not overrides(restored.objective, "export"):
        batches = [list(tensors(val.inputs(rows))) for rows in _list_batches(restored.splits, restored.config)]
    _write_inputs(batches, folder)
    predictions, error = _predict(files, restored.objective, folder, allow_code=allow_code)
    if predictions is None:
        return error
    with evaluation_mode(model.module, torch.device("cpu"), "evaluation"):
        own = [model.module(*(part for _, part in batch)) for batch in batches]
    return _compare_outputs(predictions, own)


def _compare_outputs(predictions: list[Any], own: list[Any]) -> str:
    """Return a message with the largest relative difference; empty if the outputs are equal up to rounding."""
    max_difference = torch.zeros(())
    expected, found = ([[tensor for _, tensor in tensors(part)] for part in parts] for parts in (own, predictions))
    if [[one.shape for one in part] for part in expected] != [[one.shape for one in part] for part in found]:
        return "the outputs of the exported model have other shapes than those of the trial's weights"
    for one, other in zip(itertools.chain(*expected), itertools.chain(*found), strict=True):
        difference = (one - other).abs().max() / one.abs().max().clamp(min=1)
        max_difference = torch.maximum(max_difference, difference)  # unlike max(), keeps NaN
    if bool(max_difference <= _PREDICTION_TOLERANCE):
        return ""
    return (
        f"the outputs of the exported model differ from those of the trial's weights (relative difference "
        f"{float(max_difference):.3g}, tolerance {_PREDICTION_TOLERANCE:g})"
    )
