"""Training metrics are updated in chunks of bounded size, for any size of a row."""

import torch

from hpsearch.objectives.training.evaluation.running_metrics import RunningMetrics, aggregate_over_ranks
from hpsearch.objectives.training.evaluation.step import Step
from hpsearch.objectives.training.ranks import Ranks


class _Noting:
    def __init__(self):
        self.rows = []

    def reset(self):
        pass

    def update(self, output, target):
        assert len(output) == len(target)
        self.rows.append(len(output))

    def compute(self):
        return {}


def _added(*batches):
    metrics = _Noting()
    running = RunningMetrics(metrics)
    for shape in batches:
        running.add(Step(torch.zeros(()), torch.zeros(shape), torch.zeros(shape[0])), shape[0])
    held = sum(output.nbytes for output in running._outputs)
    running.compute()
    return metrics.rows, held


def test_small_outputs_update_metrics_in_groups_of_thousands():
    rows, _ = _added(*[(64, 3)] * 100)
    assert rows == [4096, 2304]


def test_large_outputs_update_metrics_at_once():
    rows, held = _added(*[(8, 4096, 64)] * 3)
    assert rows == [8, 8, 8]
    assert held == 0
    rows, held = _added(*[(8, 1000, 16)] * 20)
    assert sum(rows) == 160
    assert held < 4 << 20


class _NeedsOutputs(_Noting):
    def compute(self):
        return {"share": sum(self.rows) / len(self.rows)}


def test_metrics_are_missing_if_no_step_has_outputs():
    running = RunningMetrics(_NeedsOutputs())
    running.add(Step(torch.zeros(()), metrics={"kl": 2.0}), 4)
    assert {name: float(value) for name, value in running.compute().items()} == {"kl": 2.0}
    restored = RunningMetrics(_NeedsOutputs())
    restored.load_state_dict({**running.state_dict(), "metrics": {}}, torch.device("cpu"))
    assert set(restored.compute()) == {"kl"}


class _OnDevice(torch.Tensor):
    """A tensor that records its copies, as one on a GPU, which a non-blocking copy leaves incomplete."""

    copies: list[tuple[str, bool]] = []  # noqa: RUF012 shared by all

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function.__name__ in ("to", "cpu"):
            cls.copies.append((function.__name__, bool((kwargs or {}).get("non_blocking"))))
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {})).as_subclass(torch.Tensor)
        return super().__torch_function__(function, types, args, kwargs)


class _TwoRanks(Ranks):
    world_size = 2


def test_batches_for_other_ranks_are_copied_completely_before_they_are_sent():
    """Pickling does not wait for an asynchronous copy from a GPU."""
    metrics = aggregate_over_ranks(_Noting(), _TwoRanks())
    metrics.update(torch.zeros(3).as_subclass(_OnDevice), torch.zeros(3).as_subclass(_OnDevice))
    assert _OnDevice.copies == [("cpu", False)] * 2
