"""The template that `hpsearch init` writes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hpsearch.objectives.errors import ObjectiveError, format_path

TEMPLATE = '''\
"""An objective. Edit the data, the model and the search space, then run `hpsearch run {file}`."""

from sklearn.datasets import load_wine
from torch import nn

from hpsearch import Objective, Splits, Standardize, TrainConfig


class {name}(Objective):
    metric = "accuracy"  # or macro_f1, auroc, average_precision, rmse, mae, r2, loss
    direction = "maximize"
    epochs = 20  # of a full trial; poor trials are pruned earlier
    n_trials = 24

    def suggest(self, trial):
        """Return the configuration of a trial. TrainConfig has more settings, all with defaults."""
        return TrainConfig(
            lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True),
            weight_decay=trial.suggest_float("weight_decay", 1e-5, 1e-1, log=True),
            batch_size=trial.suggest_categorical("batch_size", [16, 32]),
            model={{"width": trial.suggest_int("width", 8, 64, log=True)}},
        )

    def data(self, seed):
        """Return inputs [n, 13] and labels [n], split 60/20/20 by the study's seed. groups= keeps groups together."""
        x, y = load_wine(return_X_y=True)
        return Splits.make(x, y, seed=seed, val=0.2, test=0.2)

    def model(self, config, train):
        """Return a network from raw inputs [n, 13] to logits [n, 3]. Fit preprocessing here, on training data only."""
        width = config.model["width"]
        net = nn.Sequential(nn.Linear(13, width), nn.ReLU(), nn.Linear(width, 3))
        return nn.Sequential(Standardize.fit(train.x), net)

    # The defaults of loss(config, train) and metrics(train) depend on `metric`; override them for other tasks.
'''


def write_template(path: Path) -> None:
    """Write an objective that runs unchanged: scikit-learn's wine data, a small network and four parameters.

    Raises:
        ObjectiveError: the path does not end in `.py`, exists, or cannot be written.
    """
    if path.suffix != ".py":
        raise ObjectiveError(f"{format_path(path)} must end in .py")
    words = "".join(word.capitalize() for word in path.stem.replace("-", "_").split("_"))
    name = words if words.isidentifier() and words != "Objective" else "MyObjective"
    try:
        code = TEMPLATE.format(file=path.name, name=name).encode()
        with path.open("xb") as file:
            file.write(code)
    except UnicodeEncodeError:
        raise ObjectiveError(f"{str(path)!a} is not valid UTF-8; use another name") from None
    except FileExistsError as error:
        raise ObjectiveError(f"{format_path(path)} already exists; choose another file name") from error
    except OSError as error:
        with suppress(OSError):
            if path.is_file() and not path.stat().st_size:  # the disk is full
                path.unlink()
        remedy = f"; create the folder {format_path(path.parent)} first" if not path.parent.is_dir() else ""
        raise ObjectiveError(f"{format_path(path)} cannot be written: {error.strerror}{remedy}") from error
