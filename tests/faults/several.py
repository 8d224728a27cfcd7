"""The small network of :mod:`tests.faults.scripted` with two metrics; the second one is synthetic."""

from __future__ import annotations

import math
from typing import Any

from hpsearch import TrainConfig
from tests.faults.scripted import Scripted


class Several(Scripted):
    directions = {"loss": "minimize", "cost": "minimize"}  # noqa: RUF012 as users write it

    def model_metrics(self, model: Any, config: TrainConfig) -> dict[str, float]:
        # Low for small learning rates, which train slowly, so that the metrics conflict.
        return {"cost": round(abs(math.log10(config.lr) + 2.5) + math.log10(config.weight_decay) / 10, 2)}
