"""Custom loops: the guarantees of trials hold for a loop that an objective runs itself."""

import dataclasses
import math
import multiprocessing
import os
import signal
import threading
from asyncio import CancelledError
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn

from hpsearch import (
    DeviceMemoryError,
    EpochRecord,
    LocalSession,
    LoopObjective,
    NonFiniteError,
    ObjectiveError,
    Verdict,
    load_objective,
    promotable,
)
from hpsearch.objectives.custom_loop.run import select_plotted_metrics
from hpsearch.objectives.fit import fit, restore_model
from hpsearch.objectives.search_space import FixedTrial
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.reproducibility import checkpoint
from tests.objectives.training.support import Memory, Stopped, exact


class Gan(LoopObjective):
    """Two networks and two optimizers; the metric is the distance of the mean radius of generated samples from 1."""

    metric, direction, epochs = "distance", "minimize", 5

    def suggest(self, trial):
        return {"lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True)}

    def run(self, trial):
        parts = self.parts(trial.config)
        for name, part in parts.items() if trial.state else ():
            part.load_state_dict(trial.state[name])
        for epoch in trial.epochs():
            self.before(trial, epoch)
            loss = [self.step(**parts) for _ in range(5)][-1]
            with torch.no_grad():
                distance = (parts["generator"](torch.randn(200, 2)).norm(dim=1) - 1).abs().mean()
            state = {name: part.state_dict() for name, part in parts.items()}
            trial.report({"distance": distance, "train_loss": loss}, state=state, best=state["generator"])

    def parts(self, config):
        generator, discriminator = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        adams = [torch.optim.Adam(net.parameters(), config["lr"]) for net in (generator, discriminator)]
        return {"generator": generator, "discriminator": discriminator, "first": adams[0], "second": adams[1]}

    def step(self, generator, discriminator, first, second):
        angle = torch.rand(32) * 2 * math.pi
        real, fake = torch.stack([angle.cos(), angle.sin()], dim=1), generator(torch.randn(32, 2))
        entropy = nn.functional.binary_cross_entropy_with_logits
        second.zero_grad()
        loss = entropy(discriminator(real), torch.ones(32, 1)) + entropy(
            discriminator(fake.detach()), torch.zeros(32, 1)
        )
        loss.backward()
        second.step()
        first.zero_grad()
        entropy(discriminator(fake), torch.ones(32, 1)).backward()
        first.step()
        return loss.item() + np.random.rand()

    def before(self, trial, epoch):
        pass

    def test(self, best, config, device, seed):
        generator = self.parts(config)["generator"]
        generator.load_state_dict(best)
        with torch.no_grad():
            return {"distance": (generator(torch.randn(500, 2)).norm(dim=1) - 1).abs().mean()}

    def export(self, best, config):
        generator = self.parts(config)["generator"]
        generator.load_state_dict(best)
        return generator, torch.randn(4, 2)


class Killed(Gan):
    name = "Gan"

    def before(self, trial, epoch):
        if epoch == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def _fit(objective=None, session=None, epochs=5, **settings):
    objective = objective or Gan()
    config = objective.default_config()
    return fit(objective, config, RunPlan(epochs, 7, 7), session=session or Memory(), device="cpu", **settings)


def _numbers(result):
    return [(epoch, {k: v for k, v in found.items() if k != "epoch_seconds"}) for epoch, found in exact(result.history)]


@pytest.mark.slow
def test_a_run_is_repeatable_and_reports_each_epoch_once():
    session = Memory()
    result = _fit(session=session)
    assert _numbers(result) == _numbers(_fit())
    assert [record.epoch for record in session.reported] == list(range(5))
    best = min(range(5), key=lambda k: result.history[k].metrics["val_distance"])
    assert (result.status, result.best_epoch) == ("completed", best)
    assert result.best_value == result.history[best].metrics["val_distance"]
    assert "train_loss" in result.best_metrics


@pytest.mark.slow
def test_a_killed_and_resumed_run_is_bit_identical(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_fit, args=(Killed(), LocalSession(tmp_path)))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    whole, resumed = _fit(), _fit(session=LocalSession(tmp_path))
    assert _numbers(resumed) == _numbers(whole)
    assert torch.equal(resumed.best["weight"], whole.best["weight"])


def test_a_loop_without_state_starts_again_when_it_is_resumed(tmp_path):
    """It would continue with an untrained model."""
    seen = []

    def run(self, trial):
        seen.append((trial.resumed, trial.state))
        value = 1.0
        for _ in trial.epochs():
            value = value / 2 + torch.rand(()).item()
            trial.report({"distance": value})

    objective = type("Forgetful", (Gan,), {"run": run})()
    whole = _fit(objective, Memory())
    assert _fit(objective, Stopped(tmp_path, 2)).status == "stopped"
    resumed = _fit(objective, LocalSession(tmp_path))
    assert _numbers(resumed) == _numbers(whole)
    assert seen == [(False, None)] * 3
    assert _numbers(_fit(objective, LocalSession(tmp_path))) == _numbers(whole)
    assert len(seen) == 3, "a completed run is not trained again"


@pytest.mark.slow
@pytest.mark.parametrize(("verdict", "status"), [(Verdict.PRUNE, "pruned"), (Verdict.STOP, "stopped")])
def test_the_verdict_on_a_report_ends_the_loop(verdict, status, tmp_path):
    session = Memory({2: verdict})
    result = _fit(session=session)
    assert (result.status, len(result.history)) == (status, 3)
    assert [epoch for epoch, _ in session.saved] == [0, 1, 2], "kept before it is reported"


@pytest.mark.parametrize(("verdict", "status"), [(Verdict.PAUSE, "stopped"), (Verdict.STOP, "completed")])
def test_a_last_epoch_that_the_budget_does_not_count_does_not_complete_the_trial(verdict, status):
    result = _fit(session=Memory({1: verdict.with_reason("the budget is spent")}), epochs=2)
    assert (result.status, result.verdict.reason) == (status, "the budget is spent")


@pytest.mark.slow
def test_a_completed_run_is_not_trained_again(tmp_path):
    whole = _fit(session=LocalSession(tmp_path))
    again = _fit(type("Gan", (Gan,), {"run": lambda *_: 1 / 0})(), session=LocalSession(tmp_path))
    assert (again.status, _numbers(again)) == ("completed", _numbers(whole))


def test_too_little_memory_is_reported_also_without_a_text():
    def run(*_):
        raise MemoryError

    with pytest.raises(DeviceMemoryError, match="MemoryError"):
        _fit(type("Hungry", (Gan,), {"run": run})())


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path):
    _fit(session=LocalSession(tmp_path))
    with pytest.raises(ObjectiveError, match="the checkpoint belongs to another run: its epochs is 5, not 6"):
        _fit(session=LocalSession(tmp_path), epochs=6)


def test_a_loop_that_returns_early_is_complete(tmp_path):
    def run(self, trial):
        for epoch in trial.epochs():
            trial.report({"distance": 1.0})
            if epoch == 1:
                break

    result = _fit(type("Short", (Gan,), {"run": run})())
    assert (result.status, len(result.history)) == ("completed", 2)


def test_an_exception_of_report_ends_the_run_even_if_the_loop_catches_it():
    class LostError(Exception):
        pass

    class Lost(Memory):
        def report(self, record):
            raise LostError

    def run(self, trial):
        for _ in trial.epochs():
            try:
                trial.report({"distance": 1.0})
            except Exception:  # as in some users' code
                return

    with pytest.raises(LostError):
        _fit(type("Deaf", (Gan,), {"run": run})(), session=Lost())


def _raise(error):
    raise error


class Image(torch.Tensor):
    """A class that `torch.load` rejects."""


def _report_image_in_epoch_2(_self, trial):
    for epoch in trial.epochs():
        trial.report({"distance": 1.0}, state={"worst": torch.ones(2).as_subclass(Image) if epoch else None})


@dataclasses.dataclass
class WithoutAllFields:
    warm: int = dataclasses.field(init=False, default=3)


def _reporting(*reports, outside=False):
    def run(self, trial):
        if outside:
            trial.report({"distance": 1.0})
        for _ in trial.epochs():
            for metrics, state in reports:
                trial.report(metrics, state=state)

    return type("Wrong", (Gan,), {"run": run})


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (_reporting(), "epoch 1 was not reported; call trial.report once in each epoch"),
        (_reporting(({"distance": 1.0}, None), ({"distance": 1.0}, None)), "epoch 1 is already reported; report each"),
        (_reporting(outside=True), r"trial.report was called outside trial.epochs\(\); call it once"),
        (_reporting(({"distanse": 1.0}, None)), "'distance' is not reported; did you mean 'distanse'"),
        (_reporting(({"distance": math.nan}, None)), "distance is nan at epoch 1"),
        (
            _reporting(({"distance": torch.ones(3)}, None)),
            r"trial.report: 'distance' must be one number, not a Tensor",
        ),
        (_reporting(({"distance": 1.0, "other": "x"}, None)), "trial.report: 'other' must be one number, not 'x'"),
        (_reporting((0.5, None)), "trial.report needs a dict such as {'accuracy': 0.9}, not float"),
        (
            _reporting(({"distance": 1.0}, {"a": [object()]})),
            r"'state\.a\.0' is of type object, which a checkpoint",
        ),
        (
            _reporting(({"distance": 1.0}, {"losses": defaultdict(float, a=1.0)})),
            r"trial.report: 'state' contains a defaultdict, which a checkpoint cannot store; convert it to a dict",
        ),
        (
            _reporting(({"distance": 1.0}, {"net": nn.Linear(2, 2)})),
            r"trial.report: 'state\.net' is of type Linear, which a checkpoint cannot store; pass its state_dict\(\)",
        ),
        (
            type("Wrong", (Gan,), {"run": _report_image_in_epoch_2, "epochs": 2}),
            r"trial.report: 'state\.worst' is of type Image, which a checkpoint cannot store",
        ),
        (_reporting(({"distance": 1.0}, {"n": torch.ones(2).to_mkldnn()})), r"'state\.n' is of type Tensor, which"),
        (
            _reporting(({"distance": 1.0}, {"n": 1 << 4096})),
            r"trial.report: 'state\.n' is of type int, which a checkpoint cannot store; it has 4097 bits",
        ),
        (
            _reporting(({"distance": 1.0}, {"a": {np.int64(3): 1}})),
            "a key in 'state' is of type int64, which a checkpoint",
        ),
        (
            _reporting(({"distance": 1.0, "val_distance": 2.0}, None)),
            "trial.report: 'distance' and 'val_distance' are the same metric; report one of them",
        ),
        (
            type("Odd", (Gan,), {"suggest": lambda *_: {"widths": (4, 3)}}),
            r"Odd.suggest: 'widths' is \(4, 3\), but its JSON value is \[4, 3\]; return \[4, 3\]",
        ),
        (
            type("Odd", (Gan,), {"suggest": lambda *_: WithoutAllFields()}),
            r"Odd.suggest: WithoutAllFields\(\*\*fields\) failed: .*'warm'",
        ),
        (type("Silent", (Gan,), {"run": lambda *_: None}), "Silent.run ended without a report"),
        (
            type("Odd", (Gan,), {"suggest": lambda *_: 3}),
            "Odd.suggest must return a dictionary or a dataclass",
        ),
        (
            type("Odd", (Gan,), {"suggest": lambda *_: {"f": max}}),
            "Odd.suggest: 'f' must be a JSON value",
        ),
        (
            type("Wrong", (Gan,), {"run": lambda _, trial: trial.log_artifact("/dev/zero")}),
            r"trial.log_artifact\('/dev/zero'\) needs a file",
        ),
        (type("Wrong", (Gan,), {"run": lambda *_: 1 / 0}), r"Wrong.run: .*test_custom_loop.py:\d+: ZeroDivisionError"),
        (type("Wrong", (Gan,), {"run": lambda *_: _raise(GeneratorExit())}), r"Wrong.run: .*:\d+: GeneratorExit"),
        (type("Wrong", (Gan,), {"suggest": lambda *_: _raise(CancelledError())}), r"Wrong.suggest: .*CancelledError"),
    ],
)
def test_mistakes_have_clear_errors(objective, message):
    with pytest.raises((ObjectiveError, NonFiniteError), match=message) as error:
        _fit(objective())
    assert "\n" not in str(error.value)


class _Meeting(dict):
    """Metrics that wait until another thread reports too."""

    met = threading.Barrier(2)

    def items(self):
        with suppress(threading.BrokenBarrierError):
            self.met.wait(0.2)
        return super().items()


def _report_in_threads(_, trial):
    for _ in trial.epochs():
        with ThreadPoolExecutor(4) as threads:
            reports = [threads.submit(trial.report, _Meeting(distance=float(value))) for value in range(4)]
        assert sum(report.exception() is None for report in reports) == 1


def test_only_one_thread_reports_an_epoch():
    result = _fit(type("Threads", (Gan,), {"run": _report_in_threads})())
    assert [record.epoch for record in result.history] == list(range(5))


class NumpyState(Gan):
    """The best value is an integer before the first epoch, and a scalar of NumPy afterwards."""

    def run(self, trial):
        self.resumed_at = trial.state and trial.state["best"]
        best = trial.state["best"] if trial.state else 9
        for epoch in trial.epochs():
            trial.report({"distance": 5.0 - epoch}, state={"best": best, "table": {(0, "a"): 0.5}})
            best = min(best, np.float64(5.0 - epoch))


def test_a_state_with_scalars_of_numpy_is_resumed(tmp_path):
    assert _fit(NumpyState(), session=Stopped(tmp_path, 2)).status == "stopped"
    _fit(objective := NumpyState(), session=Stopped(tmp_path, 9))
    assert objective.resumed_at == 4.0


def test_the_best_model_is_tested_and_exported(tmp_path):
    result = _fit(session=LocalSession(tmp_path))
    kept = checkpoint.read(tmp_path / "best.pt")
    restored = restore_model(Gan(), kept)
    assert restored.test() == restored.test()
    assert set(restored.test()) == {"distance"}
    exported = result.exportable_model()
    assert torch.equal(exported.module(torch.ones(2, 2)), _drawn(result.best))
    assert kept["value"] == result.best_value == promotable(checkpoint.read(tmp_path / "last.pt"))["value"]
    bare = type("Bare", (Gan,), {"test": LoopObjective.test, "export": LoopObjective.export})()
    assert not _fit(bare).has_model
    with pytest.raises(ObjectiveError, match=r"Bare has no test\(\); define test\(\) to evaluate"):
        restore_model(bare, kept)
    with pytest.raises(ObjectiveError, match=r"Bare has no export\(\); define export\(\) to get a model"):
        _fit(bare).exportable_model()


def _drawn(weights):
    net = nn.Linear(2, 2)
    net.load_state_dict(weights)
    return net(torch.ones(2, 2))


@dataclasses.dataclass
class Settings:
    lr: float
    depth: int = 2


def test_a_configuration_may_be_a_custom_dataclass(tmp_path):
    seen = []

    class Typed(Gan):
        def suggest(self, trial):
            return Settings(trial.suggest_float("lr", 1e-3, 1e-1, log=True))

        def run(self, trial):
            seen.append(trial.config.depth)
            for _ in trial.epochs():
                trial.report({"distance": trial.config.lr})

        def test(self, best, config, device, seed):
            return {"distance": config.lr}

    result = _fit(Typed(), LocalSession(tmp_path))
    assert seen == [2]
    assert result.best_value == pytest.approx(1e-2)
    assert restore_model(Typed(), checkpoint.read(tmp_path / "best.pt")).test() == {"distance": result.best_value}


FUNCTION = """
def main(trial):
    rate = trial.suggest_float("rate", 0.1, 0.4)
    kind = trial.suggest_categorical("kind", ["a", "b"])
    x = trial.state["x"] if trial.state else 8.0
    for epoch in trial.epochs():
        x -= rate * x
        trial.report({"error": x}, state={"x": x})

main.metric, main.direction, main.epochs = "error", "minimize", 3

def lazy(trial):
    trial.suggest_float("rate", 0.1, 0.4)

def late(trial):
    for epoch in trial.epochs():
        trial.suggest_float("rate", 0.1, 0.4)

async def deferred(trial): ...


def bare():
    pass
"""


def test_a_function_can_be_an_objective(tmp_path):
    path = tmp_path / "own_script.py"
    path.write_text(FUNCTION)
    objective = load_objective(f"{path}:main")
    assert (objective.name, objective.metric, objective.direction, objective.epochs) == ("main", "error", "minimize", 3)
    objective.configure(space := FixedTrial({}))
    assert space.values == {"rate": 0.25, "kind": "a"}
    result = _fit(objective, epochs=3)
    assert result.best_value == pytest.approx(8 * 0.75**3)
    assert type(load_objective(f"{path}:main")) is type(objective)
    with pytest.raises(ObjectiveError, match="lazy ended without training; iterate over trial"):
        load_objective(f"{path}:lazy").default_config()
    with pytest.raises(ObjectiveError, match="'rate' is suggested too late; suggest all parameters before"):
        _fit(load_objective(f"{path}:late"))
    with pytest.raises(ObjectiveError, match="bare must accept one argument, the trial; write def bare"):
        load_objective(f"{path}:bare")
    with pytest.raises(ObjectiveError, match="deferred is a coroutine or a generator, which hpsearch does not execute"):
        load_objective(f"{path}:deferred")


def test_the_report_lists_metrics_and_what_a_custom_loop_does_not_check(tmp_path):
    fit(Gan(), {"lr": 1e-2}, RunPlan(3, 4, 4), run_dir=tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# Gan: completed, best distance ")
    assert "of 3 trained, 3 planned\n- seed 4, split seed 4\n" in text
    assert "| `lr` | `0.01` |" in text
    assert all(f"| {name} | " in text for name in ("val_distance", "train_loss"))
    assert "![Curves over the epochs](curves.png)" in text
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert text.count("## Not checked") == 1
    session = Memory({1: Verdict.PRUNE})
    fit(Gan(), {"lr": 1e-2}, RunPlan(3, 4, 4), run_dir=tmp_path / "pruned", session=session)
    assert "report.md" in [path.name for path in session.logged]
    assert "curves.png" not in (tmp_path / "pruned" / "report.md").read_text()


def test_the_curves_of_many_metrics_start_with_the_objective_metric():
    names = {f"val_{letter}": 1.0 for letter in "abcdefghij"}
    history = [EpochRecord(0, 0.0, {"lr": 1.0, "train_loss": 1.0, **names, "epoch_seconds": 1.0})]
    assert select_plotted_metrics(history, "c") == ["c", "loss", "a", "b", "d", "e", "f", "g"]
