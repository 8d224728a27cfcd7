"""Objectives with structured batches or a custom training step."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from hpsearch import Objective, ObjectiveError, Splits, TrainConfig, Trainer
from hpsearch.objectives.training.checks.lr_range import run_lr_range_test
from hpsearch.objectives.training.checks.smoke import run_smoke_test
from hpsearch.objectives.training.data.samples import pad_collate
from hpsearch.objectives.training.data.tree import tensors
from hpsearch.objectives.training.evaluation.step import Step, bind_forward, call_single
from hpsearch.objectives.training.serving_module import make_exportable
from tests.objectives.training.support import Memory, built, exact, fit, same_result, take_step, weights_of

WORKERS = {"num_workers": 2}
VARIANTS = (
    {},
    WORKERS,
    {"gradient_accumulation_steps": 2, "ema_decay": 0.9},
    {"optimizer": "sam"},
    {"swa_fraction": 0.5},
    {"precision": "bf16"},
)


class Text(Objective):
    """The task: which of two kinds of ids is the majority in sequences of different lengths."""

    def suggest(self, trial):
        return TrainConfig(lr=trial.suggest_float("lr", 1e-2, 1e-1, log=True), batch_size=16)

    def data(self, seed):
        rng = np.random.default_rng(0)
        texts = [rng.integers(1, 30, int(rng.integers(3, 20))) for _ in range(160)]
        return Splits.make(texts, [int((text < 15).mean() > 0.5) for text in texts], seed=seed, collate=pad_collate)

    def model(self, config, train):
        return _Bag()


class _Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.last = nn.Embedding(30, 8, padding_idx=0), nn.Linear(8, 2)

    def forward(self, ids, lengths):
        return self.last(self.embed(ids).sum(dim=1) / lengths[:, None])


class Graphs(Objective):
    """Graphs of different sizes as node values, edges and graph indices; the target is the sum over edges."""

    metric, direction = "rmse", "minimize"

    def suggest(self, trial):
        return TrainConfig(lr=trial.suggest_float("lr", 1e-2, 1e-1, log=True), batch_size=16)

    def data(self, seed):
        rng = np.random.default_rng(0)
        graphs = []
        for _ in range(120):
            nodes = rng.normal(size=int(rng.integers(2, 7))).astype(np.float32)
            edges = rng.integers(0, len(nodes), size=(int(rng.integers(1, 9)), 2))
            graphs.append(((nodes, edges), float(nodes[edges].prod(axis=1).sum())))
        targets = [target for _, target in graphs]
        return Splits.make([graph for graph, _ in graphs], targets, seed=seed, collate=_joined)

    def model(self, config, train):
        return _Edges()


def _joined(samples):
    start, nodes, edges, owner = 0, [], [], []
    for number, ((values, pairs), _) in enumerate(samples):
        nodes.append(torch.as_tensor(values))
        edges.append(torch.as_tensor(pairs) + start)
        owner.append(torch.full((len(values),), number))
        start += len(values)
    x = {"nodes": torch.cat(nodes), "edges": torch.cat(edges), "graph": torch.cat(owner)}
    return x, torch.tensor([target for _, target in samples])


class _Edges(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, nodes, edges, graph):
        a, b = nodes[edges[:, 0]], nodes[edges[:, 1]]
        messages = self.net(torch.stack([a, b, a * b], dim=1)).squeeze(1)
        count = int(graph[-1]) + 1
        return messages.new_zeros(count).index_add(0, graph[edges[:, 0]], messages)


class Vae(Objective):
    """A tiny variational autoencoder of digits with a custom step."""

    metric, direction, loss_floor = "bound", "minimize", None

    def suggest(self, trial):
        return TrainConfig(lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True))

    def data(self, seed):
        from sklearn.datasets import load_digits

        x = load_digits().data[:300] / 16
        return Splits.make(x, x, seed=seed)

    def model(self, config, train):
        return _Encoder()

    def step(self, model, batch, config):
        decoded, mean, log_var = model(batch.x)
        rebuilt = functional.mse_loss(decoded, batch.x, reduction="none").sum(dim=1)
        kl = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(dim=1)
        return Step(rebuilt + kl, metrics={"bound": (rebuilt + kl).mean(), "kl": kl.mean()})


class _Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(64, 16), nn.Linear(8, 64)

    def forward(self, x):
        mean, log_var = self.encode(x).chunk(2, dim=1)
        return self.decode(mean + torch.randn_like(mean) * (log_var / 2).exp()), mean, log_var


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "variant"),
    [
        pytest.param(problem, variant, marks=[pytest.mark.soak] if variant == WORKERS else [])
        for problem in (Text, Graphs, Vae)
        for variant in VARIANTS
    ],
    ids=str,
)
def test_all_features_of_the_loop_work_for_any_data_structure(problem, variant):
    objective = problem()
    config = dataclasses.replace(objective.default_config(), **variant)
    result = fit(objective, config, epochs=4)
    losses = [record.metrics["val_loss"] for record in result.history]
    assert losses[-1] < losses[0]
    assert f"val_{objective.metric}" in result.best_metrics


@pytest.mark.parametrize("problem", [Text, Graphs, Vae])
def test_any_data_structure_works_in_the_checks_before_a_search(problem):
    objective = problem()
    assert run_smoke_test(objective, steps=300).losses[-1] < 0.9 * run_smoke_test(objective, steps=1).losses[0]
    assert 1e-4 < run_lr_range_test(objective, steps=60).suggestion < 10


@pytest.mark.slow
@pytest.mark.parametrize("problem", [Text, Graphs, Vae])
def test_a_resumed_run_is_bit_identical(problem, tmp_path):
    objective = problem()
    config = objective.default_config()
    whole = Trainer(objective, config, epochs=4, seed=3, session=Memory()).fit()
    from hpsearch import LocalSession, Verdict

    class Stopped(LocalSession):
        def report(self, record):
            return Verdict.STOP if record.epoch == 1 else Verdict.CONTINUE

    assert Trainer(objective, config, epochs=4, seed=3, session=Stopped(tmp_path)).fit().status == "stopped"
    same_result(Trainer(problem(), config, epochs=4, seed=3, session=LocalSession(tmp_path)).fit(), whole)


@pytest.mark.slow
def test_loader_processes_change_no_result():
    found = [fit(Text(), TrainConfig(lr=0.05, batch_size=16, num_workers=n), epochs=2) for n in (None, 0, 2)]
    assert exact(found[0].history) == exact(found[1].history) == exact(found[2].history)


def test_an_exported_model_takes_its_tensors_in_order_and_any_length():
    result = fit(Text(), TrainConfig(lr=0.05, batch_size=16), epochs=1)
    module, parts = make_exportable(result.model, result.call, result.example.x)
    assert [name for name, _ in parts] == ["ids", "lengths"]
    assert result.example.dynamic_dims == [{0, 1}, {0}]
    shapes = [dict.fromkeys(free, torch.export.Dim.AUTO) for free in result.example.dynamic_dims]
    exported = torch.export.export(module, tuple(part for _, part in parts), dynamic_shapes=shapes).module()
    batch = result.val.batch(slice(5, 22))
    torch.testing.assert_close(exported(*(t for _, t in tensors(batch.x))), result.model(**batch.x))


def test_inputs_may_have_keywords_of_python_as_names():
    class Edges(nn.Module):
        def forward(self, x):
            return x["from"] - x["to"]

    x = {"from": torch.ones(4, 2), "to": torch.zeros(4, 2)}
    module, parts = make_exportable(Edges(), call_single, x)
    exported = torch.export.export(module, tuple(part for _, part in parts)).module()
    torch.testing.assert_close(exported(x["from"], x["to"]), torch.ones(4, 2))


def test_a_compiled_model_takes_several_inputs():
    class Sum(nn.Module):
        def forward(self, x, y):
            return x + y

    model, x = torch.compile(Sum(), backend="eager"), (torch.ones(2), torch.ones(2))
    torch.testing.assert_close(bind_forward(model, x)(model, x), torch.full((2,), 2.0))


def test_several_outputs_are_passed_to_custom_loss_and_metrics(objective_with):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.classes, self.strength = nn.Linear(13, 3), nn.Linear(13, 1)

        def forward(self, x):
            return {"classes": self.classes(x), "strength": self.strength(x)}

    class Both(nn.Module):
        def forward(self, output, target):
            classes = functional.cross_entropy(output["classes"], target["grower"], reduction="none")
            return classes + (output["strength"].squeeze(1) - target["alcohol"]).square()

    class Hits:
        def reset(self):
            self.hits, self.rows = 0, 0

        def update(self, output, target):
            self.hits += int((output["classes"].argmax(1) == target["grower"]).sum())
            self.rows += len(target["grower"])

        def compute(self):
            return {"hits": self.hits / self.rows}

    def data(_self, seed):
        from sklearn.datasets import load_wine

        x, y = load_wine(return_X_y=True)
        x = (x - x.mean(0)) / x.std(0)
        return Splits.make(x, {"grower": y, "alcohol": x[:, 0]}, seed=seed)

    parts = {"data": data, "model": lambda *_: Two(), "loss": lambda *_: Both(), "metrics": lambda *_: Hits()}
    result = fit(objective_with(**parts, metric="hits"), TrainConfig(lr=0.05, batch_size=16), epochs=6)
    assert result.best_value > 0.8


def test_a_single_torchmetrics_metric_is_optimised(objective_with):
    from torchmetrics.classification import MulticlassCohenKappa

    result = fit(objective_with(metric="kappa", metrics=lambda *_: MulticlassCohenKappa(3)), epochs=3)
    assert result.best_value == result.best_metrics["val_kappa"] > 0.5


def test_the_weight_of_a_step_applies_to_accumulation(objective_with):
    """Two micro-batches with weights 1 and 3 train like their weighted mean."""

    def weighted(weight):
        def step(_self, model, batch, config):
            loss = functional.cross_entropy(model(batch.x), batch.y)
            return Step(loss, weight=weight.pop(0) if weight else None)

        return step

    def learned(weights, *window):
        run = built(
            objective_with(metric="loss", direction="minimize", step=weighted([])), optimizer="sgd", batch_size=8
        )
        run.step_function._objective = objective_with(step=weighted(list(weights)))
        loss, _ = take_step(run, *window)
        return float(loss), weights_of(run)

    a, b = list(range(8)), list(range(8, 16))
    loss, weights = learned([torch.tensor(1.0), torch.tensor(3.0)], a, b)
    same_loss, same = learned([4.0], a + b + b + b)
    assert loss == pytest.approx(same_loss, rel=1e-5)
    assert torch.allclose(weights, same, atol=1e-6)


class _Ids(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(13, 3)

    def forward(self, ids, mask):
        return self.net(ids * mask)


def _dictionary(_self, seed):
    from sklearn.datasets import load_wine

    x, y = load_wine(return_X_y=True)
    return Splits.make({"ids": x, "weights": np.ones_like(x)}, y, seed=seed)


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        (
            {"data": _dictionary, "model": lambda *_: _Ids()},
            r"_Ids.forward takes \(ids, mask\), but a batch of inputs has ids, weights",
        ),
        ({"step": lambda *_: 3.0}, "Changed.step must return a Step, not float"),
        (
            {"step": lambda *_: Step(torch.zeros(2, 2))},
            r"Changed.step: the loss must have shape \[\d+\] or \[\], not \[2, 2\]",
        ),
        ({"step": lambda *_: 1 / 0}, r"Changed.step: .*test_structures.py:\d+: ZeroDivisionError"),
        (
            {"metrics": lambda *_: 3},
            "metrics\\(\\) must return an object with the methods update, compute and reset, not int",
        ),
    ],
)
def test_mistakes_are_reported_before_training(objective_with, replaced, message):
    session = Memory()
    with pytest.raises(ObjectiveError, match=message) as error:
        fit(objective_with(**replaced), session=session)
    assert "\n" not in str(error.value)
    assert not session.saved


@pytest.mark.parametrize("metric", ["accuracy", "macro_f1", "auroc"])
def test_a_step_without_outputs_has_no_metrics_of_outputs(objective_with, metric):
    """The metrics of no samples, such as an accuracy of 0, would look like a result."""

    def step(_self, model, batch, _config):
        return Step(functional.cross_entropy(model(batch.x), batch.y))

    with pytest.raises(ObjectiveError, match=rf"^metric '{metric}' .*; or let step\(\) return outputs and targets$"):
        fit(objective_with(step=step, metric=metric))
    own = objective_with(step=step, metric="loss", direction="minimize")
    assert set(fit(own).history[-1].metrics) >= {"val_loss"}


def test_a_step_may_have_outputs_in_validation_only(objective_with, tmp_path):
    """Outputs of training may be too large, or of another model."""

    def step(_self, model, batch, _config):
        output = model(batch.x)
        return Step(functional.cross_entropy(output, batch.y), outputs=None if model.training else output)

    result = Trainer(objective_with(step=step), TrainConfig(), epochs=2, seed=0, run_dir=tmp_path).fit()
    metrics = result.history[-1].metrics
    assert 0 <= metrics["val_accuracy"] <= 1
    assert "train_accuracy" not in metrics
    assert (tmp_path / "report.md").exists()
