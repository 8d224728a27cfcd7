"""Training on several ranks equals one process: metrics within 1e-6, weights within 1e-5."""

import dataclasses

import pytest
import torch
from torch import nn

from hpsearch import Dataset, Splits, Step, TrainConfig, Trainer
from hpsearch.objectives.training.loop.epoch import train_epoch
from tests.objectives.training.ranks.support import UNEVEN, Sides, apart, on_ranks, outcome

pytestmark = pytest.mark.xdist_group("ranks")  # the tests share runs


class Ranked(Sides):
    """Its metric needs all scores at once."""

    metric = "auroc"

    def model(self, config, train):
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


class Ignoring(Sides):
    """Some samples have no label. A batch's mean is over the others, whose number differs between ranks."""

    def data(self, seed):
        splits = super().data(seed)
        train = dataclasses.replace(
            splits.train, y=torch.where(torch.arange(len(splits.train)) % 3 == 0, -100, splits.train.y)
        )
        return dataclasses.replace(splits, train=train)

    def loss(self, config, train):
        return nn.CrossEntropyLoss()


class Largest:
    """A metric without support for several processes."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.found, self.count = 0.0, 0

    def update(self, output, target):
        self.found = max(self.found, float(output.detach().abs().max()))
        self.count += len(target)

    def compute(self):
        return {"largest": self.found, "seen": float(self.count)}


class CustomStep(Sides):
    """A step that calls a method of the model, skips a layer, and returns a custom metric."""

    metric = "largest"
    direction = "minimize"

    def model(self, config, train):
        return Encoder()

    def step(self, model, batch, config):
        codes = model.encode(batch.x)
        loss = nn.functional.cross_entropy(model.head(codes), batch.y, reduction="none")
        return Step(loss, outputs=codes, metrics={"spread": codes.std(dim=1).mean()})

    def metrics(self, train):
        return Largest()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.unused = nn.Linear(8, 16), nn.Linear(16, 2), nn.Linear(3, 3)

    def encode(self, x):
        return torch.tanh(self.body(x))


class Routed(Sides):
    """A mixture of two experts, one of which gets no sample of some batches on some ranks."""

    def model(self, config, train):
        return Experts()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])

    def forward(self, x):
        chosen = (x[:, 0] > 0).long()
        outputs = x.new_zeros(len(x), 2)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                outputs = outputs.index_copy(0, rows, expert(x[rows]))
        return outputs


class Loaded(Sides):
    """Samples from a DataLoader."""

    def data(self, seed):
        splits = super().data(seed)
        parts = [list(zip(part.x, part.y.tolist(), strict=True)) for _, part in splits.parts()]
        return Splits(*(Dataset.of(part) for part in parts))

    def metrics(self, train):
        from hpsearch.objectives.training.evaluation.metrics import classification

        return classification(2)


class Whole(Sides):
    """A metric of a whole split."""

    metric = "spread"

    def evaluate(self, model, part, config):
        return {"spread": float(model(part.x).std(dim=0).mean())}


RUNS = {
    "ema": (Sides, dataclasses.replace(UNEVEN, ema_decay=0.9)),
    "swa": (Sides, dataclasses.replace(UNEVEN, swa_fraction=0.5)),
    "sam": (Sides, dataclasses.replace(UNEVEN, optimizer="sam")),
    "batches smaller than the ranks": (Sides, dataclasses.replace(UNEVEN, batch_size=3, eval_batch_size=3)),
    "auroc": (Ranked, UNEVEN),
    "ignored labels": (Ignoring, UNEVEN),
    "own step and metric": (CustomStep, UNEVEN),
    "static graph with an unused layer": (
        CustomStep,
        dataclasses.replace(UNEVEN, gradient_accumulation_steps=1, static_graph=True),
    ),
    "experts": (Routed, dataclasses.replace(UNEVEN, batch_size=6, find_unused_parameters=True)),
    "whole split": (Whole, UNEVEN),
    "loader": (Loaded, dataclasses.replace(UNEVEN, num_workers=1)),
}

DIVIDED = ("auroc", "own step and metric", "whole split", "loader", "batches smaller than the ranks")


def train(name):
    objective, config = RUNS[name]
    return outcome(Trainer(objective(), config, epochs=3, seed=0).fit())


def score(name):
    """Return the score of a run on a new split, which evaluates halves; only rank 0 has it."""
    objective, config = RUNS[name]
    return Trainer(objective(), config, epochs=3, seed=0, resplit_seed=7).fit().resplit_score


def count_divided_graphs():
    """Return how many graphs the compiler divides at DDP's buckets in a run, and the status of the run."""
    from torch._dynamo.backends.distributed import DDPOptimizer

    calls, divide = [], DDPOptimizer.compile_fn
    compile_call = torch.compile
    torch.compile = lambda call: compile_call(call, backend="eager")
    DDPOptimizer.compile_fn = lambda *arguments: calls.append(1) or divide(*arguments)
    try:
        result = Trainer(Sides(), TrainConfig(batch_size=32, compile=True), epochs=1, seed=0).fit()
    finally:
        torch.compile, DDPOptimizer.compile_fn = compile_call, divide
    return len(calls), result.resume_note


def count_compiled_layers():
    """Return how many graphs the compiler makes of the layers of a sharded model, and the status of the run."""
    from torch._dynamo.testing import CompileCounter

    counter, compile_call = CompileCounter(), torch.compile
    torch.compile = lambda call: compile_call(call, backend=counter)
    try:
        config = TrainConfig(batch_size=32, compile=True, strategy="fsdp", ema_decay=0.9)
        result = Trainer(Sides(), config, epochs=1, seed=0).fit()
    finally:
        torch.compile = compile_call
    return counter.frame_count, result.resume_note


def fail_to_compile(ranks, strategy):
    """Return the reason why no rank compiles if one rank cannot."""
    compile_call = torch.compile

    def fail(*_):
        raise KeyError("no compiler")

    torch.compile = lambda call: compile_call(call, backend=fail if ranks.rank else "eager")
    try:
        config = TrainConfig(batch_size=32, compile=True, strategy=strategy)
        return Trainer(Sides(), config, epochs=1, seed=0).fit().resume_note
    finally:
        torch.compile = compile_call


def compile_with(ranks, count, strategy):
    return count(), fail_to_compile(ranks, strategy)  # counts first, because the compiler keeps what it has compiled


@pytest.mark.parametrize(
    ("strategy", "count", "least"),
    [
        pytest.param("ddp", count_divided_graphs, 1, id="ddp"),
        pytest.param("fsdp", count_compiled_layers, 4, id="fsdp", marks=pytest.mark.soak),  # two, and their averages
    ],
)
def test_ranks_compile_the_parts_of_a_model_between_communication_on_all_ranks_or_none(strategy, count, least):
    """That is, DDP's buckets and FSDP's layers."""
    (compiled, failed), others = on_ranks(2, compile_with, count, strategy)
    assert (compiled, failed) == others
    assert compiled[0] >= least
    assert compiled[1] is None
    assert failed.startswith("model not compiled: ")
    assert "no compiler" in failed


class Deep(Sides):
    """Five layers with about 1 MiB of gradients each."""

    def model(self, config, train):
        return nn.Sequential(nn.Linear(8, 512), *(nn.Linear(512, 512) for _ in range(5)), nn.Linear(512, 2))


def count_buckets(_ranks):
    counts = []
    for size in (None, 1, 50):
        run = Trainer(Deep(), TrainConfig(batch_size=40, bucket_cap_mb=size), epochs=1, seed=0).build()
        train_epoch(run, 0)
        sizes = run.strategy._wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        counts.append(len(sizes.split(",")))
    return counts


@pytest.mark.soak
def test_gradients_are_reduced_in_buckets_of_the_given_size():
    assert on_ranks(2, count_buckets) == [[2, 6, 1]] * 2


def train_all(_ranks):
    return {name: train(name) for name in RUNS}, {name: score(name) for name in DIVIDED}


@pytest.fixture(scope="module")
def alone():
    torch.set_num_threads(1)
    return train_all(None)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.soak)])
def ranked(request):
    return on_ranks(request.param, train_all)


@pytest.mark.parametrize("name", RUNS)
def test_training_on_ranks_equals_one_process(name, alone, ranked):
    expected = alone[0][name]
    for found, _ in ranked:
        numbers, weights = apart(found[name], expected)
        assert numbers < 1e-6, numbers
        assert weights < 1e-5, weights
    assert expected[0][0] != expected[0][-1]  # it learned


@pytest.mark.parametrize("name", DIVIDED)
def test_evaluation_in_halves_on_ranks_equals_one_process(name, alone, ranked):
    expected, found = alone[1][name], ranked[0][1][name]
    assert found.value == pytest.approx(expected.value, abs=1e-6)
    assert found.error == pytest.approx(expected.error, abs=1e-5)
    assert (found.epochs, found.sizes) == (expected.epochs, expected.sizes)
