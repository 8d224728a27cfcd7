"""Broken objectives that pass the smoke test by their loss have signs of their faults; sound ones have none."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

from hpsearch import Dataset, ObjectiveError, Splits, Standardize, Step, TrainConfig
from hpsearch.objectives.training.checks.smoke import run_smoke_test
from tests.objectives.training.support import Wine


class Net(nn.Module):
    def __init__(self, train):
        super().__init__()
        self.scale, self.body, self.head = Standardize.fit(train.x), nn.Linear(13, 32), nn.Linear(32, 3)

    def encode(self, x):
        return self.body(self.scale(x)).relu()

    def forward(self, x):
        return self.head(self.encode(x))


class Sound(Wine):
    Model = Net

    def suggest(self, trial):
        return TrainConfig(lr=0.01)

    def model(self, config, train):
        return self.Model(train)


class DetachedBody(Sound):
    class Model(Net):
        def forward(self, x):
            return self.head(self.encode(x).detach())


class Unused(Sound):
    class Model(Net):
        def forward(self, x):
            return self.head(functional.pad(self.scale(x), (0, 19)))


class LayersInAList(Sound):
    class Model(Net):
        def __init__(self, train):
            super().__init__(train)
            self.layers = [nn.Linear(32, 32)]

        def encode(self, x):
            return self.layers[0](super().encode(x)).relu()


class MixedSamples(Sound):
    class Model(Net):
        def encode(self, x):
            codes = super().encode(x)
            return codes - codes.mean(0)


class RandomInputs(Sound):
    class Model(Net):
        def encode(self, x):
            return super().encode(torch.randn_like(x))


class LossOfABody(Sound):
    def step(self, model, batch, config):
        return Step(model.encode(batch.x).square().mean(1), outputs=model(batch.x))


class ParameterOfTheLoss(Sound):
    scale = nn.Parameter(torch.ones(()))

    def step(self, model, batch, config):
        outputs = model(batch.x)
        return Step(self.scale * functional.cross_entropy(outputs, batch.y, reduction="none"), outputs=outputs)


class NegatedLoss(Sound):
    loss_floor = None

    def step(self, model, batch, config):
        outputs = model(batch.x)
        return Step(-functional.cross_entropy(outputs, batch.y, reduction="none"), outputs=outputs)


class Constant:
    """A metric that does not depend on the outputs."""

    def __init__(self, value):
        self.value = value

    def update(self, output, target):
        pass

    def compute(self):
        return {"accuracy": self.value}

    def reset(self):
        pass


class ConstantMetric(Sound):
    def metrics(self, train):
        return Constant(0.9)


class FrozenByItsRate(Sound):
    def parameter_groups(self, model, config):
        return [{"params": [*model.body.parameters()], "lr": 0.0}, {"params": [*model.head.parameters()]}]


class EmptyAugment(Sound):
    def augment(self, config):
        return torch.zeros_like


class AugmentWithNan(Sound):
    def augment(self, config):
        return lambda x: (-x).log()


class Evaluated(Sound):
    """A metric of `evaluate`; the objective counts its calls."""

    metric, direction = "error", "minimize"
    calls = 0

    def evaluate(self, model, part, config):
        self.calls += 1
        return self.measure(model, part)

    def measure(self, model, part):
        return {"error": float(functional.cross_entropy(model(part.x), part.y))}


class ConstantEvaluation(Evaluated):
    def measure(self, model, part):
        return {"error": 0.5}


class UndefinedEvaluation(Evaluated):
    def measure(self, model, part):
        return super().measure(model, part) if self.calls == 1 else {"error": float("nan")}


class LostEvaluation(Evaluated):
    def measure(self, model, part):
        return super().measure(model, part) if self.calls == 1 else {}


@pytest.mark.parametrize(
    ("objective", "sign"),
    [
        (
            DetachedBody,
            "the batch does not train body.weight, body.bias: the loss does not depend on them, or their lr",
        ),
        (Unused, "the batch does not train body.weight, body.bias"),
        (FrozenByItsRate, "the batch does not train body.weight, body.bias"),
        (LossOfABody, "the batch does not train head.weight, head.bias"),
        (LayersInAList, "the layers in Model.layers are not trained or saved; use nn.ModuleList"),
        (ParameterOfTheLoss, "the loss depends on a parameter outside of the model (shape []), which would not be"),
        (MixedSamples, "in evaluation mode, the output of a sample depends on the other samples of its batch"),
        (RandomInputs, "the outputs of the model do not depend on its inputs"),
        (NegatedLoss, "accuracy of the batch (maximize) was "),
        (ConstantMetric, "accuracy of the batch (maximize) was 0.9 and is 0.9, although the loss fell"),
        (ConstantEvaluation, "evaluate() returned error 0.5 for the batch before and after training"),
        (UndefinedEvaluation, "metric 'error' of the validation split is nan after training"),
        (LostEvaluation, "metric 'error' is missing after training"),
        (EmptyAugment, "augment() makes all inputs equal"),
        (AugmentWithNan, "augment() makes inputs that are NaN or infinite"),
    ],
)
def test_a_broken_objective_has_a_sign_of_its_fault(objective, sign):
    result = run_smoke_test(objective())
    assert result.passed, result.reason
    assert [found for found in result.signs if found.startswith(sign)], result.signs


class Frozen(Sound):
    class Model(Net):
        def __init__(self, train):
            super().__init__(train)
            self.body.requires_grad_(False)


class Noisy(Sound):
    class Model(Net):
        def encode(self, x):
            codes = super().encode(x)
            return codes + 0.01 * torch.randn_like(codes)


class Normalized(Sound):
    class Model(Net):
        def __init__(self, train):
            super().__init__(train)
            self.norm = nn.BatchNorm1d(32)

        def encode(self, x):
            return self.norm(super().encode(x))


class ZeroStart(Sound):
    """The body has no gradient before the first step."""

    class Model(Net):
        def __init__(self, train):
            super().__init__(train)
            nn.init.zeros_(self.head.weight)


class Augmented(Sound):
    def augment(self, config):
        return lambda x: x + 0.1 * torch.randn_like(x)


class Autoencoder(Sound):
    metric, direction = "loss", "minimize"

    class Model(Net):
        def __init__(self, train):
            super().__init__(train)
            self.head = nn.Linear(32, 13)

    def step(self, model, batch, config):
        return Step((model(batch.x) - model.scale(batch.x)).square().mean(1))


class Experts(Sound):
    """A mixture of experts, each of which gets the samples with one value of a code; few samples have code 7."""

    class Model(Net):
        def __init__(self, train):
            super().__init__(train)
            self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
            self.cuts = nn.Buffer(train.x[:, 0].quantile(torch.tensor([0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.97])))

        def encode(self, x):
            codes, chosen = super().encode(x), torch.bucketize(x[:, 0].contiguous(), self.cuts)
            for number, expert in enumerate(self.experts):
                rows = (chosen == number).nonzero()[:, 0]
                if len(rows):
                    codes = codes.index_copy(0, rows, expert(codes[rows]))
            return codes


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "objective", [Sound, Frozen, Noisy, Normalized, ZeroStart, Augmented, Autoencoder, Evaluated, Experts]
)
def test_a_sound_objective_has_no_signs(objective, seed):
    result = run_smoke_test(objective(), seed=seed)
    assert (result.passed, result.signs) == (True, ()), result.reason


class WithTeacher(Sound):
    """A frozen copy that is no part of the model."""

    class Model(Net):
        def __init__(self, train):
            super().__init__(train)
            self.teachers = [nn.Linear(13, 3).requires_grad_(False)]


class SingleClass(Sound):
    """The accuracy of the batch is 1 before the first step."""

    def metrics(self, train):
        return Constant(1.0)


class MarkedTraining(Sound):
    """The step accepts training samples, which have a mark, in training mode only."""

    def data(self, seed):
        parts = [part for _, part in super().data(seed).parts()]
        marks = [torch.full((len(part), 1), float(number == 0)) for number, part in enumerate(parts)]
        marked = zip(parts, marks, strict=True)
        return Splits(*(dataclasses.replace(part, x=torch.cat([part.x, mark], dim=1)) for part, mark in marked))

    def model(self, config, train):
        return self.Model(Dataset(train.x[:, :13], train.y))

    def step(self, model, batch, config):
        x, mark = batch.x[:, :13], batch.x[:, 13]
        assert bool((mark == float(model.training)).all())
        outputs = model(x)
        return Step(functional.cross_entropy(outputs, batch.y, reduction="none"), outputs=outputs)


@pytest.mark.parametrize("objective", [WithTeacher, SingleClass, MarkedTraining])
def test_intended_and_undecided_cases_have_no_signs(objective):
    assert run_smoke_test(objective()).signs == ()


def test_signs_replace_the_hint_of_a_failed_test():
    class NotFitted(DetachedBody):
        loss_floor = -1.0

    result = run_smoke_test(NotFitted(), steps=50)
    assert not result.passed
    assert "; the batch does not train body.weight, body.bias: " in result.reason
    assert "set loss_floor" not in result.reason


class NoGradient(Sound):
    class Model(Net):
        def forward(self, x):
            return super().forward(x).detach()


def test_a_loss_without_gradients_is_an_error():
    with pytest.raises(ObjectiveError, match="the loss depends on no trainable parameter: it is detached, "):
        run_smoke_test(NoGradient())
