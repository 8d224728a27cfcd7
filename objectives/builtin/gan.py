"""Handwritten digits from a generative adversarial network: a custom training loop with two optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

GENERATED_IMAGES = 2000  # number of generated images that are compared with the real images


@dataclass(frozen=True)
class GanConfig:
    """Hyperparameters of the generator and the discriminator."""

    generator_lr: float
    discriminator_lr: float
    width: int
    noise: int
    dropout: float
    batch_size: int


class Gan(LoopObjective):
    """Generation of images like scikit-learn's digits (Goodfellow et al. 2014); the metric is a Frechet distance.

    The metric is the FID of Heusel et al. 2017, except that the features come from the second hidden layer of a small
    digit classifier instead of the Inception network. Each epoch compares generated images with the validation split,
    and `test` compares them with the test split. The optimum is 0.
    """

    name: ClassVar[str] = "gan"
    metric = "frechet"
    direction = "minimize"
    epochs: ClassVar[int] = 60
    defaults: ClassVar[Mapping[str, Any]] = {
        **{"drawing_lr": 1e-3, "judging_lr": 3e-3},  # the stored names of the learning rates
        **{"width": 128, "noise": 16, "dropout": 0.3, "batch_size": 32},
    }

    def suggest(self, trial: TrialProtocol) -> GanConfig:
        """Suggest the learning rates and sizes of the two networks, the dropout and the batch size."""
        return GanConfig(
            generator_lr=trial.suggest_float("drawing_lr", 1e-4, 1e-2, log=True),
            discriminator_lr=trial.suggest_float("judging_lr", 1e-4, 1e-2, log=True),
            width=trial.suggest_int("width", 32, 256, log=True),
            noise=trial.suggest_int("noise", 4, 64, log=True),
            dropout=trial.suggest_float("dropout", 0.0, 0.5),
            batch_size=trial.suggest_categorical("batch_size", [32, 64]),
        )

    def run(self, trial: LoopTrial) -> None:
        """Train the generator and the discriminator by alternating steps on every batch of training images."""
        seed, config, device = trial.split_seed, trial.config, trial.device
        splits = load_images(seed)
        real = splits.train.x.to(device)
        parts = build_networks(config, device)
        for name, state in (trial.state or {}).items():
            parts[name].load_state_dict(state)
        for _ in trial.epochs():
            losses = [
                train_step(real[rows.to(device)], config, parts)
                for rows in torch.split(torch.randperm(len(real)), config.batch_size)
            ]
            generator_loss, discriminator_loss = (sum(each) / len(losses) for each in zip(*losses, strict=True))
            state = {name: part.state_dict() for name, part in parts.items()}
            trial.report(
                {
                    "frechet": frechet_distance(generate(parts["drawing"], config, device), splits.val.x, seed),
                    "train_generator_loss": generator_loss,
                    "train_discriminator_loss": discriminator_loss,
                },
                state=state,
                best=state["drawing"],
            )

    def test(self, best: Any, config: GanConfig, device: torch.device, seed: int) -> Mapping[str, float]:
        """Return the Frechet distance between generated images and the images of the test split."""
        generated = generate(restore_generator(best, config).to(device), config, device)
        return {"frechet": frechet_distance(generated, load_images(seed).test.x, seed)}

    def export(self, best: Any, config: GanConfig) -> tuple[nn.Module, Tensor]:
        """Return the generator from normal noise [n, `noise`] to images [n, 1, 8, 8], and an example of the noise."""
        return restore_generator(best, config), torch.randn(4, config.noise)


@cache
def load_images(seed: int) -> Splits:
    """Return images [n, 1, 8, 8] with pixels 0 to 16, in the splits of the objective `digits`."""
    return Digits().data(seed)


def build_networks(config: GanConfig, device: torch.device) -> dict[str, Any]:
    """Return the networks and their optimizers by name."""
    width = config.width
    generator = nn.Sequential(
        *(nn.Linear(config.noise, width), nn.BatchNorm1d(width), nn.ReLU()),
        *(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()),
        *(nn.Linear(width, 64), nn.Unflatten(1, (1, 8, 8)), PixelActivation()),
    ).to(device)
    discriminator = nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Dropout(config.dropout)),
        *(nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Dropout(config.dropout), nn.Linear(width, 1)),
    ).to(device)
    betas = (0.5, 0.999)  # Radford et al. 2016
    return {  # the keys of stored checkpoints
        "drawing": generator,
        "judging": discriminator,
        "draws": torch.optim.Adam(generator.parameters(), config.generator_lr, betas),
        "judges": torch.optim.Adam(discriminator.parameters(), config.discriminator_lr, betas),
    }


class PixelActivation(nn.Module):
    """Layer that maps any number to a pixel value from 0 to 16."""

    def forward(self, x: Tensor) -> Tensor:
        """Return pixel values in the shape of `x`."""
        return 16 * x.sigmoid()


def train_step(real: Tensor, config: GanConfig, parts: dict[str, Any]) -> tuple[float, float]:
    """Train the discriminator, then the generator with the non-saturating loss; return both losses in nats."""
    generator, discriminator, generator_optimizer, discriminator_optimizer = parts.values()
    entropy = functional.binary_cross_entropy_with_logits
    fake = generator(torch.randn(len(real), config.noise, device=real.device))
    ones, zeros = torch.ones(len(real), 1, device=real.device), torch.zeros(len(real), 1, device=real.device)
    discriminator_loss = entropy(discriminator(real / 16), ones) + entropy(discriminator(fake.detach() / 16), zeros)
    discriminator_optimizer.zero_grad()
    torch.autograd.backward(discriminator_loss)
    discriminator_optimizer.step()
    generator_loss = entropy(discriminator(fake / 16), ones)
    generator_optimizer.zero_grad()
    torch.autograd.backward(generator_loss)
    generator_optimizer.step()
    return generator_loss.item(), discriminator_loss.item()


def restore_generator(best: dict[str, Tensor], config: GanConfig) -> nn.Module:
    """Return the generator with the weights of the best epoch, in evaluation mode."""
    generator: nn.Module = build_networks(config, torch.device("cpu"))["drawing"]
    generator.load_state_dict(best)
    return generator.eval()


@torch.no_grad()
def generate(generator: nn.Module, config: GanConfig, device: torch.device) -> Tensor:
    """Return `GENERATED_IMAGES` images on the CPU, generated in evaluation mode."""
    found: Tensor = generator.eval()(torch.randn(GENERATED_IMAGES, config.noise).to(device)).cpu()
    generator.train()
    return found


def frechet_distance(generated: Tensor, real: Tensor, seed: int) -> float:
    """Return the Frechet distance between normal distributions fitted to the features of images [n, 1, 8, 8]."""
    extract = fit_feature_extractor(seed)
    (mean, cov), (other, other_cov) = ((x.mean(dim=0), x.T.cov()) for x in (extract(generated), extract(real)))
    root = torch.linalg.eigvals(cov @ other_cov).real.clamp_min(0).sqrt().sum()  # the trace of (cov @ other_cov)^1/2
    return float((mean - other).square().sum() + cov.trace() + other_cov.trace() - 2 * root)


@cache
def fit_feature_extractor(seed: int) -> Callable[[Tensor], Tensor]:
    """Return a function from images [n, 1, 8, 8] to features [n, 32]: the second hidden layer of a digit classifier."""
    from sklearn.neural_network import MLPClassifier

    train = load_images(seed).train
    found = MLPClassifier((64, 32), tol=1e-3, random_state=0).fit(train.x.flatten(1) / 16, train.y)
    layers = [torch.from_numpy(part) for pair in zip(found.coefs_, found.intercepts_, strict=True) for part in pair]

    def extract_features(x: Tensor) -> Tensor:
        first = torch.relu(x.flatten(1).double() / 16 @ layers[0] + layers[1])
        return torch.relu(first @ layers[2] + layers[3])

    return extract_features
