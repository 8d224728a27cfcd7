"""The small network of :mod:`tests.faults.scripted`, judged by two metrics: what a configuration costs is made up."""

from __future__ import annotations

import math
from typing import Any

from hpsearch import TrainConfig
from tests.faults.scripted import Scripted


class Several(Scripted):
    directions = {"loss": "minimize", "cost": "minimize"}  # noqa: RUF012 as users write it

    def measures(self, model: Any, config: TrainConfig) -> dict[str, float]:
        # Low for small learning rates, which are slow to learn: the two are at odds.
        return {"cost": round(abs(math.log10(config.lr) + 2.5) + math.log10(config.weight_decay) / 10, 2)}
