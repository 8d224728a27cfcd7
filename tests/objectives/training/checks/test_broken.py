"""20 broken objectives and 8 broken splits: the checks before a search find at least 24 of them.

The checks are those of `run` and `train` for a new objective: signs of leakage in its data, one call of each part of
its code, and the smoke test.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpsearch import Batch, Dataset, Objective, ObjectiveError, Splits, Step, TrainConfig
from hpsearch.objectives.training.checks.data_leaks import find_data_leaks
from hpsearch.objectives.training.checks.smoke import run_smoke_test
from hpsearch.objectives.training.loop.prepare import prepare_splits


def find_faults(objective: Objective) -> list[str]:
    """Return the faults that the checks find, one line each."""
    try:
        leaks = find_data_leaks(objective, *prepare_splits(objective, 0))
        result = run_smoke_test(objective, steps=300)
    except ObjectiveError as error:
        return [str(error)]
    return [*leaks.values(), *([] if result.passed else [result.reason]), *result.signs]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 32), nn.Linear(32, 3)

    def encode(self, x: Tensor) -> Tensor:
        return self.body(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


def draw_table() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(240, 6, generator=generator)
    scores = x[:, :3] + 0.5 * torch.randn(240, 3, generator=generator)
    return x, scores.argmax(1)


class Table(Objective):
    """Classification of tables; sound, unless a subclass changes it."""

    Model: type[nn.Module] = Net

    def suggest(self, trial: Any) -> TrainConfig:
        return TrainConfig(lr=0.02)

    def data(self, seed: int) -> Splits:
        return Splits.make(*draw_table(), seed=seed)

    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        return self.Model()


def draw_text() -> tuple[Tensor, Tensor]:
    """Return the codes [n, 12] of texts that each repeat three letters, and their next codes [n, 12]."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 9, (240, 3), generator=generator).repeat(1, 5)[:, :13]
    return codes[:, :-1], codes[:, 1:]


class Attention(nn.Module):
    """A causal language model of one layer."""

    is_causal = True

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(9, 32), nn.Parameter(0.1 * torch.randn(12, 32))
        self.parts, self.head = nn.Linear(32, 96), nn.Linear(32, 9)

    def forward(self, x: Tensor) -> Tensor:
        codes = self.embed(x) + self.place
        mixed = functional.scaled_dot_product_attention(*self.parts(codes).chunk(3, dim=2), is_causal=self.is_causal)
        return self.head(codes + mixed)


class Text(Table):
    metric, direction, loss_floor = "loss", "minimize", None
    Model = Attention

    def data(self, seed: int) -> Splits:
        return Splits.make(*draw_text(), seed=seed)

    def step(self, model: nn.Module, batch: Batch, config: TrainConfig) -> Step:
        return Step(functional.cross_entropy(model(batch.x).flatten(0, 1), batch.y.flatten()))


class Recall(Table):
    """A metric of `evaluate`."""

    metric, direction = "error", "minimize"

    def evaluate(self, model: nn.Module, part: Dataset, config: TrainConfig) -> dict[str, float]:
        return {"error": float(functional.cross_entropy(model(part.x), part.y))}


class DeadOutput(Table):
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            return 0.0 * super().forward(x)


class DetachedLoss(Table):
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach()


class ShuffledLabels(Table):
    def data(self, seed: int) -> Splits:
        x, y = draw_table()
        return Splits.make(x, y[torch.randperm(len(y))], seed=seed)


class FrozenLayers(Table):
    class Model(Net):
        @torch.no_grad()
        def encode(self, x: Tensor) -> Tensor:
            return super().encode(x)


class SoftmaxOverSamples(Table):
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).log_softmax(0)


class LabelsFromOne(Table):
    def data(self, seed: int) -> Splits:
        x, y = draw_table()
        return Splits.make(x, y + 1, seed=seed)


class LossOnHidden(Table):
    def step(self, model: nn.Module, batch: Batch, config: TrainConfig) -> Step:
        return Step(model.encode(batch.x).square().mean(1), outputs=model(batch.x))


class MetricOnTraining(Recall):
    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        self.train = train
        return super().model(config, train)

    def evaluate(self, model: nn.Module, part: Dataset, config: TrainConfig) -> dict[str, float]:
        return super().evaluate(model, self.train, config)


class NegatedLoss(Table):
    loss_floor = None

    def step(self, model: nn.Module, batch: Batch, config: TrainConfig) -> Step:
        outputs = model(batch.x)
        return Step(-functional.cross_entropy(outputs, batch.y, reduction="none"), outputs=outputs)


class OptimizerOfACopy(Table):
    def parameter_groups(self, model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
        return [{"params": [*self.Model().parameters()]}]


class DropoutInEvaluation(Table):
    class Model(Net):
        def encode(self, x: Tensor) -> Tensor:
            return functional.dropout(super().encode(x), 0.2)


class AttentionDropoutInEvaluation(Text):
    class Model(Attention):
        def forward(self, x: Tensor) -> Tensor:
            codes = self.embed(x) + self.place
            parts = self.parts(codes).chunk(3, dim=2)
            return self.head(codes + functional.scaled_dot_product_attention(*parts, is_causal=True, dropout_p=0.1))


class LabelAmongFeatures(Table):
    def data(self, seed: int) -> Splits:
        x, y = draw_table()
        return Splits.make(torch.column_stack([x[:, :5], y]), y, seed=seed)


class TargetNotUsed(Table):
    def step(self, model: nn.Module, batch: Batch, config: TrainConfig) -> Step:
        outputs = model(batch.x)
        return Step(functional.cross_entropy(outputs, outputs.argmax(1), reduction="none"), outputs=outputs)


class ConstantInput(Table):
    class Model(Net):
        def encode(self, x: Tensor) -> Tensor:
            return super().encode(torch.zeros_like(x))


class SoftmaxTwice(Table):
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).softmax(1)


class NoCausalMask(Text):
    class Model(Attention):
        is_causal = False


class PredictsItsInput(Text):
    """The targets are not the next codes."""

    def data(self, seed: int) -> Splits:
        x, _ = draw_text()
        return Splits.make(x, x, seed=seed)


class ScaledInTrainingOnly(Table):
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if self.training else 255 * x - 128)


class BroadcastLoss(Table):
    """Outputs [n, 1] and targets [n] are subtracted as [n, n]."""

    metric, direction = "rmse", "minimize"

    def data(self, seed: int) -> Splits:
        x, _ = draw_table()
        return Splits.make(x, x[:, 0] - x[:, 1].square(), seed=seed)

    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))

    def loss(self, config: TrainConfig, train: Dataset) -> nn.Module:
        return nn.MSELoss()


def join(one: Dataset, other: Dataset) -> Dataset:
    return Dataset(torch.cat([one.x, other.x]), torch.cat([one.y, other.y]))


class SameSplitTwice(Table):
    def data(self, seed: int) -> Splits:
        splits = super().data(seed)
        return Splits(splits.train, splits.val, Dataset(splits.val.x, splits.val.y))


class TestInTrain(Table):
    def data(self, seed: int) -> Splits:
        splits = super().data(seed)
        return Splits(join(splits.train, splits.test), Dataset(splits.val.x, splits.val.y), splits.test)


class AugmentedBeforeTheSplit(Table):
    def data(self, seed: int) -> Splits:
        x, y = draw_table()
        return Splits.make(torch.cat([x, x + 0.02 * torch.randn_like(x)]), y.repeat(2), seed=seed)


class GroupsAcrossSplits(Table):
    """Five similar frames of each of 60 recordings, split without `groups`."""

    def data(self, seed: int) -> Splits:
        x, y = draw_table()
        frames = x[:60].repeat(5, 1) + 0.1 * torch.randn(300, 6)
        return Splits.make(frames, y[:60].repeat(5), seed=seed)


class ConvertedTarget(BroadcastLoss):
    """The target in another unit is a feature."""

    loss = Objective.loss

    def data(self, seed: int) -> Splits:
        x, _ = draw_table()
        y = x[:, 0] - x[:, 1].square()
        return Splits.make(torch.column_stack([x[:, :5], 1.8 * y + 32]), y, seed=seed)


class EmptyTest(Table):
    def data(self, seed: int) -> Splits:
        splits = super().data(seed)
        return Splits(splits.train, splits.val, splits.test.take(torch.arange(0)))


class WindowsInAnyOrder(BroadcastLoss):
    """Overlapping windows of a time series, split without `times`."""

    loss = Objective.loss

    def data(self, seed: int) -> Splits:
        series = torch.arange(260).div(9).sin() + 0.1 * torch.randn(260, generator=torch.Generator().manual_seed(0))
        windows = series.unfold(0, 7, 1)
        return Splits.make(windows[:, :6], windows[:, 6], seed=seed)


class FeaturesChosenBeforeTheSplit(Table):
    """The six of 2000 random features that agree best with random labels."""

    def data(self, seed: int) -> Splits:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(120, 2000, generator=generator), torch.randint(0, 2, (120,), generator=generator)
        best = (x[y == 1].mean(0) - x[y == 0].mean(0)).abs().topk(6).indices
        return Splits.make(x[:, best], y, seed=seed)


# A part of the message that states the fault; None if the checks cannot find it.
BROKEN: dict[type[Objective], str | None] = {
    DeadOutput: "the batch does not train body.weight",
    DetachedLoss: "the loss depends on no trainable parameter: it is detached",
    ShuffledLabels: None,
    FrozenLayers: "the batch does not train body.weight, body.bias",
    SoftmaxOverSamples: "the output of a sample depends on the other samples of its batch",
    LabelsFromOne: "the model returns [3] outputs per sample, but labels go up to 3",
    LossOnHidden: "the batch does not train head.weight, head.bias",
    MetricOnTraining: " for different samples: it does not use part",
    NegatedLoss: "although the loss fell",
    OptimizerOfACopy: "no parameter group has body.weight, body.bias",
    DropoutInEvaluation: "in evaluation mode, dropout() drops values at random; pass training=self.training",
    AttentionDropoutInEvaluation: "in evaluation mode, scaled_dot_product_attention() drops values at random",
    LabelAmongFeatures: "feature 5 of the inputs alone predicts the target almost perfectly",
    TargetNotUsed: "although the loss fell",
    ConstantInput: "the batch does not train body.weight",
    SoftmaxTwice: "the loss of one batch is 0.5",
    NoCausalMask: "the outputs depend on later inputs, which are the targets: use a causal mask",
    PredictsItsInput: None,  # targets of an autoencoder equal its inputs too
    ScaledInTrainingOnly: "although it fell to 0.0",
    BroadcastLoss: "the loss compares every output with every target",
    SameSplitTwice: "all 48 test samples are also validation samples",
    TestInTrain: "all 48 test samples are also train samples",
    AugmentedBeforeTheSplit: "are near duplicates of train inputs",
    GroupsAcrossSplits: "are near duplicates of train inputs",
    ConvertedTarget: "feature 5 of the inputs alone predicts the target almost perfectly",
    EmptyTest: "the test split is empty",
    WindowsInAnyOrder: "validation targets are values in train inputs",
    FeaturesChosenBeforeTheSplit: None,  # tensors do not show this
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    "broken",
    [pytest.param(broken, marks=[pytest.mark.soak] if number % 4 else []) for number, broken in enumerate(BROKEN)],
    ids=lambda broken: broken.__name__,
)
def test_faults_are_found_before_a_search(broken: type[Objective]) -> None:
    wanted, found = BROKEN[broken], find_faults(broken())
    assert bool(found) == (wanted is not None)
    assert wanted is None or any(wanted in line for line in found), found


def test_most_faults_are_found() -> None:
    assert len(BROKEN) == 28
    assert sum(wanted is not None for wanted in BROKEN.values()) >= 24


@pytest.mark.parametrize("sound", [Table, Recall, Text])
def test_the_same_objectives_without_a_fault_pass(sound: type[Objective]) -> None:
    assert find_faults(sound()) == []
