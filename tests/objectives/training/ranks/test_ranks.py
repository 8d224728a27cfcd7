"""Ranks: their shared values, common failures, and resuming on another number of ranks."""

import math
import os
from functools import partial

import psutil
import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from hpsearch import LocalSession, NonFiniteError, ObjectiveError, Step, TrainConfig, Trainer
from hpsearch.objectives.training.rank_errors import RankLostError
from hpsearch.objectives.training.ranks import SINGLE_PROCESS, init_process_group
from hpsearch.objectives.training.strategies.ddp import SyncBatchNorm
from tests.objectives.training.ranks.support import UNEVEN, Sides, apart, on_ranks, outcome
from tests.objectives.training.support import Stopped


def agree(ranks):
    total = ranks.all_reduce_sum(torch.tensor([1.0, float(ranks.rank)]))
    tensors = [torch.full((2,), float(ranks.rank)), torch.tensor([ranks.rank])]
    ranks.broadcast_tensors(tensors)
    mean = [torch.tensor([float(ranks.rank)])]
    ranks.all_reduce_mean(mean)
    share = ranks.select_own_rows(torch.arange(5)).tolist()
    return (
        total.tolist(),
        ranks.broadcast_object(ranks.rank),
        ranks.all_gather_object(ranks.rank),
        [t.tolist() for t in tensors],
        mean,
        share,
    )


def test_collective_operations_of_ranks():
    first, second = on_ranks(2, agree)
    assert first == ([2.0, 1.0], 0, [0, 1], [[0.0, 0.0], [0]], [torch.tensor([0.5])], [0, 2, 4])
    assert second[:-1] == first[:-1]
    assert second[-1] == [1, 3]


def find_listening_addresses(ranks):
    ranks.all_gather_object(None)
    sockets = psutil.Process().net_connections()
    return {item.laddr.ip for item in sockets if item.status == psutil.CONN_LISTEN}


def test_ranks_of_one_machine_listen_on_loopback_only(tmp_path):
    assert on_ranks(2, find_listening_addresses, store_path=tmp_path / "ranks") == [{"127.0.0.1"}] * 2


def test_process_groups_on_gpus_have_a_backend_for_cpu_tensors_and_time_to_connect(monkeypatch, tmp_path):
    """Checkpoints of torch.distributed communicate CPU tensors in the background."""
    asked = []

    def note_backend(backend, **settings):
        asked.append((backend, settings["timeout"].total_seconds()))
        raise RuntimeError("no GPU here")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(torch.distributed, "init_process_group", note_backend)
    with (
        pytest.raises(RankLostError, match="no GPU here"),
        init_process_group(device="cuda:1", timeout=30, store_path=tmp_path / "ranks"),
    ):
        pass
    assert asked == [("cpu:gloo,cuda:nccl", 300)]
    assert os.environ.pop("NCCL_SOCKET_IFNAME") in {"lo", "lo0"}


def test_collective_operations_of_a_single_process():
    assert agree(SINGLE_PROCESS)[:3] == ([1.0, 0.0], 0, [0])
    with SINGLE_PROCESS.fail_together():
        assert SINGLE_PROCESS.run_on_rank_zero(lambda: 3) == 3


def caught(ranks, fail, wait):
    try:
        with ranks.fail_together():
            fail(ranks)
            wait(ranks)
        return None
    except Exception as error:
        attributes = dict(vars(error))
        return type(error).__name__, str(error), attributes, attributes.pop("__notes__", [])


def failures(ranks):
    def on_second(error):
        def fail(ranks):
            if ranks.rank == 1:
                raise error

        return fail

    def led(ranks):
        ranks.run_on_rank_zero(lambda: 1 / 0)

    waits = {
        "sum": lambda r: r.all_reduce_sum(torch.ones(3)),
        "tell": lambda r: r.broadcast_object(None),
        "nothing": lambda _: None,
    }
    bad = NonFiniteError("loss is nan", epoch=2, step=7, lr=0.1, grad_norm=math.inf, batch=1)
    found = {name: caught(ranks, on_second(ObjectiveError("no such layer")), wait) for name, wait in waits.items()}
    found["own kind"] = caught(ranks, on_second(bad), waits["sum"])
    found["foreign kind"] = caught(ranks, on_second(KeyError("x")), waits["sum"])
    found["led"] = caught(ranks, led, waits["sum"])
    found["same on all"] = caught(ranks, lambda _: 1 / 0, waits["sum"])
    found["wrapped"] = caught(ranks, on_second(ObjectiveError("boo")), wrapped)
    found["none"] = caught(ranks, lambda _: None, waits["sum"])
    return found


def wrapped(ranks):
    """Handle a broken connection as user code may do."""
    try:
        ranks.all_reduce_sum(torch.ones(3))
    except RuntimeError as error:
        raise ObjectiveError(f"my loop: {error}") from error


def test_all_ranks_raise_the_error_of_the_failed_rank_and_can_continue():
    first, second = on_ranks(2, failures)
    for wait in ("sum", "tell", "nothing"):
        assert second[wait][:2] == ("ObjectiveError", "no such layer")
        assert first[wait][:2] == ("ObjectiveError", "no such layer (on rank 1)")
    assert first["own kind"][0] == "NonFiniteError"
    point = {"epoch": 2, "step": 7, "batch": 1, "lr": 0.1, "grad_norm": math.inf}
    assert [side["own kind"][2] for side in (first, second)] == [point, point]
    assert first["foreign kind"][:2] == ("RankError", "KeyError: 'x' (on rank 1)")
    (trace,) = first["foreign kind"][3]
    assert trace.startswith("Traceback on rank 1:\nTraceback")
    assert "in fail\n    raise error" in trace
    assert second["foreign kind"][3] == []
    assert first["led"][0] == "ZeroDivisionError"
    assert second["led"][:2] == ("RankError", "ZeroDivisionError: division by zero (on rank 0)")
    assert first["same on all"][:2] == second["same on all"][:2] == ("ZeroDivisionError", "division by zero")
    assert first["wrapped"][:2] == ("ObjectiveError", "boo (on rank 1)")
    assert first["none"] is second["none"] is None


def lose(ranks):
    try:
        with ranks.fail_together():
            if ranks.rank == 1:
                os._exit(0)
            ranks.all_reduce_sum(torch.ones(3))
    except RankLostError as error:
        return str(error)


def test_a_lost_rank_ends_the_others():
    with pytest.raises(AssertionError) as died:
        on_ranks(2, lambda ranks: pytest.fail(lose(ranks)))
    assert "another rank exited or did not answer" in str(died.value)


class Diverging(Sides):
    """The loss of one sample, on one rank, becomes infinite."""

    def loss(self, config, train):
        return Bad()


class Bad(torch.nn.CrossEntropyLoss):
    def forward(self, output, target):
        found = super().forward(output, target)
        lowest = output[:, 0].min() < -1.0 and os.environ["RANK"] == "1"
        return found / (0.0 if torch.is_grad_enabled() and lowest else 1.0)


def diverge(ranks):
    return caught(ranks, lambda _: Trainer(Diverging(), UNEVEN, epochs=30, seed=0).fit(), lambda _: None)


def test_a_non_finite_loss_on_one_rank_ends_all_at_the_same_step():
    first, second = on_ranks(2, diverge)
    assert first[:2] == second[:2]
    assert first[0] == "NonFiniteError"
    assert first[1].startswith("loss is inf on rank 1 at epoch ")


def keep(ranks, folder, epochs):
    session = LocalSession(folder) if ranks.is_rank_zero else None
    return outcome(Trainer(Sides(), UNEVEN, epochs=epochs, seed=0, session=session).fit())


def stop_early(ranks, folder):
    trainer = Trainer(Sides(), UNEVEN, epochs=4, seed=0, session=Stopped(folder, 1))
    return trainer.fit().status


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.soak)])
def test_a_run_of_two_ranks_resumes_on_another_number(tmp_path, world):
    assert on_ranks(2, stop_early, tmp_path) == ["stopped", "stopped"]
    found = keep(SINGLE_PROCESS, tmp_path, 4) if world == 1 else on_ranks(world, keep, tmp_path, 4)[0]
    numbers, weights = apart(found, keep(SINGLE_PROCESS, tmp_path / "alone", 4))
    assert numbers < 1e-6
    assert weights < 1e-5


def test_synchronized_batch_norm_does_not_count_the_sample_of_a_rank_without_samples(monkeypatch):
    """PyTorch's SyncBatchNorm needs GPUs, so another one takes its place."""
    counted = []

    def normalize(norm, x):
        counted.append(len(x))
        return (
            x if len(x) == 0 else torch.nn.functional.batch_norm(x, None, None, norm.weight, norm.bias, training=True)
        )

    monkeypatch.setattr(torch.nn.SyncBatchNorm, "forward", normalize)
    norm = SyncBatchNorm(3)
    x = torch.randn(4, 3)
    assert not torch.equal(norm(x), x)
    norm.has_samples = False
    own = x[:1].requires_grad_()
    (0.0 * norm(own).sum()).backward()
    assert counted == [4, 0]
    assert [gradient.abs().sum() for gradient in (own.grad, norm.weight.grad, norm.bias.grad)] == [0, 0, 0]
    norm.eval()(x[:1].repeat(2, 1))
    assert counted == [4, 0, 2]


class Timed(Sides):
    """Records the timeout of the collectives of the training at points of a run."""

    def __init__(self):
        self.timeouts = []

    def record(self, point):
        timeout = c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        if (point, timeout) not in self.timeouts:
            self.timeouts.append((point, timeout))

    def model(self, config, train):
        self.record("model")
        return super().model(config, train)

    def step(self, model, batch, config):
        self.record("step" if model.training else "evaluation")
        return Step(torch.nn.functional.cross_entropy(model(batch.x), batch.y))


def record_timeouts(ranks):
    first, second = Timed(), Timed()
    for objective in (first, second):
        Trainer(objective, TrainConfig(batch_size=32), epochs=1, seed=0).fit()
    return first.timeouts, second.timeouts


def test_the_timeout_of_steps_begins_after_the_first_step():
    """Connections and kernels are made before, which takes minutes on a large machine."""
    setup, steps = 300.0, 7.0
    expected = [("model", setup), ("evaluation", setup), ("step", setup), ("step", steps), ("evaluation", steps)]
    for found in on_ranks(2, record_timeouts, timeout=steps):
        assert found == (expected, expected)


class Wide(Sides):
    """A model whose weights are much larger than the rest of a checkpoint."""

    def model(self, config, train):
        return torch.nn.Sequential(torch.nn.Linear(8, 8192), torch.nn.ReLU(), torch.nn.Linear(8192, 2))


def resume_counted(ranks, folder):
    """Return the bytes of all pickles that a resumed run exchanges, and its training losses, by strategy."""
    found, pickled = {}, []
    pickle = c10d._object_to_tensor

    def count(*arguments, **more):
        pickled.append((made := pickle(*arguments, **more))[1].item())
        return made

    c10d._object_to_tensor = count
    for strategy in ("ddp", "fsdp"):
        config = TrainConfig(strategy=strategy, batch_size=64)
        kept = partial(Stopped, folder / strategy)
        Trainer(Wide(), config, epochs=2, seed=0, session=kept(1)).fit()
        pickled.clear()
        result = Trainer(Wide(), config, epochs=2, seed=0, session=kept(9)).fit()
        found[strategy] = sum(pickled), [record.metrics["train_loss"] for record in result.history]
    return found


def test_a_resume_sends_no_weights_in_pickles(tmp_path):
    """Pickles of a state of 12 GB would need more than 100 GB of memory on a machine with 8 ranks."""
    weights = sum(4 * parameter.numel() for parameter in Wide().model(None, None).parameters())
    first, second = on_ranks(2, resume_counted, tmp_path)
    for strategy in ("ddp", "fsdp"):
        for size, losses in (first[strategy], second[strategy]):
            assert size < weights / 4, (strategy, size)
            assert len(losses) == 2
            assert losses == first["ddp"][1] or losses == pytest.approx(first["ddp"][1], abs=1e-5)


def rates(ranks, scaling):
    import dataclasses

    config = dataclasses.replace(UNEVEN, lr_scaling=scaling, schedule="constant", warmup_fraction=0.0)
    return Trainer(Sides(), config, epochs=1, seed=0).fit().history[0].metrics["lr"]


def test_the_learning_rate_scales_with_the_number_of_devices_on_request():
    assert on_ranks(2, lambda ranks: [rates(ranks, s) for s in ("none", "linear", "sqrt")])[0] == pytest.approx(
        [0.01, 0.02, 0.01 * math.sqrt(2)]
    )
    assert rates(SINGLE_PROCESS, "linear") == pytest.approx(0.01)


def other_data(ranks):
    class Other(Sides):
        def data(self, seed):
            return super().data(seed + ranks.rank)

    return caught(ranks, lambda _: Trainer(Other(), UNEVEN, epochs=1, seed=0).fit(), lambda _: None)


def test_data_that_differ_between_ranks_are_rejected():
    (first, _) = on_ranks(2, other_data)
    assert first[:2] == (
        "ObjectiveError",
        "Other.data differs between ranks 0 and 1; it must depend only on the seed",
    )


class Failing(Sides):
    """A step fails on one rank while the other waits for its gradient."""

    def loss(self, config, train):
        return Second()


class Second(torch.nn.CrossEntropyLoss):
    def forward(self, output, target):
        if torch.is_grad_enabled() and os.environ["RANK"] == "1":
            raise KeyError("no such layer")
        return super().forward(output, target)


def fail_in_step(ranks):
    return caught(ranks, lambda _: Trainer(Failing(), UNEVEN, epochs=2, seed=0).fit(), lambda _: None)


def test_a_rank_that_fails_in_its_step_blocks_no_other():
    """The connections of the failed step are closed long before the collective timeout."""
    first, second = on_ranks(2, fail_in_step, timeout=3600.0)
    assert first[:2] == ("RankError", "KeyError: 'no such layer' (on rank 1)")
    assert second[:2] == ("KeyError", "'no such layer'")


def close_connections(ranks):
    def close(ranks):
        torch.distributed.destroy_process_group()
        ranks.all_gather_object(None)

    return caught(ranks, close, lambda _: None), ranks.all_gather_object(ranks.rank)


def test_a_loop_that_closes_the_process_group_is_an_error_and_the_next_works():
    for closed, after in on_ranks(2, close_connections):
        assert closed[0] == "ObjectiveError"
        assert "destroy_process_group()" in closed[1]
        assert after == [0, 1]
