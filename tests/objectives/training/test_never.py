"""Things that a training loop must never do. Each entry without a test here names the test that checks it."""

import ast
import functools
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from hpsearch import ObjectiveError, TrainConfig, Trainer
from hpsearch.objectives.training.reproducibility import checkpoint

SOURCES = sorted((Path(__file__).parents[3] / "objectives").rglob("*.py"))

# fit on validation data: test_trainer::test_the_model_receives_only_training_data
# evaluate without eval(): test_metrics::test_a_loss_is_the_mean_over_samples_for_any_batch_size
# swallow a NaN: test_guards::test_a_non_finite_step_ends_the_epoch_before_the_optimizer_step
# step the schedule unconditionally: test_precision::test_a_step_that_loss_scaling_skips_changes_no_state
FORBIDDEN = {
    "DataParallel": "one process drives one device",
    "cuda.amp": "deprecated: torch.amp",
    "pickle.load": "runs what it reads",
    "pickle.dump": "a module's pickle is code",
    "jit.script": "deprecated",
}


@functools.cache
def read_names():
    """Return the names, attributes and imports of all source files, each after the name of its file."""
    assert SOURCES
    return [
        f"{path.name}: {ast.unparse(node)}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.Name | ast.Import | ast.ImportFrom)
    ]


@pytest.mark.parametrize("name", sorted(FORBIDDEN))
def test_no_source_file_uses_forbidden_calls(name):
    found = [text for text in read_names() if re.search(rf"\b{name}", text)]
    assert found == [], FORBIDDEN[name]


def test_every_load_is_weights_only():
    calls = [
        node
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert calls
    for call in calls:
        assert "weights_only=True" in ast.unparse(call)


def test_a_checkpoint_contains_no_module(wine, tmp_path):
    Trainer(wine, TrainConfig(ema_decay=0.9), epochs=1, seed=0, run_dir=tmp_path).fit()

    def values(item):
        if isinstance(item, dict):
            for key, value in item.items():
                yield from (*values(key), *values(value))
        elif isinstance(item, list | tuple):
            for value in item:
                yield from values(value)
        else:
            yield item

    for name in ("last.pt", "best.pt"):
        kinds = {type(value) for value in values(checkpoint.read(tmp_path / name))}
        assert kinds <= {torch.Tensor, int, float, str, bool, type(None)}, name


def test_the_training_loss_cannot_select_the_best_epoch(objective_with):
    """Validation labels are shuffled, so that a better fit of the training split does not help there."""
    wine = objective_with()

    def data(_self, seed):
        splits = wine.data(seed)
        torch.manual_seed(3)
        splits.val.y[:] = splits.val.y[torch.randperm(len(splits.val))]
        return splits

    result = Trainer(objective_with(data=data), TrainConfig(lr=0.02, batch_size=16), epochs=8, seed=0).fit()
    train = [record.metrics["train_loss"] for record in result.history]
    val = [record.metrics["val_accuracy"] for record in result.history]
    assert train.index(min(train)) == 7
    assert result.best_epoch == val.index(max(val)) < 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"gradient_accumulation_steps": 7, "batch_size": 16},
            "gradient_accumulation_steps 7 with batch_size 16 is more than an epoch of 106 samples; ",
        ),
        ({"warmup_steps": 6, "batch_size": 32}, r"warmup_steps must be below 6 \(all steps\), not 6"),
        ({"schedule": "step", "decay_epochs": 2}, r"decay_epochs must be below epochs \(2\), not 2"),
        (
            {"schedule": "cosine_restarts", "cycles": 3, "batch_size": 64},
            "cycles must be at most the run's 2 steps, not 3",
        ),
    ],
)
def test_an_incompatible_recipe_is_reported_before_training(objective_with, settings, message):
    def model(_self, _config, _train):
        net = nn.Linear(13, 3)
        net.register_forward_hook(lambda *_: pytest.fail("it trained"))
        return net

    with pytest.raises(ObjectiveError, match=message):
        Trainer(objective_with(model=model), TrainConfig(**settings), epochs=2, seed=0).fit()


def test_a_batch_larger_than_the_data_is_reported_and_contains_all(wine, tmp_path):
    result = Trainer(wine, TrainConfig(batch_size=500), epochs=1, seed=0, run_dir=tmp_path).fit()
    assert "batch_size 500 exceeds the 106 training samples" in (tmp_path / "train.log").read_text()
    assert result.history[0].metrics["train_loss"] > 0
