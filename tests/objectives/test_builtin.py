"""The built-in objectives: their data, their search spaces, their models."""

import re

import optuna
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_digits

from hpsearch import ObjectiveError, TrainConfig, Trainer, evaluate, load_objective
from hpsearch.objectives.builtin.breast_cancer import ERROR, GroupedScaling
from hpsearch.objectives.training.evaluation.losses import BinaryLogits
from hpsearch.objectives.training.optimizers.optimizer import parameter_groups

NAMES = ("breast_cancer", "digits")  # the others: test_builtin_kinds.py


def _trials(objective, count):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(count):
        trial = study.ask()
        yield trial, objective.configure(trial)


@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_of_the_space_builds_and_returns_outputs(name):
    objective = load_objective(name)
    train = objective.data(0).train
    for _, config in _trials(objective, 25):
        assert TrainConfig.from_dict(config.to_dict()) == config
        model = objective.model(config, train).eval()
        loss = objective.loss(config, train)(model(train.x[:5]), train.y[:5])
        assert bool(torch.isfinite(loss).all())


def test_the_space_of_digits_is_conditional():
    common = {"optimizer", "weight_decay", "batch_size", "schedule", "label_smoothing", "model"}
    seen = set()
    for trial, config in _trials(load_objective("digits"), 30):
        kind, optimizer = trial.params["model"], trial.params["optimizer"]
        own = {f"{kind}_{what}" for what in ("layers", "width", "dropout")} | {f"{optimizer}_lr"}
        assert set(trial.params) == common | own
        assert config.model["kind"] == kind
        assert config.lr == trial.params[f"{optimizer}_lr"]
        seen.add((kind, optimizer))
    assert len(seen) == 4


def test_a_fixed_trial_gives_the_same_configuration():
    objective = load_objective("digits")
    for trial, config in _trials(objective, 3):
        assert objective.configure(optuna.trial.FixedTrial(trial.params)) == config


def test_suggest_must_return_a_configuration(objective_with):
    with pytest.raises(ObjectiveError, match=r"Changed\.suggest must return TrainConfig, not dict"):
        objective_with(suggest=lambda _self, _trial: {"lr": 0.1}).configure(None)


def test_digits_has_all_samples_with_their_labels():
    splits = load_objective("digits").data(0)
    raw = load_digits()
    assert [len(part) for _, part in splits.parts()] == [1077, 360, 360]
    for _, part in splits.parts():
        assert part.x.shape[1:] == (1, 8, 8)
        assert torch.equal(part.x[:, 0].double(), torch.as_tensor(raw.images)[part.rows])
        assert torch.equal(part.y, torch.as_tensor(raw.target)[part.rows])


def test_malignant_is_the_positive_class():
    splits = load_objective("breast_cancer").data(0)
    raw = load_breast_cancer()
    assert raw.target_names[0] == "malignant"
    for _, part in splits.parts():
        assert torch.equal(part.y == 1, torch.as_tensor(raw.target)[part.rows] == 0)
        assert float(part.y.float().mean()) == pytest.approx(0.37, abs=0.02)


def test_the_columns_of_breast_cancer_are_in_the_documented_groups():
    names = list(load_breast_cancer().feature_names)
    assert all(name.endswith(" error") for name in names[ERROR])
    assert all(name.startswith("mean ") for name in names[:10])
    assert all(name.startswith("worst ") for name in names[20:])


def test_scaling_is_fitted_on_training_data_and_stored_in_buffers():
    objective = load_objective("breast_cancer")
    train, val = objective.data(0).train, objective.data(0).val
    scaling = GroupedScaling.fit(train.x)
    scaled = scaling(train.x)
    assert float(scaled.mean(0).abs().max()) < 0.05
    assert float((scaled.std(0) - 1).abs().max()) < 0.15
    assert float(scaled[:, ERROR].abs().max()) < 6, "a logarithm tames the errors"
    assert not list(scaling.parameters())
    assert len(scaling.state_dict()) == 7
    copied = GroupedScaling.fit(val.x)
    copied.load_state_dict(scaling.state_dict())
    assert torch.equal(copied(val.x), scaling(val.x))


@pytest.mark.slow
def test_smoothed_and_weighted_binary_cross_entropy():
    torch.manual_seed(0)
    logits, y = torch.randn(50, 1), torch.randint(0, 2, (50,))
    loss = BinaryLogits(label_smoothing=0.2, pos_weight=torch.tensor(3.0))(logits, y)
    p, soft = logits[:, 0].sigmoid(), torch.where(y == 1, 0.9, 0.1)
    torch.testing.assert_close(loss, -(3 * soft * p.log() + (1 - soft) * (1 - p).log()))


@pytest.mark.slow
def test_the_default_configuration_of_breast_cancer_is_good():
    """Tests of `hpsearch train` cover the default configuration of digits."""
    objective = load_objective("breast_cancer")
    result = Trainer(objective, objective.default_config(), epochs=objective.epochs, seed=0).fit()
    assert result.best_value >= 0.98
    best = result.best_metrics
    assert best["val_average_precision"] > 0.95 > best["val_base_rate"] == pytest.approx(0.377, abs=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_batch_norm_and_biases_have_no_weight_decay(name):
    objective = load_objective(name)
    model = objective.model(objective.default_config(), objective.data(0).train)
    decay, plain = parameter_groups(model, TrainConfig())
    assert all(parameter.ndim >= 2 for parameter in decay["params"])
    assert all(parameter.ndim < 2 for parameter in plain["params"])


def _exported(name, kind):
    objective = load_objective(name)
    config = objective.default_config()
    if kind == "mlp":
        config = TrainConfig(lr=3e-3, model={"kind": "mlp", "layers": 2, "width": 32, "dropout": 0.3})
    result = Trainer(objective, config, epochs=3, seed=0).fit()
    batch = torch.export.Dim("batch", min=1, max=4096)
    return (
        objective,
        config,
        result,
        torch.export.export(result.model, (result.example.x,), dynamic_shapes=[{0: batch}]),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("digits", "cnn"), ("digits", "mlp"), ("breast_cancer", "mlp+")])
def test_the_exported_model_reproduces_the_score_from_raw_inputs(tmp_path, name, kind):
    objective, config, result, program = _exported(name, kind)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for rows in (1, 2, 7, len(result.val)):
        torch.testing.assert_close(loaded(result.val.x[:rows]), result.model(result.val.x[:rows]))

    class Served(torch.nn.Module):  # an exported module has no evaluation mode
        def forward(self, x):
            return loaded(x)

    loss, metrics = objective.loss(config, result.val), objective.metrics(result.val)
    scores = evaluate(Served(), result.val, loss, metrics, batch_size=100, device="cpu")
    assert scores[objective.metric] == pytest.approx(result.best_value, abs=1e-6)


@pytest.mark.parametrize(("name", "kind"), [("digits", "cnn"), ("digits", "mlp"), ("breast_cancer", None)])
def test_a_model_has_an_explicit_initialisation_and_no_loss_inside(name, kind):
    """He initialisation before a ReLU, and equal class probabilities at the start, unlike torch's defaults."""
    objective = load_objective(name)
    train = objective.data(0).train
    settings = {"layers": 2, "width": 64} | ({"kind": kind} if kind else {})
    torch.manual_seed(0)
    model = objective.model(TrainConfig(model=settings), train).eval()
    weights = [m.weight.detach() for m in model.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d)]
    for weight in weights[:-1]:
        fan_in = weight[0].numel()
        assert float(weight.std()) == pytest.approx((2 / fan_in) ** 0.5, rel=0.15)
    assert float(weights[-1].std()) == pytest.approx(0.01, rel=0.3)
    assert float(model(train.x[:64]).detach().softmax(-1).std()) < 0.2
    assert not any(isinstance(module, torch.nn.modules.loss._Loss) for module in model.modules())


@pytest.mark.parametrize("name", NAMES)
def test_a_model_documents_its_shapes(name):
    objective = load_objective(name)
    train = objective.data(0).train
    said = re.search(r"\[n, ([\d, ]+)\] .*-> .*\[n, (\d+)\]", type(objective).model.__doc__)
    assert [int(size) for size in said[1].split(", ")] == list(train.x.shape[1:])
    assert [int(said[2])] == list(objective.model(objective.default_config(), train)(train.x[:2]).shape[1:])
