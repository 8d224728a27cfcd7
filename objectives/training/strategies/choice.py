"""The strategy of a run, by its name."""

from __future__ import annotations

from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.ranks import Ranks
from hpsearch.objectives.training.strategies.base import Strategy
from hpsearch.objectives.training.strategies.ddp import Replicated
from hpsearch.objectives.training.strategies.fsdp import Sharded

STRATEGIES: dict[str, type[Strategy]] = {kind.name: kind for kind in (Replicated, Sharded)}


def build_strategy(config: TrainConfig, ranks: Ranks) -> Strategy:
    """What the configuration says, where there are several ranks."""
    return Strategy(ranks, config) if ranks.alone else STRATEGIES[config.strategy](ranks, config)
