"""Run Lightning in a custom training loop: `fit` trains and reports each epoch, `test` evaluates the best epoch."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping, Sized
from typing import Any, cast

import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch.utils.data import DistributedSampler

from hpsearch.objectives.custom_loop.loop_trial import LoopTrial, remove_prefixes
from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.tree import map_tensors
from hpsearch.objectives.training.reproducibility.seeds import derive_seed

_QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
_SET_BY_TRIAL = (
    "max_epochs",
    "max_steps",
    "check_val_every_n_epoch",
    "accelerator",
    "devices",
    "num_nodes",
    "default_root_dir",
)


def fit(trial: LoopTrial, module: LightningModule, data: Any, **trainer: Any) -> None:
    """Train a module with Lightning's `Trainer`; a resumed trial continues from its last checkpoint.

    The `Trainer` validates after each epoch, and `fit` reports the logged metrics to the trial: `val_NAME` and
    `val/NAME` as NAME, all other names unchanged. The reported `state` is Lightning's checkpoint, and `best` is the
    module's `state_dict`. The shuffle order depends only on the trial's seed and the epoch, so a repeated epoch uses
    the same order and random numbers. This does not hold for loaders with `persistent_workers=True`.

    Args:
        trial: the argument of `run` or of a function objective.
        module: the module to train.
        data: a `LightningDataModule`, or a tuple of training and validation loaders.
        trainer: arguments of `lightning.Trainer`, except those that the trial sets: epochs and steps, the validation
            interval, devices and nodes, and the root folder.

    Raises:
        ObjectiveError: `trainer` contains an argument that the trial sets.
    """
    if rejected := [name for name in _SET_BY_TRIAL if name in trainer]:
        raise ObjectiveError(f"fit(): hpsearch sets the Trainer argument {rejected[0]!r}; remove it from the call")
    memory = _Memory(trial.state)
    settings = {
        **_QUIET,
        **({} if trial.world == 1 else {"strategy": "ddp"}),
        **trainer,
        "accelerator": trial.device.type,
        "devices": [trial.device.index or 0] if trial.device.type == "cuda" else 1,
        "num_nodes": trial.world,  # for Lightning, each rank is a node with one device
        "max_epochs": trial.total_epochs,
        "default_root_dir": trial.folder,
        "callbacks": [*_as_list(trainer.get("callbacks")), _EpochReporter(trial, memory)],
        # Without this environment Lightning would detect Slurm and requeue the job.
        "plugins": [
            *_as_list(trainer.get("plugins")),
            LightningEnvironment() if trial.world == 1 else _Ranks(trial.rank),
            memory,
        ],
    }
    resumed = None if trial.state is None else _Memory.PATH
    with _quiet():
        Trainer(**settings).fit(module, **_data_arguments(data), ckpt_path=resumed)


def test(module: LightningModule, best: Mapping[str, Any], data: Any, **trainer: Any) -> dict[str, float]:
    """Return the scores that `test_step` logs on the test set, without the prefixes `test_` and `test/` of their names.

    Args:
        module: a module constructed as for `fit`.
        best: the argument `best` of `LoopObjective.test`, here the module's `state_dict`.
        data: a `LightningDataModule`, or the loader of the test set.
        trainer: arguments of `lightning.Trainer`.
    """
    module.load_state_dict(dict(best))
    environment = [*_as_list(trainer.pop("plugins", None)), LightningEnvironment()]
    settings = {**_QUIET, "enable_checkpointing": False, "accelerator": "cpu", "devices": 1, **trainer}
    where = {"datamodule": data} if isinstance(data, LightningDataModule) else {"dataloaders": data}
    with _quiet():
        found = Trainer(**settings, plugins=environment).test(module, **where, verbose=False)
    return remove_prefixes({name: float(value) for part in found for name, value in part.items()}, "test")


class _Ranks(LightningEnvironment):  # type: ignore[misc]  # Lightning is not type-checked
    """Lightning cluster environment for the ranks of a trial, whose processes and process group already exist."""

    creates_processes_externally = True

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def node_rank(self) -> int:
        """Return the rank of this process, because Lightning treats each rank as a node."""
        return self._rank

    def local_rank(self) -> int:
        """Return 0, because each rank has one device."""
        return 0

    def teardown(self) -> None:
        """Do nothing: Lightning would remove an environment variable of the launcher."""


class _Memory(CheckpointIO):  # type: ignore[misc]  # Lightning is not type-checked
    """Lightning checkpoint IO that keeps the checkpoint in memory, so that it can be reported as the trial's state."""

    PATH = "the trial's state"

    def __init__(self, state: Any) -> None:
        self.checkpoint: dict[str, Any] = {} if state is None else state["checkpoint"]

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:  # noqa: ARG002 part of Lightning's API
        """Keep a checkpoint without Lightning's hyperparameters, which the trial's configuration replaces."""
        kept = {name: part for name, part in checkpoint.items() if not name.endswith(_HYPERPARAMETERS)}
        self.checkpoint = map_tensors(lambda tensor: tensor, kept)  # converts other mappings to dictionaries

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:  # noqa: ARG002 part of Lightning's API
        """Return the kept checkpoint."""
        return self.checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Do nothing, because there is no file."""


_HYPERPARAMETERS = ("hyper_parameters", "hparams_name", "hparams_type")


class _EpochReporter(Checkpoint):  # type: ignore[misc]  # Lightning is not type-checked; checkpoint callbacks run last
    """Callback that reports Lightning's epochs to the trial."""

    def __init__(self, trial: LoopTrial, memory: _Memory) -> None:
        self._trial, self._memory = trial, memory
        self._epochs = trial.epochs()
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        self._first = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 part of Lightning's API
        """Restore the worker's SIGTERM handler, and step the metric-driven schedulers of a resumed trial."""
        # Lightning's handler stops within the epoch; the handler of the worker lets the epoch end and saves it.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)
        _remove_padding(trainer)
        if self._trial.state is not None:
            _step_plateaus(trainer, self._trial.state["logged"])

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 part of Lightning's API
        """Validate each sample once, also with loaders that Lightning has created again."""
        _remove_padding(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 part of Lightning's API
        """Start the trial's next epoch, which seeds the global random generators, and seed the loaders' generators."""
        epoch = next(self._epochs)
        if epoch != trainer.current_epoch:
            raise ObjectiveError(
                f"fit() starts at epoch {trainer.current_epoch + 1}, but the next epoch of the trial is {epoch + 1}; "
                "call fit() only once per trial"
            )
        for number, loader in enumerate(CombinedLoader(trainer.train_dataloader, "max_size").flattened):
            for holder in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
                if holder is not None and hasattr(holder, "generator"):
                    seed = derive_seed(self._trial.seed, "shuffle", epoch, number)
                    holder.generator = torch.Generator().manual_seed(seed)
                if isinstance(holder, DistributedSampler):
                    holder.seed = derive_seed(self._trial.seed, "shuffle", number)  # Lightning calls its set_epoch
        if self._first:  # these iterators were created before the seeding; later ones are created after it
            iter(trainer.fit_loop._data_fetcher)
            self._first = False

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the epoch, and stop Lightning if the trial ends."""
        logged = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        trainer.save_checkpoint(_Memory.PATH, weights_only=False)
        metrics = remove_prefixes(logged, "val")
        metrics.setdefault("lr", float(trainer.optimizers[0].param_groups[0]["lr"]))
        state = {"checkpoint": self._memory.checkpoint, "logged": logged}
        self._trial.report(metrics, state=state, best=pl_module.state_dict())
        if self._trial.should_stop:
            trainer.should_stop = True


def _remove_padding(trainer: Trainer) -> None:
    """Let distributed samplers of the validation return each sample once, instead of repeating some on several devices.

    A sampler is not changed if the ranks would then have different numbers of batches, because the code of the module
    may communicate in each batch.
    """
    for loader in CombinedLoader(trainer.val_dataloaders or [], "sequential").flattened:
        sampler, batch_size = getattr(loader, "sampler", None), getattr(loader, "batch_size", None)
        if not isinstance(sampler, DistributedSampler) or batch_size is None:
            continue
        total = len(cast("Sized", sampler.dataset))
        sizes = [len(range(rank, total, sampler.num_replicas)) for rank in range(sampler.num_replicas)]
        if len({math.ceil(size / batch_size) for size in sizes}) == 1:
            sampler.total_size, sampler.num_samples = total, sizes[sampler.rank]


def _step_plateaus(trainer: Trainer, logged: Mapping[str, float]) -> None:
    """Step metric-driven schedulers after a resume: the checkpoint was saved before Lightning stepped them."""
    for found in trainer.lr_scheduler_configs:
        due = found.interval == "epoch" and trainer.current_epoch % found.frequency == 0
        if found.reduce_on_plateau and due and found.monitor in logged:
            found.scheduler.step(logged[found.monitor])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Lightning's messages about each `Trainer`."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PossibleUserWarning)
            warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # a warning about Lightning's own use of torch
            yield
    finally:
        log.setLevel(level)


def _data_arguments(data: Any) -> dict[str, Any]:
    if isinstance(data, LightningDataModule):
        return {"datamodule": data}
    if not isinstance(data, tuple) or len(data) != 2:
        kind = type(data).__name__
        raise ObjectiveError(f"fit(): data must be a LightningDataModule or (train, validation) loaders, not {kind}")
    return {"train_dataloaders": data[0], "val_dataloaders": data[1]}


def _as_list(given: Callback | list[Any] | None) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
