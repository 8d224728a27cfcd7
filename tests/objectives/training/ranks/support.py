"""Run a function on several ranks: real processes on one machine, connected by gloo."""

import dataclasses
import multiprocessing
import os
import pickle
import socket
import traceback

import torch
from torch import nn

from hpsearch import Objective, Splits, TrainConfig
from hpsearch.objectives.training.data.loader import make_parent_death_hook
from hpsearch.objectives.training.ranks import init_process_group

WAIT = 300.0  # time limit in seconds for all ranks, for busy machines


def on_ranks(world, function, *arguments, timeout=120.0, store_path=None):
    """Call the function with the ranks and the arguments on each rank, and return all results."""
    bind = make_parent_death_hook()
    context = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    processes = [
        context.Process(target=_rank, args=(bind, rank, world, port, timeout, store_path, sent, function, arguments))
        for rank, (_, sent) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, sent in pipes:
        sent.close()
    try:
        found = [_received(received) for received, _ in pipes]
    finally:
        for process in processes:
            process.kill()
    wrong = [said for done, said in found if not done]
    assert not wrong, "\n".join(wrong)
    return [value for _, value in found]


def _received(pipe):
    if not pipe.poll(WAIT):
        return False, "a rank did not end"
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return False, "a rank died"


def _rank(bind, rank, world, port, timeout, store_path, sent, function, arguments):
    bind()
    torch.set_num_threads(1)
    here = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables = {"RANK": rank, "WORLD_SIZE": world, **here}
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        with init_process_group(timeout=timeout, store_path=store_path) as ranks:
            value = True, function(ranks, *arguments)
    except BaseException:
        value = False, f"rank {rank}: {traceback.format_exc()}"
    sent.send_bytes(pickle.dumps(value))
    sent.close()


def outcome(result):
    """Return the results of a run as plain values: each epoch's metrics without times, and the best weights."""
    times = ("epoch_seconds", "samples_per_second", "samples_per_second_per_device", "scaling_efficiency")
    history = [{k: v for k, v in r.metrics.items() if k not in times} for r in result.history]
    return history, {name: tensor.numpy() for name, tensor in result.model.state_dict().items()}


def apart(found, expected):
    """Return the largest differences between two outcomes: of metrics, and of weights."""
    assert [list(a) for a in found[0]] == [list(b) for b in expected[0]]
    numbers = max(abs(a[name] - b[name]) for a, b in zip(found[0], expected[0], strict=True) for name in b)
    weights = max(abs(found[1][name] - weight).max() for name, weight in expected[1].items())
    return numbers, weights


class Sides(Objective):
    """203 points on two sides of a line. Neither samples nor batches can be divided evenly."""

    metric = "accuracy"

    def suggest(self, trial):
        return TrainConfig()

    def data(self, seed):
        made = torch.Generator().manual_seed(seed)
        x = torch.randn(203, 8, generator=made)
        return Splits.make(x, (x[:, 0] + 0.5 * x[:, 1] > 0).long(), seed=seed)

    def model(self, config, train):
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


UNEVEN = TrainConfig(batch_size=37, gradient_accumulation_steps=2, clip_grad_norm=0.5, drop_last=False, lr=0.01)


class WideSides(Sides):
    """The same with weights that cannot be divided evenly."""

    def model(self, config, train):
        return nn.Sequential(nn.Linear(8, 15), nn.ReLU(), nn.Linear(15, 15), nn.LayerNorm(15), nn.Linear(15, 2))


SHARDED = TrainConfig(
    strategy="fsdp", batch_size=37, gradient_accumulation_steps=2, clip_grad_norm=0.5, drop_last=False, lr=0.01
)
AVERAGED = dataclasses.replace(SHARDED, ema_decay=0.9, activation_checkpointing=True)
