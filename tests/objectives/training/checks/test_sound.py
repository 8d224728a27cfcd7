"""20 sound objectives of different fields: the checks before a search find no fault, whatever the seed."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpsearch import Batch, Dataset, Objective, Splits, Step, TrainConfig
from hpsearch.objectives.training.checks.data_leaks import find_data_leaks
from hpsearch.objectives.training.checks.smoke import run_smoke_test
from hpsearch.objectives.training.loop.prepare import prepare_splits

SAMPLES = 160
Data = tuple[Any, Any]


class Small(Objective):
    """An objective with synthetic data; `draw` makes the samples, and `build` the network."""

    options: ClassVar[dict[str, Any]] = {}

    def suggest(self, trial: Any) -> TrainConfig:
        return TrainConfig(lr=0.01, **self.options)

    def data(self, seed: int) -> Splits:
        x, y = self.draw(torch.Generator().manual_seed(seed))
        return Splits.make(x, y, seed=seed)

    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        return self.build()

    def draw(self, generator: torch.Generator) -> Data:
        raise NotImplementedError

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def integers(generator: torch.Generator, high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=generator)


class Tabular(Small):
    """Three classes; batch norm and dropout."""

    def draw(self, generator: torch.Generator) -> Data:
        x = normal(generator, SAMPLES, 6)
        return x, (x[:, :3] + 0.3 * normal(generator, SAMPLES, 3)).argmax(1)

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3))


class Imbalanced(Small):
    """One logit, a rare class, and weighted samples."""

    metric = "auroc"

    def draw(self, generator: torch.Generator) -> Data:
        x = normal(generator, SAMPLES, 6)
        return x, (x[:, 0] + 0.3 * normal(generator, SAMPLES) > 1).long()

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))


class Regression(Small):
    metric, direction = "rmse", "minimize"

    def draw(self, generator: torch.Generator) -> Data:
        x = normal(generator, SAMPLES, 6)
        return x, (x[:, 0] * x[:, 1] + x[:, 2])[:, None]


class HeteroscedasticRegression(Small):
    """Gaussian likelihood, whose loss may be negative."""

    metric, direction, loss_floor = "loss", "minimize", None

    def draw(self, generator: torch.Generator) -> Data:
        return Regression.draw(self, generator)

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 32), nn.SiLU(), nn.Linear(32, 2))

    def step(self, model: nn.Module, batch: Batch, config: TrainConfig) -> Step:
        mean, log_var = model(batch.x).chunk(2, dim=1)
        return Step(functional.gaussian_nll_loss(mean, batch.y, log_var.exp(), reduction="none")[:, 0])


class MultiLabel(Small):
    metric, direction = "loss", "minimize"

    def draw(self, generator: torch.Generator) -> Data:
        x = normal(generator, SAMPLES, 6)
        return x, (x[:, :4] > 0).float()

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4))

    def loss(self, config: TrainConfig, train: Dataset) -> nn.Module:
        return nn.BCEWithLogitsLoss()


class Images(Small):
    """A residual network on noisy stripes, with augmentation."""

    def draw(self, generator: torch.Generator) -> Data:
        y = integers(generator, 2, SAMPLES)
        stripes = torch.tensor([1.0, -1.0]).repeat(4).expand(8, 8)
        images = torch.where(y[:, None, None] == 1, stripes, stripes.T)[:, None]
        return images + normal(generator, SAMPLES, 1, 8, 8), y

    def build(self) -> nn.Module:
        first = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2))
        return nn.Sequential(first, nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 2))

    def augment(self, config: TrainConfig) -> Any:
        return lambda x: x + 0.1 * torch.randn_like(x)


class Segmentation(Small):
    """Classes of pixels, and the mean IoU of a whole split."""

    metric = "iou"

    def draw(self, generator: torch.Generator) -> Data:
        images = normal(generator, SAMPLES, 1, 8, 8)
        smooth = functional.avg_pool2d(images, 3, stride=1, padding=1)
        return images, (smooth[:, 0] > 0).long()

    def build(self) -> nn.Module:
        layers = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()
        return nn.Sequential(*layers, nn.Conv2d(16, 2, 1))

    def step(self, model: nn.Module, batch: Batch, config: TrainConfig) -> Step:
        return Step(functional.cross_entropy(model(batch.x), batch.y))

    def evaluate(self, model: nn.Module, part: Dataset, config: TrainConfig) -> dict[str, float]:
        found, wanted = model(part.x).argmax(1) == 1, part.y == 1
        return {"iou": float((found & wanted).sum() / (found | wanted).sum())}


class Detection(Small):
    """One box in each image, or none: a class and a box, whose loss counts only boxes."""

    metric, direction = "loss", "minimize"

    def draw(self, generator: torch.Generator) -> Data:
        labels, corner = integers(generator, 2, SAMPLES), integers(generator, 5, SAMPLES, 2)
        images = 0.4 * normal(generator, SAMPLES, 1, 8, 8)
        for image, label, (top, left) in zip(images, labels, corner, strict=True):
            image[0, top : top + 3, left : left + 3] += 2.0 * label
        return images, {"label": labels, "box": torch.cat([corner, corner + 3], dim=1) / 8}

    def build(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 64), nn.ReLU(), nn.Linear(64, 6)
        )

    def step(self, model: nn.Module, batch: Batch, config: TrainConfig) -> Step:
        outputs, label = model(batch.x), batch.y["label"]
        boxes = functional.smooth_l1_loss(outputs[:, 2:], batch.y["box"], reduction="none").mean(1)
        return Step(functional.cross_entropy(outputs[:, :2], label, reduction="none") + label * boxes)


class LanguageModel(Small):
    """A causal transformer layer that predicts the next code."""

    metric, direction, loss_floor = "loss", "minimize", None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.place = nn.Embedding(9, 32), nn.Parameter(0.1 * torch.randn(12, 32))
            self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
            self.head = nn.Linear(32, 9)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.head(self.layer(self.embed(x) + self.place, src_mask=mask, is_causal=True))

    def draw(self, generator: torch.Generator) -> Data:
        codes = integers(generator, 9, SAMPLES, 3).repeat(1, 5)[:, :13]
        return codes[:, :-1], codes[:, 1:]

    def build(self) -> nn.Module:
        return self.Model()

    def step(self, model: nn.Module, batch: Batch, config: TrainConfig) -> Step:
        return Step(functional.cross_entropy(model(batch.x).flatten(0, 1), batch.y.flatten()))


class MaskedText(Small):
    """Classification of padded texts by attention without order, with a mask."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 16, padding_idx=0), nn.Linear(16, 2)
            self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)

        def forward(self, codes: Tensor, mask: Tensor) -> Tensor:
            embedded = self.embed(codes)
            mixed = self.attention(embedded, embedded, embedded, key_padding_mask=mask == 0, need_weights=False)[0]
            return self.head(((embedded + mixed) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))

    def draw(self, generator: torch.Generator) -> Data:
        codes, lengths = integers(generator, 19, SAMPLES, 10) + 1, integers(generator, 7, SAMPLES) + 4
        mask = torch.arange(10) < lengths[:, None]
        return {"codes": codes * mask, "mask": mask}, ((codes * mask) > 15).any(1).long()

    def build(self) -> nn.Module:
        return self.Model()


class Forecast(Small):
    """The next value of time series, by an LSTM; split by time."""

    metric, direction, loss_floor = "rmse", "minimize", 0.01

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.units, self.head = nn.LSTM(1, 32, batch_first=True), nn.Linear(32, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.units(x[..., None])[0][:, -1])[:, 0]

    def data(self, seed: int) -> Splits:
        generator = torch.Generator().manual_seed(seed)
        series = torch.arange(SAMPLES + 12).div(5).sin() + 0.1 * normal(generator, SAMPLES + 12)
        windows = series.unfold(0, 13, 1)
        return Splits.make(windows[:, :12], windows[:, 12], seed=seed, times=range(len(windows)))

    def build(self) -> nn.Module:
        return self.Model()


class Variational(Small):
    """A variational autoencoder; the loss is a bound without a known floor."""

    metric, direction, loss_floor = "loss", "minimize", None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
            self.decoder = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, log_var = self.encoder(x).chunk(2, dim=1)
            return self.decoder(mean + (log_var / 2).exp() * torch.randn_like(mean)), mean, log_var

    def draw(self, generator: torch.Generator) -> Data:
        x = normal(generator, SAMPLES, 2) @ normal(generator, 2, 8) + 0.1 * normal(generator, SAMPLES, 8)
        return x, x

    def build(self) -> nn.Module:
        return self.Model()

    def step(self, model: nn.Module, batch: Batch, config: TrainConfig) -> Step:
        decoded, mean, log_var = model(batch.x)
        kl = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1)
        return Step((decoded - batch.x).square().sum(1) + kl, metrics={"kl": kl.mean()})


class Diffusion(Small):
    """Prediction of the noise at a random time; `evaluate` measures samples."""

    metric, direction, loss_floor = "distance", "minimize", None

    def draw(self, generator: torch.Generator) -> Data:
        angle = 6.28 * torch.rand(SAMPLES, generator=generator)
        points = torch.stack([angle.sin(), angle.cos()], dim=1) + 0.05 * normal(generator, SAMPLES, 2)
        return points, points

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 2))

    def step(self, model: nn.Module, batch: Batch, config: TrainConfig) -> Step:
        time, noise = torch.rand(batch.size, 1), torch.randn_like(batch.x)
        noisy = (1 - time).sqrt() * batch.x + time.sqrt() * noise
        return Step((model(torch.cat([noisy, time], dim=1)) - noise).square().mean(1))

    def evaluate(self, model: nn.Module, part: Dataset, config: TrainConfig) -> dict[str, float]:
        points = torch.randn(len(part), 2)
        for time in torch.linspace(1, 0.1, 10):
            points = points - 0.2 * model(torch.cat([points, time.expand(len(points), 1)], dim=1))
        return {"distance": float(torch.cdist(points, part.x).amin(1).mean())}


class MetricLearning(Small):
    """Contrastive loss within a batch; `evaluate` gives recall@1 of a whole split."""

    metric, loss_floor, bounds = "recall", None, (0, 1)

    def draw(self, generator: torch.Generator) -> Data:
        y = integers(generator, 5, SAMPLES)
        return normal(generator, 5, 6)[y] + 0.8 * normal(generator, SAMPLES, 6), y

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 8))

    def step(self, model: nn.Module, batch: Batch, config: TrainConfig) -> Step:
        codes = functional.normalize(model(batch.x), dim=1)
        near = (codes @ codes.T / 0.2).fill_diagonal_(-1e4).log_softmax(1)
        same = (batch.y[:, None] == batch.y).fill_diagonal_(fill_value=False)
        return Step(-(near * same).sum(1) / same.sum(1).clamp(min=1))

    def evaluate(self, model: nn.Module, part: Dataset, config: TrainConfig) -> dict[str, float]:
        codes = functional.normalize(model(part.x), dim=1)
        nearest = (codes @ codes.T).fill_diagonal_(-2).argmax(1)
        return {"recall": float((part.y[nearest] == part.y).float().mean())}


class Survival(Small):
    """Cox regression with censored times."""

    metric, direction, loss_floor = "loss", "minimize", None

    def draw(self, generator: torch.Generator) -> Data:
        x = normal(generator, SAMPLES, 6)
        time = torch.rand(SAMPLES, generator=generator).log().neg() * (-2 * x[:, 0]).exp()
        return x, {"time": time, "event": torch.rand(SAMPLES, generator=generator).gt(0.3).float()}

    def step(self, model: nn.Module, batch: Batch, config: TrainConfig) -> Step:
        order = batch.y["time"].argsort(descending=True)
        risk, event = model(batch.x)[order, 0], batch.y["event"][order]
        return Step(-((risk - risk.logcumsumexp(0)) * event).sum() / event.sum().clamp(min=1), weight=event.sum())


class Recommendation(Small):
    """Embeddings of users and items, with a random negative item for each sample."""

    metric, direction, loss_floor = "loss", "minimize", None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = nn.Embedding(20, 8), nn.Embedding(30, 8)

        def forward(self, user: Tensor, item: Tensor) -> Tensor:
            return (self.users(user) * self.items(item)).sum(1)

    def draw(self, generator: torch.Generator) -> Data:
        user = integers(generator, 20, SAMPLES)
        item = (user + integers(generator, 5, SAMPLES)) % 30
        return {"user": user, "item": item}, torch.ones(SAMPLES)

    def build(self) -> nn.Module:
        return self.Model()

    def step(self, model: nn.Module, batch: Batch, config: TrainConfig) -> Step:
        other = torch.randint(0, 30, (batch.size,))
        return Step(-functional.logsigmoid(model(**batch.x) - model(batch.x["user"], other)))


class Ranking(Small):
    """Listwise loss over eight documents for each query."""

    metric, direction, loss_floor = "loss", "minimize", None

    def draw(self, generator: torch.Generator) -> Data:
        x = normal(generator, SAMPLES, 8, 6)
        return x, (x[..., 0] + 0.3 * normal(generator, SAMPLES, 8)).argmax(1)

    def step(self, model: nn.Module, batch: Batch, config: TrainConfig) -> Step:
        return Step(functional.cross_entropy(model(batch.x)[..., 0], batch.y, reduction="none"))


class Graphs(Small):
    """Classes of graphs by two rounds of messages on dense adjacency matrices."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 2)

        def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
            nodes = self.first(edges @ nodes + nodes).relu()
            return self.head(self.second(edges @ nodes + nodes).relu().mean(1))

    def draw(self, generator: torch.Generator) -> Data:
        edges = (torch.rand(SAMPLES, 7, 7, generator=generator) < 0.3).float().triu(1)
        edges = edges + edges.transpose(1, 2)
        degree = edges.sum((1, 2))
        return {"nodes": normal(generator, SAMPLES, 7, 4), "edges": edges}, (degree > degree.median()).long()

    def build(self) -> nn.Module:
        return self.Model()


class PointSets(Small):
    """A value of a set of points, by the maximum over the points."""

    metric, direction = "mae", "minimize"

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.point, self.head = nn.Sequential(nn.Linear(2, 64), nn.ReLU()), nn.Linear(64, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.point(x).amax(1))[:, 0]

    def draw(self, generator: torch.Generator) -> Data:
        x = normal(generator, SAMPLES, 9, 2)
        return x, x.norm(dim=2).amax(1)

    def build(self) -> nn.Module:
        return self.Model()


class Speech(Small):
    """Connectionist temporal classification: signals of ten frames with two or three symbols each."""

    metric, direction, loss_floor = "loss", "minimize", None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.units, self.head = nn.GRU(5, 32, batch_first=True, bidirectional=True), nn.Linear(64, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.units(x)[0]).log_softmax(2)

    def draw(self, generator: torch.Generator) -> Data:
        symbols, lengths = integers(generator, 4, SAMPLES, 3) + 1, integers(generator, 2, SAMPLES) + 2
        frames = symbols.repeat_interleave(3, dim=1) * (torch.arange(9) < 3 * lengths[:, None])
        signal = functional.one_hot(functional.pad(frames, (0, 1)), 5) + 0.3 * normal(generator, SAMPLES, 10, 5)
        return signal, {"symbols": symbols, "length": lengths}

    def build(self) -> nn.Module:
        return self.Model()

    def step(self, model: nn.Module, batch: Batch, config: TrainConfig) -> Step:
        frames, length = torch.full((batch.size,), 10), batch.y["length"]
        outputs = model(batch.x).transpose(0, 1)
        return Step(functional.ctc_loss(outputs, batch.y["symbols"], frames, length, reduction="none") / length)


SOUND = [
    Tabular, Imbalanced, Regression, HeteroscedasticRegression, MultiLabel, Images, Segmentation, Detection,
    LanguageModel, MaskedText, Forecast, Variational, Diffusion, MetricLearning, Survival, Recommendation, Ranking,
    Graphs, PointSets, Speech,
]  # fmt: skip


def check(objective: Objective, seed: int) -> list[str]:
    leaks = find_data_leaks(objective, *prepare_splits(objective, seed))
    result = run_smoke_test(objective, seed=seed)
    return [*leaks.values(), *([] if result.passed else [result.reason]), *result.signs]


@pytest.mark.parametrize(
    "sound",
    [pytest.param(sound, marks=[pytest.mark.soak] if number % 3 else []) for number, sound in enumerate(SOUND)],
    ids=lambda sound: sound.__name__,
)
def test_a_sound_objective_has_no_fault(sound: type[Objective]) -> None:
    assert check(sound(), seed=0) == []


@pytest.mark.soak
@pytest.mark.parametrize("sound", SOUND, ids=lambda sound: sound.__name__)
def test_a_sound_objective_has_no_fault_with_any_seed(sound: type[Objective]) -> None:
    assert {seed: faults for seed in range(1, 20) if (faults := check(sound(), seed))} == {}
