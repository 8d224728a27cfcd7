"""Run Hugging Face's Trainer in a custom training loop: `train` trains a model and reports each epoch."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from hpsearch.objectives.custom_loop.loop_trial import LoopTrial, remove_prefixes
from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.reproducibility.seeds import derive_seed

_SPEED = ("runtime", "samples_per_second", "steps_per_second", "epoch", "model_preparation_time")
_SET_BY_TRIAL = ("num_train_epochs", "max_steps", "eval_strategy", "save_strategy", "seed", "data_seed", "use_cpu")


def training_arguments(trial: LoopTrial, **settings: Any) -> TrainingArguments:
    """Return `transformers.TrainingArguments` with the trial's epochs, seed and device, and an evaluation per epoch.

    Args:
        trial: the argument of `run` or of a function objective.
        settings: arguments of `TrainingArguments`, except those that the trial sets: epochs and steps, evaluation and
            save strategies, seeds, and the use of the CPU.

    Raises:
        ObjectiveError: `settings` contains an argument that the trial sets, or the Trainer would not use the trial's
            device.
    """
    if rejected := [name for name in _SET_BY_TRIAL if name in settings]:
        raise ObjectiveError(f"training_arguments(): hpsearch sets {rejected[0]!r}; remove it from the call")
    seed = derive_seed(trial.seed, "transformers") % 2**31
    defaults = {"report_to": "none", "output_dir": trial.folder or trial.checkpoint / "trainer", "disable_tqdm": True}
    arguments = TrainingArguments(
        **{**defaults, **settings},
        num_train_epochs=trial.total_epochs,
        eval_strategy="epoch",
        save_strategy="epoch",
        seed=seed,
        data_seed=seed,
        use_cpu=trial.device.type == "cpu",
    )
    if arguments.device.type != trial.device.type or (arguments.device.index or 0) != (trial.device.index or 0):
        raise ObjectiveError(
            f"the Trainer would train on {arguments.device}, but the trial's device is {trial.device}; "
            "set CUDA_VISIBLE_DEVICES so that the worker has one device"
        )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # the Trainer would use DataParallel on all GPUs
    return arguments


def train(trial: LoopTrial, trainer: Trainer) -> None:
    """Train with a `transformers.Trainer`; a resumed trial continues from its last checkpoint.

    After each epoch, `train` reports the metrics of the evaluation (`eval_NAME` as NAME) and the training loss (as
    `train_loss`). The trial's checkpoint contains the Trainer's checkpoint folder, and `best` is the model's
    `state_dict`. An epoch that a resumed trial repeats uses the same random numbers.

    Args:
        trial: the argument of `run` or of a function objective.
        trainer: a Trainer that was created with `args=training_arguments(trial, ...)`.

    Raises:
        ObjectiveError: the Trainer's arguments are not from `training_arguments`.
    """
    arguments = trainer.args
    if (arguments.num_train_epochs, arguments.save_strategy) != (trial.total_epochs, "epoch"):
        raise ObjectiveError("train() needs a Trainer that was created with args=training_arguments(trial, ...)")
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(_EpochReporter(trial, trainer.model))
    with _quiet():
        trainer.train(resume_from_checkpoint=str(trial.checkpoint) if trial.resumed else None)


class _EpochReporter(TrainerCallback):  # type: ignore[misc]  # transformers is not type-checked
    """Callback that reports the Trainer's epochs to the trial."""

    def __init__(self, trial: LoopTrial, model: torch.nn.Module) -> None:
        self._trial, self._model = trial, model
        self._epochs = trial.epochs()
        self._metrics: dict[str, float] = {}

    def on_epoch_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 part of the Trainer's API
        """Start the trial's next epoch, which seeds the random generators."""
        next(self._epochs, None)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Mapping[str, float], **_: Any) -> None:  # noqa: ARG002 part of the Trainer's API
        """Collect the metrics of an evaluation. The Trainer calls this method once per evaluation set."""
        self._metrics |= remove_prefixes(metrics, "eval")

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """Report the epoch, and stop the Trainer if the trial ends."""
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        metrics = {name: value for name, value in self._metrics.items() if not name.endswith(_SPEED)}
        for logged, name in (("loss", "train_loss"), ("learning_rate", "lr")):
            if values := [line[logged] for line in state.log_history if logged in line]:
                metrics[name] = values[-1]
        for path in folder.glob("rng_state*"):  # every epoch is seeded
            path.unlink(missing_ok=True)
        self._metrics = {}
        self._trial.report(metrics, folder=folder, best=self._model.state_dict())
        if not self._trial.rank:
            shutil.rmtree(folder)  # the trial's checkpoint contains it
        if self._trial.should_stop:
            control.should_training_stop = True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Disable the progress bars that transformers shows for each checkpoint."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
