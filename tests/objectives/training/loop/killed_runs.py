"""A separate process for test_kill: it trains a configuration in child processes, each killed one epoch later.

Each is a child of this process, forked after torch was imported, so that all of them start in no time.
"""

import importlib
import json
import os
import random
import signal

import numpy as np
import torch
from torch import nn

from hpsearch import LocalSession, Splits, TrainConfig, Trainer
from hpsearch.objectives.builtin.digits import Digits
from hpsearch.objectives.training.reports import run_dir as run_dir_module
from tests.objectives.training.support import exact

EPOCHS = 5
# Lazy imports of a run: once here instead of in each child.
IMPORTED_LATE = (
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "pytorch_optimizer",
    "sklearn.datasets",
    "sklearn.model_selection",
    "torch._inductor",
    "torch.utils.checkpoint",
    "torchmetrics.classification",
    "yaml",
)
CNN = {"kind": "cnn", "layers": 2, "width": 8, "dropout": 0.3}
MLP = {"kind": "mlp", "layers": 2, "width": 32, "dropout": 0.3}
# Together they cover every kind of state, with 0 and 2 loader processes.
CONFIGS = {
    "loader": TrainConfig(
        lr=5e-3,
        schedule="one_cycle",
        ema_decay=0.9,
        gradient_accumulation_steps=2,
        batch_size=32,
        num_workers=2,
        model=CNN,
    ),
    "sam": TrainConfig(
        optimizer="sam",
        base_optimizer="sgd",
        nesterov=True,
        lr=0.05,
        layer_decay=0.8,
        precision="fp16",
        schedule="plateau",
        plateau_patience=0,
        patience=5,
        num_workers=0,
        model=MLP,
    ),
    "lookahead": TrainConfig(
        optimizer="lookahead",
        lr=5e-3,
        schedule="step",
        warmup="cosine",
        swa_fraction=0.5,
        clip_grad_norm=None,
        clip_grad_value=0.05,
        precision="bf16",
        model=CNN,
    ),
}


DIVISIONS = {"sam": 3}  # with halves of the validation samples, and stored outputs for resampling
REFITS = {"lookahead": EPOCHS}  # end before the schedule, and keep the last epoch's weights


class Augmented(Digits):
    """Some digits, shifted by up to a pixel and with noise; each generator is used."""

    def data(self, seed):
        splits = super().data(seed)
        return Splits(splits.train.take(torch.arange(260)), splits.val.take(torch.arange(99)), splits.test)

    def augment(self, config):
        def change(x):
            x = torch.roll(x, (random.randint(-1, 1), int(np.random.randint(-1, 2))), dims=(2, 3))
            return x + torch.randn_like(x)

        return change

    def loss(self, config, train):
        return Steep() if config.precision == "fp16" else super().loss(config, train)


class Steep(nn.CrossEntropyLoss):
    """So steep that fp16 overflows until the loss scale is low enough."""

    def forward(self, output, target):
        return 1000 * super().forward(output, target)


class Killed(LocalSession):
    """Kills its process with SIGKILL at the end of an epoch."""

    def __init__(self, run_dir, epoch):
        super().__init__(run_dir)
        self.epoch = epoch

    def report(self, record):
        verdict = super().report(record)
        if record.epoch == self.epoch:
            os.kill(os.getpid(), signal.SIGKILL)
        return verdict


def train(name, session, result_file):
    """Train to the end and write the exact results."""
    resplit_seed, refit = DIVISIONS.get(name), REFITS.get(name)
    epochs = EPOCHS if refit is None else EPOCHS + 2
    trainer = Trainer(
        Augmented(),
        CONFIGS[name],
        epochs=epochs,
        seed=11,
        split_seed=5,
        resplit_seed=resplit_seed,
        refit=refit,
        session=session,
    )
    result = trainer.fit()
    weights = {key: tensor.numpy().tobytes().hex() for key, tensor in result.model.state_dict().items()}
    kept = {
        "history": exact(result.history),
        "best": result.best_epoch,
        "note": result.resume_note,
        "fresh": repr(result.resplit_score),
    }
    kept |= weights
    result_file.write_text(json.dumps(kept))


def in_a_process_of_its_own(name, session, result_file):
    """Train in a child process and return its exit code."""
    child = os.fork()
    if child == 0:
        train(name, session, result_file)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(name, folder):
    """Print a line of JSON: the exit codes of the children, and whether the last one has the same results."""
    torch.set_num_threads(1)
    run_dir_module.plot_curves = run_dir_module.plot_gradient_norms = lambda *_args, **_kwargs: (
        None
    )  # half of such a short run
    for module in IMPORTED_LATE:
        importlib.import_module(module)
    undisturbed = folder / "undisturbed.json"
    in_a_process_of_its_own(name, None, undisturbed)
    run_dir, found = folder / "run", folder / "found.json"
    ends = [in_a_process_of_its_own(name, Killed(run_dir, epoch), found) for epoch in range(EPOCHS)]
    in_a_process_of_its_own(name, LocalSession(run_dir), found)
    same = found.read_text() == undisturbed.read_text()
    epochs = len(json.loads(undisturbed.read_text())["history"])
    print(json.dumps({"ends": ends, "same": same, "epochs": epochs}))
