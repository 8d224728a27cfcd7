"""Handwritten digits, drawn by a generative adversarial network: a loop of one's own, with two optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpsearch.objectives.builtin.digits import Digits
from hpsearch.objectives.custom_loop.loop_objective import LoopObjective
from hpsearch.objectives.training.data.splits import Splits

if TYPE_CHECKING:
    from hpsearch.objectives.custom_loop.loop_trial import LoopTrial
    from hpsearch.objectives.search_space import TrialProtocol

DRAWN = 2000  # images, to be compared with the real ones


@dataclass(frozen=True)
class GanConfig:
    """How one pair of networks trains."""

    drawing_lr: float = 1e-3
    judging_lr: float = 3e-3
    width: int = 128
    noise: int = 16
    dropout: float = 0.3
    batch_size: int = 32


class Gan(LoopObjective):
    """Learns to draw scikit-learn's digits (Goodfellow et al. 2014), judged by a Frechet distance, 0 at best.

    It is the FID of Heusel et al. 2017, with the second hidden layer of a small classifier of digits in place of the
    Inception network: from drawn images to those of the validation split, and in `test` to those of the test split.
    """

    name: ClassVar[str] = "gan"
    metric = "frechet"
    direction = "minimize"
    epochs: ClassVar[int] = 60
    defaults: ClassVar[Mapping[str, Any]] = asdict(GanConfig())

    def suggest(self, trial: TrialProtocol) -> GanConfig:
        """A rate for each network, and their sizes."""
        return GanConfig(
            drawing_lr=trial.suggest_float("drawing_lr", 1e-4, 1e-2, log=True),
            judging_lr=trial.suggest_float("judging_lr", 1e-4, 1e-2, log=True),
            width=trial.suggest_int("width", 32, 256, log=True),
            noise=trial.suggest_int("noise", 4, 64, log=True),
            dropout=trial.suggest_float("dropout", 0.0, 0.5),
            batch_size=trial.suggest_categorical("batch_size", [32, 64]),
        )

    def run(self, trial: LoopTrial) -> None:
        """Both networks take a step in turn, over every batch of the training images."""
        seed = trial.split_seed
        splits = images(seed)
        real = splits.train.x.to(trial.device)
        parts = networks(trial.config, trial.device)
        for name, state in (trial.state or {}).items():
            parts[name].load_state_dict(state)
        for _ in trial.epochs():
            losses = [
                train_step(real[rows.to(trial.device)], trial.config, parts)
                for rows in torch.split(torch.randperm(len(real)), trial.config.batch_size)
            ]
            drawing, judging = (sum(loss) / len(losses) for loss in zip(*losses, strict=True))
            state = {name: part.state_dict() for name, part in parts.items()}
            trial.report(
                {
                    "frechet": distance(drawn(parts["drawing"], trial.config, trial.device), splits.val.x, seed),
                    "train_drawing_loss": drawing,
                    "train_judging_loss": judging,
                },
                state=state,
                best=state["drawing"],
            )

    def test(self, best: Any, config: GanConfig, device: torch.device, seed: int) -> Mapping[str, float]:
        """The distance to the images of the test split."""
        ours = drawn(restored(best, config).to(device), config, device)
        return {"frechet": distance(ours, images(seed).test.x, seed)}

    def export(self, best: Any, config: GanConfig) -> tuple[nn.Module, Tensor]:
        """What draws: noise [n, `noise`], normal -> images [n, 1, 8, 8] with pixels 0 to 16."""
        return restored(best, config), torch.randn(4, config.noise)


@cache
def images(seed: int) -> Splits:
    """Images [n, 1, 8, 8] with pixels 0 to 16, split as those of the objective `digits`."""
    return Digits().data(seed)


def networks(config: GanConfig, device: torch.device) -> dict[str, Any]:
    """What draws and what judges, and an optimizer for each; all have a `state_dict`."""
    width = config.width
    drawing = nn.Sequential(
        *(nn.Linear(config.noise, width), nn.BatchNorm1d(width), nn.ReLU()),
        *(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()),
        *(nn.Linear(width, 64), nn.Unflatten(1, (1, 8, 8)), Pixels()),
    ).to(device)
    judging = nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Dropout(config.dropout)),
        *(nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Dropout(config.dropout), nn.Linear(width, 1)),
    ).to(device)
    betas = (0.5, 0.999)  # Radford et al. 2016
    return {
        "drawing": drawing,
        "judging": judging,
        "draws": torch.optim.Adam(drawing.parameters(), config.drawing_lr, betas),
        "judges": torch.optim.Adam(judging.parameters(), config.judging_lr, betas),
    }


class Pixels(nn.Module):
    """Any number -> a pixel, 0 to 16."""

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        return 16 * x.sigmoid()


def train_step(real: Tensor, config: GanConfig, parts: dict[str, Any]) -> tuple[float, float]:
    """A step of what judges, then one of what draws, with the loss that does not saturate; both losses, in nats."""
    drawing, judging, draws, judges = parts.values()
    entropy = functional.binary_cross_entropy_with_logits
    fake = drawing(torch.randn(len(real), config.noise, device=real.device))
    yes, no = torch.ones(len(real), 1, device=real.device), torch.zeros(len(real), 1, device=real.device)
    judging_loss = entropy(judging(real / 16), yes) + entropy(judging(fake.detach() / 16), no)
    judges.zero_grad()
    torch.autograd.backward(judging_loss)
    judges.step()
    drawing_loss = entropy(judging(fake / 16), yes)
    draws.zero_grad()
    torch.autograd.backward(drawing_loss)
    draws.step()
    return drawing_loss.item(), judging_loss.item()


def restored(best: dict[str, Tensor], config: GanConfig) -> nn.Module:
    """What draws, with the weights of the best epoch, in evaluation mode."""
    drawing: nn.Module = networks(config, torch.device("cpu"))["drawing"]
    drawing.load_state_dict(best)
    return drawing.eval()


@torch.no_grad()
def drawn(drawing: nn.Module, config: GanConfig, device: torch.device) -> Tensor:
    """`DRAWN` images, on the CPU, drawn in evaluation mode."""
    found: Tensor = drawing.eval()(torch.randn(DRAWN, config.noise).to(device)).cpu()
    drawing.train()
    return found


def distance(ours: Tensor, real: Tensor, seed: int) -> float:
    """The Frechet distance between the features of images [n, 1, 8, 8], as if these were normal."""
    look = features(seed)
    (mean, cov), (other, other_cov) = ((x.mean(dim=0), x.T.cov()) for x in (look(ours), look(real)))
    root = torch.linalg.eigvals(cov @ other_cov).real.clamp_min(0).sqrt().sum()  # the trace of (cov @ other_cov)^1/2
    return float((mean - other).square().sum() + cov.trace() + other_cov.trace() - 2 * root)


@cache
def features(seed: int) -> Callable[[Tensor], Tensor]:
    """Images [n, 1, 8, 8] -> features [n, 32]: the second hidden layer of a classifier of the training digits."""
    from sklearn.neural_network import MLPClassifier

    train = images(seed).train
    found = MLPClassifier((64, 32), tol=1e-3, random_state=0).fit(train.x.flatten(1) / 16, train.y)
    layers = [torch.from_numpy(part) for pair in zip(found.coefs_, found.intercepts_, strict=True) for part in pair]

    def look(x: Tensor) -> Tensor:
        first = torch.relu(x.flatten(1).double() / 16 @ layers[0] + layers[1])
        return torch.relu(first @ layers[2] + layers[3])

    return look
