"""A run whose configuration changes at given epochs, as population-based training finds them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hpsearch import LocalSession, ObjectiveError, TrainConfig, Trainer, Verdict
from hpsearch.objectives.training.checks.in_flight import InFlightCheck
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.session import Curve, MidEpochAction
from tests.objectives.training.support import Wine, exact

BASE = TrainConfig(lr=0.05, optimizer="sgd", batch_size=32, ema_decay=0.9)
LATER = dataclasses.replace(BASE, lr=0.01, weight_decay=0.1, momentum=0.5, batch_size=24)
CONFIGS = {0: BASE, 2: LATER, 3: dataclasses.replace(LATER, lr=0.02)}


class StopAfter(LocalSession):
    """Stop after an epoch, as a graceful shutdown does."""

    def __init__(self, folder: Path, epoch: int) -> None:
        super().__init__(folder)
        self._epoch = epoch

    def report(self, record: EpochRecord) -> Verdict:
        return Verdict.STOP if record.epoch == self._epoch else Verdict.CONTINUE


@pytest.mark.parametrize("schedule", ["cosine", pytest.param("plateau", marks=pytest.mark.soak)])
def test_a_run_that_is_stopped_after_every_epoch_changes_no_bit(schedule: str, tmp_path: Path) -> None:
    configs = {epoch: dataclasses.replace(config, schedule=schedule) for epoch, config in CONFIGS.items()}
    options = {"epochs": 4, "seed": 1, "config_by_epoch": configs}
    whole = Trainer(Wine(), configs[0], **options).fit()
    for epoch in (1, 2, 4):
        stopped = Trainer(Wine(), configs[0], session=StopAfter(tmp_path, epoch), **options).fit()
    assert exact(stopped.history) == exact(whole.history)
    constant = Trainer(Wine(), configs[0], epochs=4, seed=1).fit()
    assert exact(constant.history[:2]) == exact(whole.history[:2])
    assert constant.history[2].metrics["val_loss"] != whole.history[2].metrics["val_loss"]


class LostCheckpoints(LocalSession):
    """The session of a trial that has reported epochs and lost their checkpoints; it stops after each `n` steps."""

    def __init__(self, folder: Path, n: int) -> None:
        super().__init__(folder)
        self.curve = Curve("accuracy", maximize=True, known=dict.fromkeys(range(3), 0.5))
        self._steps = itertools.count(1)
        self._n = n

    def mid_epoch_action(self, left: Callable[[], float]) -> MidEpochAction:
        return MidEpochAction.SAVE_AND_STOP if next(self._steps) == self._n else MidEpochAction.NONE


@pytest.mark.parametrize("second", [LATER, BASE], ids=["other configuration", "other seed"])
def test_a_run_that_continues_the_checkpoint_of_another_one_can_be_repeated(
    second: TrainConfig, tmp_path: Path
) -> None:
    first, second = (dataclasses.replace(config, schedule="cosine") for config in (BASE, second))
    Trainer(Wine(), first, epochs=4, seed=1, split_seed=5, session=StopAfter(tmp_path, 1)).fit()
    schedule: dict[str, Any] = {"config_by_epoch": {0: first, 2: second}, "seed_by_epoch": {0: 1, 2: 7}}
    options: dict[str, Any] = {"epochs": 4, "seed": 7, "split_seed": 5}
    copied = Trainer(Wine(), first, **options, session=LocalSession(tmp_path), **schedule).fit()
    assert len(copied.history) == 4
    again = Trainer(Wine(), first, **options, **schedule).fit()
    assert exact(again.history) == exact(copied.history)
    for n in (1000, 5):  # a run that is not stopped, and one that is also stopped within epochs
        folder = tmp_path / f"lost-{n}"
        for _ in range(9):
            lost = Trainer(Wine(), first, **options, session=LostCheckpoints(folder, n), **schedule).fit()
            if lost.status == "completed":
                break
        assert [each.metrics["val_loss"] for each in lost.history] == [e.metrics["val_loss"] for e in copied.history]
        assert [each.metrics["lr"] for each in lost.history] == [each.metrics["lr"] for each in copied.history]
    own = Trainer(Wine(), first, **options, config_by_epoch=schedule["config_by_epoch"]).fit()
    assert exact(own.history)[0] != exact(copied.history)[0]


def test_the_seeds_change_with_the_configurations() -> None:
    with pytest.raises(ObjectiveError, match=r"seed_by_epoch must have the epochs of config_by_epoch, not \[0, 1\]"):
        Trainer(Wine(), BASE, epochs=4, seed=0, config_by_epoch={0: BASE}, seed_by_epoch={0: 1, 1: 2})


def test_the_learning_rate_continues_at_the_same_epoch_of_its_schedule() -> None:
    configs = {0: dataclasses.replace(BASE, lr=0.1), 2: dataclasses.replace(BASE, lr=0.01)}
    rates = [
        [record.metrics["lr"] for record in Trainer(Wine(), config, epochs=4, seed=0, **more).fit().history]
        for config, more in ((configs[0], {"config_by_epoch": configs}), (configs[0], {}), (configs[2], {}))
    ]
    assert rates[0] == [*rates[1][:2], *rates[2][2:]]


def test_the_configurations_begin_with_the_first_epoch() -> None:
    with pytest.raises(ObjectiveError, match="config_by_epoch must begin with epoch 0, not 2"):
        Trainer(Wine(), BASE, epochs=4, seed=0, config_by_epoch={2: LATER})


def test_the_checkpoint_of_another_configuration_is_rejected(tmp_path: Path) -> None:
    Trainer(Wine(), LATER, epochs=4, seed=1, session=StopAfter(tmp_path, 0)).fit()
    with pytest.raises(ObjectiveError, match=r"the checkpoint belongs to another run: its lr is 0.01, not 0.05"):
        Trainer(Wine(), BASE, epochs=4, seed=1, config_by_epoch=CONFIGS, session=LocalSession(tmp_path)).fit()


class Adjustable(Wine):
    """A network with settings of all kinds."""

    def model(self, config, train):  # type: ignore[no-untyped-def]  # as in the base class
        hidden, negative = config.model.get("hidden", 8), config.model.get("negative", 0.1)
        layers = [nn.Linear(13, hidden), nn.LeakyReLU(negative), nn.Dropout(config.model.get("dropout", 0.1))]
        return nn.Sequential(*layers, *[nn.ReLU()] * config.model.get("more", 0), nn.Linear(hidden, 3))


@pytest.mark.parametrize(
    ("change", "obstacle"),
    [
        ({"lr": 0.2}, None),
        ({"batch_size": 8}, None),
        ({"label_smoothing": 0.1}, None),
        ({"model": {"dropout": 0.5}}, None),
        ({"model": {"hidden": 9}}, "it changes the names or shapes of the model's weights"),
        ({"model": {"more": 1}}, "it changes the names or shapes of the model's weights"),
        ({"model": {"negative": 0.2}}, "it changes the outputs of the model for the same weights"),
        ({"momentum": 0.0}, "it changes the state of the optimizer"),
        ({"batch_size": 10**6}, None),
    ],
)
def test_settings_that_can_change_during_the_training(change: dict[str, object], obstacle: str | None) -> None:
    check = InFlightCheck(Adjustable(), BASE, RunPlan(4, 0, 0))
    assert check.find_obstacle(dataclasses.replace(BASE, **change)) == obstacle  # type: ignore[arg-type]
