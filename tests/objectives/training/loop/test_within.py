"""A run that is stopped in the middle of epochs and resumed is bit-identical to an uninterrupted run."""

import collections
import itertools
import math
from pathlib import Path

import pytest
import torch
import torchmetrics
from torch import nn

from hpsearch import LocalSession, ObjectiveError, TrainConfig, Trainer, Verdict
from hpsearch.objectives.training.evaluation import metric_state
from hpsearch.objectives.training.evaluation.metrics import binary
from hpsearch.objectives.training.reproducibility import checkpoint
from hpsearch.objectives.training.session import MidEpochAction
from tests.objectives.training.loop.killed_runs import CONFIGS, EPOCHS, Augmented
from tests.objectives.training.support import Sums, Wine, exact, fit, same_result

pytestmark = pytest.mark.usefixtures("no_plots")


class Leaving(LocalSession):
    """Stops the run after `steps` steps, in any epoch."""

    def __init__(self, run_dir, steps=1):
        super().__init__(run_dir)
        self.steps, self.left = itertools.count(1), []
        self.after = steps

    def mid_epoch_action(self, left):
        self.left.append(left())
        return MidEpochAction.SAVE_AND_STOP if next(self.steps) >= self.after else MidEpochAction.NONE


def in_pieces(make, config, folder, *, steps, **settings):
    """Train in attempts of `steps` steps until the run ends; return the last result and the number of attempts."""
    settings, attempts, result = {"epochs": 3, "seed": 0, **settings}, 0, None
    while result is None or result.status == "stopped":
        result = Trainer(make(), config, session=Leaving(folder, steps), **settings).fit()
        attempts += 1
    return result, attempts


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        *((name, None) for name in sorted(set(CONFIGS) - {"loader"})),
        pytest.param("loader", None, marks=pytest.mark.soak),
        *(pytest.param(name, workers, marks=pytest.mark.soak) for name in sorted(CONFIGS) for workers in (0, 2)),
    ],
)
def test_any_configuration_resumes_exactly_within_an_epoch(name, workers, tmp_path):
    config = CONFIGS[name]
    if workers is not None:
        config = TrainConfig(**{**config.to_dict(), "num_workers": workers})
    settings = {"epochs": EPOCHS, "seed": 11, "split_seed": 5}
    whole = Trainer(Augmented(), config, **settings).fit()
    result, attempts = in_pieces(Augmented, config, tmp_path, steps=3, **settings)
    assert attempts >= EPOCHS
    same_result(result, whole)


@pytest.mark.parametrize("workers", [None, pytest.param(2, marks=pytest.mark.soak)])
def test_a_stream_resumes_exactly_within_an_epoch(workers, tmp_path):
    config = TrainConfig(lr=0.05, batch_size=16, num_workers=workers)
    result, attempts = in_pieces(Sums, config, tmp_path, steps=6)
    assert attempts > 3
    same_result(result, fit(Sums(), TrainConfig(lr=0.05, batch_size=16), epochs=3))


class Pooled:
    """A typical custom metric: sums, lists and counts in attributes, an inner metric, and a constant."""

    def __init__(self):
        self.auroc, self.of = binary(), torch.nn.functional.softmax
        self.reset()

    def to(self, device):
        self.auroc.to(device)
        return self

    def update(self, output, target):
        self.auroc.update(output[:, :2], target.clamp(max=1))
        self.rows.append(output.detach())
        self.counted.update(target.tolist())
        self.last = {"first": target[:1].numpy(), "sizes": (len(target), None)}

    def compute(self):
        rows = torch.cat(self.rows)
        return {
            **self.auroc.compute(),
            "spread": rows.std(),
            "ones": self.counted[1] + self.last["sizes"][0] + float(self.last["first"][0]),
        }

    def reset(self):
        self.rows, self.counted, self.last = [], collections.Counter(), None
        self.auroc.reset()


class Spread(nn.Module):
    """A metric module that accumulates in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("sum", torch.zeros(()))
        self.inner = torchmetrics.MeanMetric()

    def update(self, output, target):
        self.sum += output.std()
        self.inner.update(output)

    def compute(self):
        return {"spread": self.sum, "mean": self.inner.compute()}

    def reset(self):
        self.sum.zero_()
        self.inner.reset()


def wine_with(metrics):
    class Judged(Wine):
        metric, direction = "loss", "minimize"

        def metrics(self, train):
            return metrics()

    return Judged


@pytest.mark.parametrize("metrics", [Pooled, Spread, lambda: torchmetrics.classification.MulticlassAccuracy(3)])
@pytest.mark.parametrize("accumulation", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_the_state_of_metrics_is_saved_within_an_epoch(metrics, accumulation, tmp_path):
    config = TrainConfig(lr=0.02, batch_size=16, gradient_accumulation_steps=accumulation, validate_every=2)
    whole = fit(wine_with(metrics)(), config, epochs=3)
    result, attempts = in_pieces(wine_with(metrics), config, tmp_path, steps=1)
    assert attempts > 3
    same_result(result, whole)


def test_a_metric_collection_with_shared_states_is_saved_within_an_epoch():
    torch.manual_seed(0)
    batches = [(torch.randn(7, 3), torch.randint(3, (7,))) for _ in range(4)]
    kinds = torchmetrics.classification

    def made():
        return torchmetrics.MetricCollection(
            {"p": kinds.MulticlassPrecision(3), "r": kinds.MulticlassRecall(3), "a": kinds.MulticlassAUROC(3)}
        )

    whole, first, second = made(), made(), made()
    for batch in batches:
        whole.update(*batch)
    for batch in batches[:2]:
        first.update(*batch)
    metric_state.load_metric_state(second, metric_state.get_metric_state(first))
    for batch in batches[2:]:
        second.update(*batch)
    assert second.compute() == whole.compute()


class Located(Pooled):
    """A metric with attributes that lead to modules and functions."""

    def __init__(self):
        super().__init__()
        self.folder, self.math, self.update_count = Path("/data"), math, torch.zeros(())


def make_object(**attributes):
    return {"kind": "object", "of": attributes}


@pytest.mark.parametrize(
    "state",
    [
        {"math": make_object(pi=3.0)},
        {"folder": make_object(__class__=make_object(anchor="/other"))},
        {"of": make_object(__defaults__={"kind": "tuple", "of": [1]})},
        {"update": make_object(__self__=make_object(rows=0))},
        {"__class__": make_object(compute=0.0)},
        {"auroc": make_object(_inner=make_object(__class__=make_object(compute=0.0)))},
        {"update_count": make_object(shown=1)},
        {"__dict__": {"kind": "set", "of": []}},
        {"missing": make_object(shown=1)},
    ],
)
def test_the_state_of_metrics_cannot_change_classes_functions_or_modules(state, tmp_path):
    """The author of a checkpoint could otherwise change sys.path, and with it the code that is imported."""
    config, settings = TrainConfig(batch_size=16), {"epochs": 2, "seed": 0}
    Trainer(wine_with(Located)(), config, session=Leaving(tmp_path), **settings).fit()
    saved = checkpoint.read(tmp_path / "last.pt")
    saved["within"]["sums"]["running"]["metrics"] |= state
    checkpoint.write(tmp_path / "last.pt", saved)
    before = math.pi, Pooled.compute, type(binary()).compute, torch.nn.functional.softmax.__defaults__
    with pytest.raises(ObjectiveError, match=r"checkpoint does not fit the metrics of the objective: \w+ has no state"):
        Trainer(wine_with(Located)(), config, session=LocalSession(tmp_path), **settings).fit()
    assert (math.pi, Pooled.compute, type(binary()).compute, torch.nn.functional.softmax.__defaults__) == before


class Drawing:
    """Metrics with state that a checkpoint cannot store."""

    def __init__(self):
        self.lock = torch.Generator()

    def update(self, output, target):
        pass

    def compute(self):
        return {}

    def reset(self):
        pass


def test_metrics_without_saved_state_allow_only_checkpoints_after_epochs(tmp_path):
    session = Leaving(tmp_path)
    result = Trainer(wine_with(Drawing)(), TrainConfig(batch_size=16), epochs=2, seed=0, session=session).fit()
    assert result.status == "completed"
    log = (tmp_path / "train.log").read_text()
    assert log.count("no mid-epoch checkpoints: Drawing.lock is a Generator, which is not serializable") == 1


def test_a_mid_epoch_checkpoint_has_plain_content_and_a_mark(tmp_path):
    trainer = Trainer(Wine(), TrainConfig(batch_size=16), epochs=2, seed=0, session=Leaving(tmp_path, 3))
    result = trainer.fit()
    assert (result.status, result.history, result.best_epoch) == ("stopped", [], -1)
    assert math.isnan(result.best_value)
    state = checkpoint.read(tmp_path / "last.pt")
    assert (state["format"], state["step"], state["within"]["sums"]["steps"]) == (3, 3, 3)
    assert "stopped in epoch 1 after 3 of 6 steps" in (tmp_path / "train.log").read_text()
    with pytest.raises(ObjectiveError, match="the checkpoint belongs to another run: its seed is 0, not 1"):
        Trainer(Wine(), TrainConfig(batch_size=16), epochs=2, seed=1, session=Leaving(tmp_path)).fit()


def test_the_session_receives_the_estimated_time_of_an_epoch(tmp_path, monkeypatch):
    """It follows from the pace so far and, from the second epoch on, from the time after the previous epoch's steps."""
    clock = iter(range(10_000))
    monkeypatch.setattr("hpsearch.objectives.training.trainer.time.perf_counter", lambda: float(next(clock)))
    session = Leaving(tmp_path, math.inf)
    Trainer(Wine(), TrainConfig(batch_size=16), epochs=2, seed=0, session=session).fit()
    first, second = session.left[:6], session.left[6:]
    assert first == [5, 4, 3, 2, 1, 0]
    assert [left - rest for left, rest in zip(second, first, strict=True)] == [second[-1]] * 6
    assert second[-1] > 0


def test_mid_epoch_checkpoints_are_saved_periodically(tmp_path):
    class Noting(LocalSession):
        saved = 0

        def save_mid_epoch(self, state):
            super().save_mid_epoch(state)
            Noting.saved += 1

    whole = fit(Wine(), TrainConfig(batch_size=16), epochs=2)
    result = fit(Wine(), TrainConfig(batch_size=16), epochs=2, session=Noting(tmp_path, save_every=1e-9))
    assert Noting.saved == 12
    same_result(result, whole)
    with pytest.raises(ObjectiveError, match="save_every must be above 0 seconds, not 0"):
        LocalSession(tmp_path, save_every=0)


def test_on_epoch_is_called_once_for_a_resumed_epoch(tmp_path):
    """Its layers are unfrozen as before, and then the state is restored."""

    begun = []

    class Thawing(Wine):
        def on_epoch(self, model, epoch, config):
            begun.append(epoch)
            model[1][0].requires_grad_(epoch > 0)

    whole = fit(Thawing(), TrainConfig(batch_size=16), epochs=3)
    begun.clear()
    result, attempts = in_pieces(Thawing, TrainConfig(batch_size=16), tmp_path, steps=9)
    same_result(result, whole)
    assert (attempts, begun) == (3, [0, 1, 0, 1, 2, 0, 1, 2])
    assert [exact([record])[0][0] for record in result.history] == [0, 1, 2]


def test_a_verdict_on_a_replayed_epoch_ends_the_run_before_more_training(tmp_path):
    class Ending(LocalSession):
        def report(self, record):
            return Verdict.STOP

    Trainer(Wine(), TrainConfig(batch_size=16), epochs=3, seed=0, session=Leaving(tmp_path, 9)).fit()
    before = checkpoint.read(tmp_path / "last.pt")["step"]
    assert Trainer(Wine(), TrainConfig(batch_size=16), epochs=3, seed=0, session=Ending(tmp_path)).fit().history
    assert checkpoint.read(tmp_path / "last.pt")["step"] == before == 9
