"""Model metrics on several ranks: rank 0 measures the whole model, and all ranks have the same values."""

import pytest

from hpsearch import ObjectiveError, TrainConfig, Trainer
from hpsearch.objectives.training.loop.measure_model import measure_size
from tests.objectives.training.ranks.support import Sides, on_ranks
from tests.objectives.training.support import Stopped


class Measured(Sides):
    """With a custom metric that calls the model; all ranks call a sharded model together."""

    name = "measured"

    def model_metrics(self, model, config):
        return {"bias": float(model(self.data(0).val.x[:3]).sum())}


def _fit(ranks, strategy, names, folder=None, after=None):
    objective = Measured()
    objective.set_reported_metrics(names)
    session = None if folder is None or not ranks.is_rank_zero else Stopped(folder, after)
    config = TrainConfig(strategy=strategy, batch_size=37, lr=0.01)
    return Trainer(objective, config, epochs=2, seed=0, session=session, device="cpu").fit()


def _numbers(ranks, strategy, names, folder=None, after=None):
    with ranks.fail_together():
        found = _fit(ranks, strategy, names, folder, after)
        asked = {*names, "bias", "latency_load"}
        return [{k: v for k, v in r.metrics.items() if k in asked} for r in found.history], measure_size(found.model)


def _ddp(ranks, folder):
    return _numbers(ranks, "ddp", NAMES, folder, 0), _numbers(ranks, "ddp", NAMES, folder)


NAMES = ("latency_ms", "model_mb", "parameters")


@pytest.mark.slow
def test_all_ranks_have_the_model_metrics_of_rank_0_also_after_a_resume(tmp_path):
    (stopped, sizes_then), (whole, _) = (first := on_ranks(2, _ddp, tmp_path))[0]
    assert first[1][0][0] == stopped
    assert first[1][1][0] == whole
    assert [epoch.keys() for epoch in whole] == [{*NAMES, "bias", "latency_load"}] * 2
    assert whole[0] == stopped[0]
    assert {epoch["latency_ms"] for epoch in whole} == {stopped[0]["latency_ms"]}
    assert {name: whole[0][name] for name in sizes_then} == sizes_then


def _fsdp(ranks):
    found = _numbers(ranks, "fsdp", ("model_mb", "parameters"))
    try:
        with ranks.fail_together():
            _fit(ranks, "fsdp", ("latency_ms",))
    except ObjectiveError as error:
        return found, str(error)
    return found, None


@pytest.mark.slow
def test_a_sharded_model_has_full_sizes_and_no_latency():
    ((history, whole), said), ((others, _), also) = on_ranks(2, _fsdp)
    assert history == others
    assert {name: history[0][name] for name in whole} == whole
    assert whole["parameters"] == 8 * 16 + 16 + 16 * 2 + 2
    assert said == also
    assert said.startswith("latency_ms is not available with strategy 'fsdp', which shards the model")
