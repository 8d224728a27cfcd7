"""Checks before the first trial of a new study: run the objective's code once, and smoke-test its model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import optuna
import torch
from torch.nn.parameter import is_lazy

from hpsearch.kill_points import kill_point
from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.errors import (
    MetricError,
    ObjectiveError,
    get_first_line,
    is_out_of_memory,
    wrap_training_errors,
    wrap_user_errors,
)
from hpsearch.objectives.objective import Objective
from hpsearch.objectives.private_folders import open_temporary_folder
from hpsearch.objectives.training.checks.data_leaks import find_data_leaks
from hpsearch.objectives.training.checks.smoke import SmokeResult, run_smoke_test
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.evaluation.step import LossStep
from hpsearch.objectives.training.folds_trainer import check_folds
from hpsearch.objectives.training.loop.guards import DeviceMemoryError, translate_torch_errors
from hpsearch.objectives.training.loop.prepare import prepare_folds, prepare_splits
from hpsearch.objectives.training.loop.run import Run
from hpsearch.objectives.training.loop.step_functions import bind_export
from hpsearch.search.console import format_command
from hpsearch.search.errors import SearchError
from hpsearch.search.samplers.suggest import check_trial, derive_seed, make_sampler
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import BOUNDS, DATA_SHA256, LEAKS, RUN_ID, SMOKE_TEST, VAL_SAMPLES
from hpsearch.storage.mlflow.client import Tracking

_SECONDS = 60.0  # CPU time; a large model may be undecided by then


@contextmanager
def name_setting_of_metric(objective: BaseObjective, spec: StudySpec) -> Iterator[None]:
    """Add the name of the setting to errors about an invalid metric, unless the objective's class sets the metric."""
    try:
        yield
    except MetricError as error:
        metric = error.metric
        if metric == spec.metric == type(objective).metric:
            raise
        flag = "--directions" if spec.is_multi_objective else "--metric"
        setting = flag if metric in spec.direction_by_metric else "--constraints"
        raise SearchError(f"{setting} {metric!r} {error.reason}") from None


@kill_point("preflight check")
def check_objective_code(objective: BaseObjective, spec: StudySpec) -> None:
    """Run each part of the objective's code once, on a configuration that the sampler could suggest.

    Errors in the code are found before the study exists, instead of in its trials.

    Raises:
        ObjectiveError: the objective raised an error; the message has the file and line.
    """
    from hpsearch.objectives.training.loop.build import build_run, try_step
    from hpsearch.objectives.training.reproducibility.checkpoint import check_readable

    objective.default_config()  # for reports, and for commands that need no study; checks each bound and choice
    config, seed = suggest_configuration(objective, spec), derive_seed(spec.seed, "trial", 0)
    if spec.folds is not None:
        check_folds(objective)
    if not isinstance(objective, Objective):
        return  # a custom loop has no parts that could run separately
    with name_setting_of_metric(objective, spec):
        plan = RunPlan(spec.epochs, seed, spec.seed, folds=spec.folds, fold=None if spec.folds is None else 0)
        run, _ = build_run(objective, config, plan, device=torch.device("cpu"))
    # The smoke test warns of a lack of memory.
    wrapped = wrap_training_errors(f"{type(objective).__name__} in a training step")
    with contextlib.suppress(DeviceMemoryError), wrapped, translate_torch_errors(config, run.device):
        before = _copy_loss_state(run)
        for _ in range(2):  # the second step may use tensors of the first one
            try_step(run)
        _check_loss_state(run, before)
    check_readable(run.state_dict())
    if (export := bind_export(objective, config)) is not None:
        with wrap_user_errors(f"{type(objective).__name__}.export"), torch.inference_mode():
            run.model.eval()
            exported = export(run.model)
            exported.module(*(part for _, part in exported.inputs))


def _copy_loss_state(run: Run) -> dict[str, torch.Tensor]:
    """Return a copy of the state of the loss, such as class weights; empty if the objective has its own step."""
    if not isinstance(run.step_function, LossStep):
        return {}
    state = run.step_function.loss.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and not is_lazy(value)}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _check_loss_state(run: Run, before: Mapping[str, torch.Tensor]) -> None:
    """Check that training steps have not changed the loss, whose state is not in checkpoints.

    Raises:
        ObjectiveError: the loss has changed, so that a trial would have other values after a pause or a resume.
    """
    after = _copy_loss_state(run)
    for name in before.keys() & after.keys():
        if _is_changed(before[name], after[name]):
            raise ObjectiveError(
                f"the loss changes its state {name!r} in training, which checkpoints do not contain; move the module "
                "with this state into the model, set it to evaluation mode, or register the buffer with "
                "persistent=False if the loss does not read it"
            )


def _is_changed(before: torch.Tensor, after: torch.Tensor) -> bool:
    if before.shape != after.shape:  # a cache for batches of a size
        return False
    if before.dtype == after.dtype and not before.is_floating_point():
        return not before.equal(after)
    tolerance = 0.0 if before.dtype == after.dtype else 1e-5  # a loss may convert its weights to the type of outputs
    return not torch.allclose(before.double(), after.double(), rtol=tolerance, atol=0.0, equal_nan=True)


def inspect_objective(objective: BaseObjective, spec: StudySpec) -> dict[str, Any]:
    """Check the objective's code and data before a study is created, and return the study's attributes about them.

    Raises:
        ObjectiveError: the code or the data have a fault.
    """
    try:
        check_objective_code(objective, spec)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ObjectiveError(
            f"{type(objective).__name__} needs too much memory for a random configuration ({get_first_line(error)}); "
            "use less data, or smaller bounds in suggest"
        ) from error
    attrs: dict[str, Any] = {}
    if isinstance(objective, Objective):  # a custom training loop has its own data
        splits, split_hash = prepare_splits(objective, spec.seed)
        leaks = find_data_leaks(objective, splits, split_hash)
        folds = [splits]
        if spec.folds is not None:
            folds, split_hash = prepare_folds(objective, spec.seed, spec.folds)
        attrs = {LEAKS: leaks, VAL_SAMPLES: sum(len(fold.val) for fold in folds), DATA_SHA256: split_hash}
    if (bounds := read_declared_bounds(objective, spec)) is not None:
        attrs[BOUNDS] = bounds
    return attrs


def read_declared_bounds(objective: BaseObjective, spec: StudySpec) -> list[float | None] | None:
    """Return the bounds that the objective declares for the study's metric; None if it declares none.

    Raises:
        ObjectiveError: the bounds are not two numbers in ascending order.
    """
    if not isinstance(objective, Objective) or spec.metric != type(objective).metric:
        return None
    bounds = objective.bounds
    owner = type(objective).__name__
    is_pair = isinstance(bounds, (tuple, list)) and len(bounds) == 2
    if not is_pair or not all(bound is None or isinstance(bound, (int, float)) for bound in bounds):
        raise ObjectiveError(f"{owner}.bounds is {bounds!r}; give two numbers or None, such as (0, 1)")
    low, high = bounds
    if low is not None and high is not None and not low < high:
        raise ObjectiveError(f"{owner}.bounds is {bounds!r}, but the first bound must be below the second")
    return None if low is None and high is None else [low, high]


def suggest_configuration(objective: BaseObjective, spec: StudySpec) -> Any:
    """Return a configuration that the sampler could suggest.

    Raises:
        ObjectiveError: `suggest` raised an error (the message has the file and line), or a parameter is invalid.
    """
    sampler = make_sampler(spec.sampler, study_seed=spec.seed, trial_number=0, epochs=spec.epochs)
    trial = optuna.create_study(sampler=sampler).ask()
    with wrap_user_errors(f"{type(objective).__name__}.suggest"):
        config = objective.configure(trial)
    check_trial(trial)
    return config


def run_random_smoke_test(objective: BaseObjective, spec: StudySpec) -> SmokeResult:
    """Run the smoke test with a configuration of the search space."""
    assert isinstance(objective, Objective)
    config = suggest_configuration(objective, spec)
    try:
        return run_smoke_test(objective, config, seed=spec.seed, seconds=_SECONDS)
    except DeviceMemoryError as error:
        return make_failed_result(str(error))
    except (ObjectiveError, OSError):
        raise
    except Exception as error:  # for example of an optimizer
        if is_out_of_memory(error):
            raise
        return make_failed_result(f"{type(error).__name__}: {get_first_line(error)}")


def make_failed_result(reason: str) -> SmokeResult:
    """Return the result of a smoke test that ended before its first step."""
    return SmokeResult(passed=False, losses=[], target=math.nan, samples=0, lr=math.nan, reason=reason)


def smoke_test(
    study: StoredStudy,
    objective: BaseObjective,
    tracking: Tracking | None,
    *,
    run_test: Callable[[BaseObjective, StudySpec], SmokeResult] = run_random_smoke_test,
) -> str | None:
    """Run the smoke test once per study, with a configuration of the search space; return a warning or None.

    The warning is that the test failed, or that it passed with signs of faults.

    A failure does not end the search, because a search space may contain models that are too small on purpose, or too
    large for the machine. The result is stored in the study, and the losses are logged to the study's MLflow run,
    unless `tracking` is None. A study with a custom training loop has no smoke test.
    """
    if not isinstance(objective, Objective):
        return None  # a custom loop has no batches that hpsearch could use
    outcome = study.attrs.get(SMOKE_TEST)
    if outcome is None:
        try:
            result = run_test(objective, study.spec)
        except ObjectiveError as error:  # of this configuration, or of code that fails at its second call
            result = make_failed_result(str(error))
        outcome = _format_result(result)
        if tracking is not None and result.losses:
            with suppress(FileNotFoundError), open_temporary_folder() as folder:  # another program may have removed it
                result.write(folder)
                for file in sorted(folder.iterdir()):
                    tracking.log_file(str(study.attrs[RUN_ID]), file)
        study.set_attr(SMOKE_TEST, outcome)
    if not outcome.startswith("failed") and _SIGNS not in outcome:
        return None
    again = format_command("smoke", study.spec.objective)
    return f"warning: smoke test of a random configuration {outcome}; test the default configuration with {again}"


_SIGNS = "; but "  # between the result of a passed test and its signs of faults


def _format_result(result: SmokeResult) -> str:
    if result.passed:
        losses = f"loss {result.losses[0]:.4g} -> {result.losses[-1]:.4g}"
        signs = "".join(_SIGNS + sign for sign in result.signs)
        return f"passed: one batch of {result.samples} samples fitted, {losses}{signs}"
    return f"{'undecided' if result.is_undecided else 'failed'}: {result.reason}"
