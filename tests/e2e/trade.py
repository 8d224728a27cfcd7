"""An objective with very short trials, two conflicting metrics and a constraint."""

import math

from hpsearch import LoopObjective


class Trade(LoopObjective):
    directions = {"accuracy": "maximize", "cost": "minimize"}  # noqa: RUF012 as users write it
    constraints = {"width": "<= 100"}  # noqa: RUF012 as users write it
    epochs = 4

    def suggest(self, trial):
        return {"lr": trial.suggest_float("lr", 1e-3, 1.0, log=True), "width": trial.suggest_int("width", 8, 128)}

    def run(self, trial):
        width = trial.config["width"]
        best = 0.98 - 0.4 * math.exp(-width / 40) - 0.02 * abs(math.log10(trial.config["lr"]) + 1)
        for epoch in trial.epochs():
            accuracy = best - 0.2 * math.exp(-epoch)
            trial.report({"accuracy": accuracy, "cost": width / 10 + epoch / 100, "width": width})


class Third(Trade):
    directions = {**Trade.directions, "energy": "minimize"}  # noqa: RUF012 as users write it

    def run(self, trial):
        for epoch in trial.epochs():
            width, lr = trial.config["width"], trial.config["lr"]
            metrics = {"accuracy": 1 - math.exp(-width / 40 - epoch), "cost": width / 10, "energy": -math.log10(lr)}
            trial.report({**metrics, "width": width})
