"""Eight problems whose networks are trained inside the simulation, an epoch at a time, instead of by a surrogate.

The metric is the accuracy in percent. A search sees that of 400 validation samples; the true one is that of 2,000 test
samples. The problems and their assignment to tuning and evaluation were fixed before any search was run on them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.search_space import TrialProtocol

EPOCHS = 27
VALIDATION, TEST = 400, 2000  # samples
PERCENT = 100

Params = Mapping[str, Any]


class LiveObjective(BaseObjective):
    """A problem: search space, samples, and network. The learning rate follows a cosine to 0."""

    metric = "accuracy"
    direction = "maximize"
    train_size: ClassVar[int] = 600

    def suggest(self, trial: TrialProtocol) -> dict[str, Any]:
        return {
            "lr": trial.suggest_float("lr", 1e-5, 0.3, log=True),
            "momentum": trial.suggest_float("momentum", 0.0, 0.99),
            "batch_size": trial.suggest_int("batch_size", 16, 256, log=True),
            "weight_decay": trial.suggest_float("weight_decay", 1e-4, 10.0, log=True),
            **self.suggest_network(trial),
        }

    def suggest_network(self, trial: TrialProtocol) -> dict[str, Any]:
        """Return the parameters of the network."""
        raise NotImplementedError

    def draw(self, samples: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs [samples, ...] and class labels [samples]."""
        raise NotImplementedError

    def network(self, params: Params) -> nn.Module:
        """Return an untrained network."""
        raise NotImplementedError

    def corrupt(self, labels: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Return the labels of the training samples."""
        return labels


def make_mlp(inputs: int, outputs: int, params: Params, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    net, before = nn.Sequential(nn.Flatten()), inputs
    for _ in range(params["layers"]):
        net.extend([nn.Linear(before, params["width"]), activation(), nn.Dropout(params.get("dropout", 0.0))])
        before = params["width"]
    return net.append(nn.Linear(before, outputs))


def suggest_mlp(trial: TrialProtocol, layers: int, width: int) -> dict[str, Any]:
    return {
        "layers": trial.suggest_int("layers", 1, layers),
        "width": trial.suggest_int("width", 4, width, log=True),
        "dropout": trial.suggest_float("dropout", 0.0, 0.8),
    }


class Clusters(LiveObjective):
    """Six classes of three overlapping Gaussians each in 16 dimensions."""

    name = "clusters"

    def suggest_network(self, trial: TrialProtocol) -> dict[str, Any]:
        return suggest_mlp(trial, 4, 256)

    def draw(self, samples: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        centres = 1.2 * np.random.default_rng(1).normal(size=(18, 16))
        which = random.integers(18, size=samples)
        return centres[which] + random.normal(size=(samples, 16)), which % 6

    def network(self, params: Params) -> nn.Module:
        return make_mlp(16, 6, params)


class Patterns(LiveObjective):
    """Images of 8 x 8 pixels with one of six patterns at a random position, for a convolutional network."""

    name = "patterns"

    def suggest_network(self, trial: TrialProtocol) -> dict[str, Any]:
        return {
            "channels": trial.suggest_int("channels", 2, 24, log=True),
            "kernel": trial.suggest_categorical("kernel", [3, 5]),
            "dropout": trial.suggest_float("dropout", 0.0, 0.8),
            "normalize": trial.suggest_categorical("normalize", [False, True]),
        }

    def draw(self, samples: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        patterns = np.random.default_rng(2).normal(size=(6, 3, 3))
        labels, rows, columns = random.integers(6, size=samples), *random.integers(6, size=(2, samples))
        images = random.normal(size=(samples, 1, 8, 8))
        for image, label, row, column in zip(images, labels, rows, columns, strict=True):
            image[0, row : row + 3, column : column + 3] += 1.5 * patterns[label]
        return images, labels

    def network(self, params: Params) -> nn.Module:
        channels, kernel = params["channels"], params["kernel"]
        norm = nn.BatchNorm2d(channels) if params["normalize"] else nn.Identity()
        first, second = (nn.Conv2d(of, channels, kernel, padding=kernel // 2) for of in (1, channels))
        pooled = (nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Dropout(params["dropout"]), nn.Linear(channels, 6))
        return nn.Sequential(first, norm, nn.ReLU(), second, nn.ReLU(), *pooled)


class Recurrent(nn.Module):
    """A recurrent network that classifies sequences [samples, steps, inputs] by its last state."""

    def __init__(self, kind: str, inputs: int, hidden: int, outputs: int, scale: float) -> None:
        super().__init__()
        self.recurrent = {"rnn": nn.RNN, "gru": nn.GRU}[kind](inputs, hidden, batch_first=True)
        self.head = nn.Linear(hidden, outputs)
        with torch.no_grad():
            for name, parameter in self.recurrent.named_parameters():
                if name.startswith("weight_hh"):
                    parameter.mul_(scale)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.recurrent(x)[0]
        out: Tensor = self.head(states[:, -1])
        return out


class Memory(LiveObjective):
    """The first of 12 symbols, for a recurrent network: a plateau comes first, which few configurations leave."""

    name = "memory"

    def suggest_network(self, trial: TrialProtocol) -> dict[str, Any]:
        return {
            "kind": trial.suggest_categorical("kind", ["rnn", "gru"]),
            "hidden": trial.suggest_int("hidden", 4, 48, log=True),
            "scale": trial.suggest_float("scale", 0.1, 5.0, log=True),
        }

    def draw(self, samples: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        symbols = random.integers(5, size=(samples, 12))
        return np.eye(5)[symbols], symbols[:, 0]

    def network(self, params: Params) -> nn.Module:
        return Recurrent(params["kind"], 5, params["hidden"], 5, params["scale"])


class Spirals(LiveObjective):
    """Three spiral arms in two dimensions."""

    name = "spirals"

    def suggest_network(self, trial: TrialProtocol) -> dict[str, Any]:
        return {
            **suggest_mlp(trial, 5, 128),
            "activation": trial.suggest_categorical("activation", ["relu", "tanh", "silu"]),
        }

    def draw(self, samples: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        labels, radius = random.integers(3, size=samples), np.sqrt(random.random(samples))
        angle = 6 * radius + 2 * math.pi * labels / 3 + 0.2 * random.normal(size=samples)
        return 2 * radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1), labels

    def network(self, params: Params) -> nn.Module:
        activation = {"relu": nn.ReLU, "tanh": nn.Tanh, "silu": nn.SiLU}[params["activation"]]
        return make_mlp(2, 3, params, activation)


class MarkedSum(LiveObjective):
    """Whether two marked numbers in a sequence of 10 have a sum above 1: a plateau comes first, as in `Memory`."""

    name = "marked_sum"
    train_size: ClassVar[int] = 1000

    def suggest_network(self, trial: TrialProtocol) -> dict[str, Any]:
        return Memory.suggest_network(self, trial)  # type: ignore[arg-type]  # it uses only `trial`

    def draw(self, samples: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        numbers, marks = random.random((samples, 10)), np.zeros((samples, 10))
        first, second = random.integers(5, size=samples), random.integers(5, 10, size=samples)
        marks[np.arange(samples), first] = marks[np.arange(samples), second] = 1
        return np.stack([numbers, marks], axis=2), ((numbers * marks).sum(axis=1) > 1).astype(np.int64)

    def network(self, params: Params) -> nn.Module:
        return Recurrent(params["kind"], 2, params["hidden"], 2, params["scale"])


class Deep(LiveObjective):
    """A deep network without normalization, whose initial weights decide whether it learns at all."""

    name = "deep"

    def suggest_network(self, trial: TrialProtocol) -> dict[str, Any]:
        return {
            "layers": trial.suggest_int("layers", 2, 16),
            "width": trial.suggest_int("width", 8, 64, log=True),
            "gain": trial.suggest_float("gain", 0.1, 5.0, log=True),
            "activation": trial.suggest_categorical("activation", ["relu", "tanh"]),
        }

    def draw(self, samples: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        x = random.normal(size=(samples, 4))
        return x, (np.sign(x[:, 0] * x[:, 1]) + np.sign(x[:, 2] * x[:, 3]) + 2).astype(np.int64) // 2

    def network(self, params: Params) -> nn.Module:
        net = make_mlp(4, 3, params, {"relu": nn.ReLU, "tanh": nn.Tanh}[params["activation"]])
        for layer in net:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=params["gain"] / math.sqrt(layer.in_features))
        return net


class WrongLabels(LiveObjective):
    """Two of five training labels are random: without regularization, networks are good early and memorize later."""

    name = "wrong_labels"

    def suggest_network(self, trial: TrialProtocol) -> dict[str, Any]:
        return {
            "layers": trial.suggest_int("layers", 1, 3),
            "width": trial.suggest_int("width", 16, 256, log=True),
            "dropout": trial.suggest_float("dropout", 0.0, 0.9),
            "smoothing": trial.suggest_float("smoothing", 0.0, 0.9),
        }

    def draw(self, samples: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        directions = np.random.default_rng(3).normal(size=(20, 4))
        x = random.normal(size=(samples, 20))
        return x, np.argmax(x @ directions + np.abs(x) @ directions[:, ::-1], axis=1)

    def corrupt(self, labels: np.ndarray, random: np.random.Generator) -> np.ndarray:
        return np.where(random.random(len(labels)) < 0.4, random.integers(4, size=len(labels)), labels)

    def network(self, params: Params) -> nn.Module:
        return make_mlp(20, 4, params)


class Language(LiveObjective):
    """The next of 12 tokens after four others, drawn from a random process that depends on the last two."""

    name = "language"
    train_size: ClassVar[int] = 1500

    def suggest_network(self, trial: TrialProtocol) -> dict[str, Any]:
        return {"embedding": trial.suggest_int("embedding", 2, 32, log=True), **suggest_mlp(trial, 3, 128)}

    def draw(self, samples: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        chances = np.random.default_rng(4).dirichlet(np.full(12, 0.15), size=(12, 12)).cumsum(axis=2)
        tokens = random.integers(12, size=(samples, 12))
        for place in range(2, 12):
            drawn = random.random((samples, 1)) > chances[tokens[:, place - 2], tokens[:, place - 1]]
            tokens[:, place] = drawn.sum(axis=1).clip(max=11)
        return tokens[:, -5:-1], tokens[:, -1]

    def network(self, params: Params) -> nn.Module:
        embedding = nn.Embedding(12, params["embedding"])
        return nn.Sequential(embedding, make_mlp(4 * params["embedding"], 12, params))


TUNING: tuple[type[LiveObjective], ...] = (Clusters, Patterns, Memory, Spirals)
HELD_OUT: tuple[type[LiveObjective], ...] = (MarkedSum, Deep, WrongLabels, Language)


@dataclass(frozen=True)
class Part:
    """The samples of one part."""

    x: Tensor
    y: Tensor


@cache
def draw_parts(objective: type[LiveObjective]) -> tuple[Part, Part, Part]:
    """Return training, validation and test samples, which are the same for all searches."""
    random, problem, parts = np.random.default_rng(5), objective(), []
    for size in (objective.train_size, VALIDATION, TEST):
        x, y = problem.draw(size, random)
        labels = problem.corrupt(y, random) if not parts else y
        inputs = torch.from_numpy(x)
        parts.append(Part(inputs.float() if inputs.is_floating_point() else inputs, torch.from_numpy(labels).long()))
    return parts[0], parts[1], parts[2]


class LiveRun:
    """One training, which trains an epoch when its value is first read."""

    def __init__(self, objective: type[LiveObjective], params: Params, seed: int) -> None:
        self._parts = draw_parts(objective)
        self._params, self._values = params, list[tuple[float, float]]()
        self._generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._model = objective().network(params)
            self._state = torch.get_rng_state()  # of dropout
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=params["lr"],
            betas=(params["momentum"], 0.999),
            weight_decay=params["weight_decay"],
            foreach=True,
        )

    @property
    def trained(self) -> int:
        """The number of epochs so far."""
        return len(self._values)

    def read(self, epoch: int) -> tuple[float, float]:
        """Return validation and test accuracy in percent after an epoch, counted from 0."""
        while len(self._values) <= epoch:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self._state)
                self._train(len(self._values))
                self._state = torch.get_rng_state()
            self._values.append((self._measure(self._parts[1]), self._measure(self._parts[2])))
        return self._values[epoch]

    def _train(self, epoch: int) -> None:
        train, size = self._parts[0], self._params["batch_size"]
        batches = torch.randperm(len(train.y), generator=self._generator).split(size)
        self._model.train()
        for index, rows in enumerate(batches):
            progress = (epoch + index / len(batches)) / EPOCHS
            self._optimizer.param_groups[0]["lr"] = self._params["lr"] * 0.5 * (1 + math.cos(math.pi * progress))
            self._optimizer.zero_grad()
            smoothing = self._params.get("smoothing", 0.0)
            loss = functional.cross_entropy(self._model(train.x[rows]), train.y[rows], label_smoothing=smoothing)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
            nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()

    @torch.no_grad()
    def _measure(self, part: Part) -> float:
        self._model.eval()
        return PERCENT * float((self._model(part.x).argmax(dim=1) == part.y).double().mean())


@dataclass(frozen=True)
class LiveCurve(Sequence[float]):
    """The validation (`column` 0) or test accuracies (1) of a training."""

    run: LiveRun
    column: int

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[epoch] for epoch in range(EPOCHS)[place]]
        return self.run.read(range(EPOCHS)[place])[self.column]

    def __len__(self) -> int:
        return EPOCHS


@dataclass(frozen=True)
class LiveTraining:
    """The training of a problem's networks."""

    objective: type[LiveObjective]

    def trial(self, params: Params, random: np.random.Generator) -> tuple[LiveCurve, LiveCurve]:
        torch.set_num_threads(1)
        run = LiveRun(self.objective, params, int(random.integers(2**31)))
        return LiveCurve(run, 0), LiveCurve(run, 1)

    def best_known(self) -> float:
        return -math.inf

    def digest(self) -> str:
        """Return a digest of everything that determines the curves."""
        return hashlib.sha256(Path(__file__).read_bytes() + torch.__version__.encode()).hexdigest()[:16]
