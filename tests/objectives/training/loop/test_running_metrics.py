"""Training metrics are updated in chunks of bounded size, for any size of a row."""

import torch

from hpsearch.objectives.training.evaluation.running_metrics import RunningMetrics
from hpsearch.objectives.training.evaluation.step import Step


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
