"""An objective with very short trials. Every second trial kills its worker once."""

import math
import os
import signal
from pathlib import Path

from hpsearch import LoopObjective


class Cheap(LoopObjective):
    metric, direction, epochs = "distance", "minimize", 2

    def suggest(self, trial):
        return {
            "lr": trial.suggest_float("lr", 0.01, 1.0, log=True),
            "width": trial.suggest_int("width", 8, 32, step=8),
            "kind": trial.suggest_categorical("kind", ["a", "b"]),
        }

    def run(self, trial):
        for _ in trial.epochs():
            if (folder := os.environ.get("DEATHS")) and trial.seed % 2 == 1:
                deaths = Path(folder, str(trial.seed))
                if not deaths.exists():
                    deaths.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            trial.report({"distance": abs(math.log10(trial.config["lr"]) + 1) + trial.config["width"] / 32})


class Few(Cheap):
    def suggest(self, trial):
        return {
            "lr": trial.suggest_categorical("lr", [0.01, 0.1]),
            "width": trial.suggest_int("width", 8, 32, step=8),
        }


class Started(Cheap):
    defaults = {"lr": 0.1, "kind": "b"}  # noqa: RUF012 as users write it
