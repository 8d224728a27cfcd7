"""The report of a run has its settings, its results and its warnings."""

import json
import re

import pytest
import torch
from torch import nn

from hpsearch import Dataset, Splits, Standardize, TrainConfig, Trainer, Verdict, evaluate
from hpsearch.objectives.training.checks.smoke import run_smoke_test
from hpsearch.objectives.training.data.leakage import count_shared_inputs
from hpsearch.objectives.training.reports.findings import is_same_curve, list_instabilities
from tests.objectives.training.support import Memory, built, fit


def _report(objective, tmp_path, config=None, **settings):
    settings = {"epochs": 4, "seed": 0, **settings}
    result = Trainer(objective, config or TrainConfig(lr=0.02, batch_size=16), run_dir=tmp_path, **settings).fit()
    return result, (tmp_path / "report.md").read_text()


def _section(text, title):
    return re.split(r"\n#+ ", text.partition(f"## {title}\n")[2])[0].strip()


def test_the_report_lists_every_setting_with_its_description(objective_with, tmp_path):
    objective = objective_with(default_config=lambda _self: TrainConfig(lr=0.5, batch_size=16))
    _, text = _report(objective, tmp_path, TrainConfig(lr=0.02, batch_size=16))
    rows = _section(text, "Configuration").splitlines()[2:]
    assert len(rows) == 2, "what differs from the defaults stands first"
    folded = _section(text, "Defaults")
    assert len(folded.splitlines()) == 4 + len(TrainConfig().to_dict()) - 2 + 2
    assert "| `lr` | `0.02` | set for this run; objective default `0.5` |" in rows
    assert "| `batch_size` | `16` | objective default |" in rows
    assert folded.startswith(
        f"<details><summary>{len(TrainConfig().to_dict()) - 2} settings have default values</summary>\n\n| setting"
    )
    assert '| `optimizer` | `"adamw"` |' in folded.splitlines()
    assert folded.endswith("\n\n</details>"), "a table within HTML wants a blank line on both sides"


def test_plots_are_next_to_the_text_about_them(wine, tmp_path):
    _, text = _report(wine, tmp_path)
    assert _section(text, "Training and validation").endswith("\n\n![Learning curves](curves.png)")
    assert _section(text, "Instabilities").endswith("](gradients.png)")
    (tmp_path / "pruned").mkdir()
    (tmp_path / "pruned" / "curves.png").touch()  # from before the resume
    _, pruned = _report(wine, tmp_path / "pruned", session=Memory({1: Verdict.PRUNE}))
    assert "](" not in pruned


def test_training_and_validation_metrics_are_computed_alike(wine, tmp_path):
    """Both use the same weights in evaluation mode. The losses during training are those of other weights."""
    config = TrainConfig(lr=0.02, batch_size=16)
    result, text = _report(wine, tmp_path, config)
    train = wine.data(0).train
    scores = evaluate(result.model, train, wine.loss(config, train), wine.metrics(train), batch_size=99, device="cpu")
    assert result.train_scores == pytest.approx(scores, abs=1e-5)
    row = next(line for line in text.splitlines() if line.startswith("| accuracy"))
    _, _, shown_train, shown_val, gap, _ = (cell.strip() for cell in row.split("|"))
    assert float(shown_train) == pytest.approx(scores["accuracy"], abs=1e-4)
    assert float(shown_val) == pytest.approx(result.best_value, abs=1e-4)
    assert float(gap) == pytest.approx(float(shown_val) - float(shown_train), abs=1e-4)


def _random_labels(_self, seed):
    torch.manual_seed(seed)
    return Splits.make(torch.randn(200, 13), torch.randint(0, 3, (200,)), seed=seed)


def _wide(_self, _config, _train):
    return nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, 3))


def test_overfitting_is_reported(objective_with, tmp_path):
    memorising = objective_with(data=_random_labels, model=_wide)
    config = TrainConfig(lr=0.02, batch_size=16, schedule="constant", weight_decay=0.0)
    _, text = _report(memorising, tmp_path, config, epochs=12)
    gap = _section(text, "Training and validation")
    assert "Overfit: accuracy is 0." in gap
    assert "above its minimum; the later epochs overfitted" in gap


@pytest.mark.slow
def test_a_run_without_a_gap_is_not_reported_as_overfit(wine, tmp_path):
    _, text = _report(wine, tmp_path)
    assert "No large gap" in _section(text, "Training and validation")


def test_underfitting_is_reported(wine, tmp_path):
    _, text = _report(wine, tmp_path, TrainConfig(lr=1e-4, batch_size=16, schedule="constant"))
    assert "more epochs may improve it (underfit)" in text


def test_a_batch_of_all_samples_and_a_gap_in_favor_of_validation(objective_with, tmp_path):
    wine = objective_with()

    def data(_self, seed):
        splits = wine.data(seed)
        wrong = Dataset(splits.train.x, (splits.train.y + torch.arange(len(splits.train)) % 2) % 3)
        return Splits(wrong, splits.val, splits.test)

    _, text = _report(objective_with(data=data), tmp_path, TrainConfig(lr=1e-2, batch_size=1000), epochs=12)
    assert re.search(r"- 12 optimizer steps of 1\d\d samples on cpu", text)
    assert re.search(r"No large gap: accuracy is 0\.\d+ worse in training than in validation", text)


@pytest.mark.slow
def test_a_converged_loss_is_not_reported_as_underfit(wine, tmp_path):
    """A decaying rate lowers the loss less and less until the last epoch."""
    config = TrainConfig(optimizer="sgd", lr=0.1, batch_size=16, schedule="exponential", warmup_fraction=0.0)
    result, text = _report(wine, tmp_path, config, epochs=15)
    losses = [record.metrics["val_loss"] for record in result.history]
    assert losses[-1] == min(losses)
    assert "underfit" not in text


def test_copies_in_the_validation_split_are_counted(objective_with, tmp_path):
    wine = objective_with()

    def data(_self, seed):
        splits = wine.data(seed)
        copied = torch.cat([splits.train.x[:5], splits.val.x]), torch.cat([splits.train.y[:5], splits.val.y])
        return Splits(splits.train, Dataset(*copied), splits.test)

    _, text = _report(objective_with(data=data), tmp_path)
    assert "- 5 of 41 validation inputs are also train inputs" in _section(text, "Possible leakage")
    _, clean = _report(wine, tmp_path / "clean")
    assert _section(clean, "Possible leakage") == "None found."


@pytest.mark.slow
def test_a_validation_split_of_copies_is_detected_from_its_curve(objective_with, tmp_path):
    """Each sample exists ten times, with noise that hides it from an exact comparison."""

    def data(_self, seed):
        generator = torch.Generator().manual_seed(seed)
        cases, y = torch.randn(64, 13, generator=generator), torch.randint(0, 3, (64,), generator=generator)

        def copies(count):
            x = cases.repeat(count, 1)
            return Dataset(x + 1e-4 * torch.randn(x.shape, generator=generator), y.repeat(count))

        return Splits(copies(12), copies(4), copies(1))

    def model(_self, _config, train):
        return nn.Sequential(Standardize.fit(train.x), nn.Linear(13, 16), nn.Tanh(), nn.Linear(16, 3))

    config = TrainConfig(lr=4e-4, batch_size=128, schedule="constant", weight_decay=0.0, warmup_fraction=0.0)
    objective = objective_with(data=data, model=model)
    result, text = _report(objective, tmp_path, config, epochs=100)
    losses = [(r.metrics["train_loss"], r.metrics["val_loss"]) for r in result.history]
    assert count_shared_inputs(objective.data(0).train, objective.data(0).val) == 0
    assert "stayed within 1% of the training loss" in _section(text, "Possible leakage"), losses[-3:]


def test_closely_parallel_curves_are_detected():
    falling = [2.0, 1.5, 1.0, 0.7]
    assert is_same_curve(falling, [value * 1.005 for value in falling])
    assert not is_same_curve(falling, [value * 1.05 for value in falling])
    assert not is_same_curve([2.0] * 4, [2.0] * 4), "nothing was learned, so nothing leaked"
    assert not is_same_curve(falling[:2], falling[:2])


def test_instabilities_are_reported(objective_with, tmp_path):
    class Dead(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(13, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.second(x[:, :8] + 1e-12 * self.first(x))

    config = TrainConfig(optimizer="sgd", lr=1.0, batch_size=16, schedule="constant", log_every=1, clip_grad_norm=0.5)
    _, text = _report(objective_with(model=lambda *_: Dead()), tmp_path, config, epochs=6)
    section = _section(text, "Instabilities")
    assert "the gradient of `first` vanished" in section
    assert "gradient of `second`" not in section
    assert re.search(r"\d+ of 36 recorded steps had a gradient norm above 0.5 and were clipped", section)


def _steps(*norms):
    return [{"step": 50 * step, "grad_norm": None, "layers": {"net": norm}} for step, norm in enumerate(norms)]


@pytest.mark.parametrize(
    ("norms", "exploded"),
    [
        ([5e3] * 20, False),  # large from the start, as with a loss that sums over pixels
        ([0.1] * 10 + [40.0] * 10, True),
        ([1.0] * 10 + [None] * 10, True),
        ([50.0] * 10 + [0.1] * 10, False),
    ],
)
def test_an_exploding_gradient_is_relative_to_earlier_ones_of_the_run(wine, norms, exploded):
    run = built(wine)
    result = fit(wine, epochs=1)
    found = list_instabilities(run, result, _steps(*norms))
    assert any("the gradient of `net` exploded" in line for line in found) == exploded


def test_tiny_gradients_of_the_first_steps_do_not_flag_later_ones(wine):
    """A network with almost no gradient at first, like residual branches, and stable gradients later."""
    dense = [{"step": step, "grad_norm": 0.1, "layers": {"net": 1e-4}} for step in range(1, 20)]
    even = [{"step": 50 * step, "grad_norm": 9.0, "layers": {"net": 1.0}} for step in range(8)]
    found = list_instabilities(built(wine), fit(wine, epochs=1), dense + even)
    assert not any("exploded" in line for line in found)
    assert any("8 of 8 recorded steps had a gradient norm above 1" in line for line in found)


def test_steps_that_loss_scaling_skipped_are_counted(objective_with, tmp_path):
    class Overflowing(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(13, 3)
            self.net.weight.register_hook(self._overflow)
            self.passes = 0

        def _overflow(self, gradient):
            self.passes += 1
            return gradient * torch.inf if self.passes in (3, 4, 9) else gradient

        def forward(self, x):
            return self.net(x / 1000)

    config = TrainConfig(precision="fp16", batch_size=16)
    _, text = _report(objective_with(model=lambda *_: Overflowing()), tmp_path, config)
    assert "- 3 of 24 steps overflowed in fp16 and were skipped" in text


def test_a_jump_of_the_loss_is_reported(objective_with, tmp_path):
    config = TrainConfig(optimizer="sgd", lr=8.0, weight_decay=0.0, clip_grad_norm=None, warmup_fraction=0.9)
    _, text = _report(objective_with(), tmp_path, config, epochs=20)
    assert re.search(r"the training loss rose from \S+ to \S+ in epoch \d+", text)


@pytest.mark.slow
def test_the_report_quotes_the_smoke_test(wine, tmp_path):
    _, before = _report(wine, tmp_path / "a")
    assert "Not run in this folder." in before
    run_smoke_test(wine).write(tmp_path / "b")
    _, after = _report(wine, tmp_path / "b")
    assert re.search(r"One batch of 32 samples: loss \S+ -> \S+, passed\.", after)
    kept = json.loads((tmp_path / "b" / "smoke.json").read_text())
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "smoke.json").write_text(json.dumps({**kept, "passed": False}))
    assert "FAILED: find the cause" in _report(wine, tmp_path / "c")[1]


@pytest.mark.slow
def test_the_report_names_the_checkpoints(wine, tmp_path):
    _, text = _report(wine, tmp_path)
    assert f"- best, for promotion: `{tmp_path / 'best.pt'}`" in text
    assert f"- last, for resuming; deleted when a trial is complete: `{tmp_path / 'last.pt'}`" in text


def test_the_gradient_flow_is_plotted_from_the_logged_steps(wine, tmp_path):
    _report(wine, tmp_path)
    assert (tmp_path / "gradients.png").read_bytes().startswith(b"\x89PNG")
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert {"epoch", "step", "lr", "loss", "grad_norm", "layers"} == set(steps[0])
    _report(wine, tmp_path / "quiet", TrainConfig(log_every=None))
    assert not (tmp_path / "quiet" / "gradients.png").exists()


@pytest.mark.slow
def test_the_share_of_the_largest_class_is_reported_with_the_accuracy(objective_with, tmp_path):
    def data(_self, seed):
        torch.manual_seed(seed)
        return Splits.make(torch.randn(200, 13), (torch.arange(200) % 10 == 0).long(), seed=seed)

    _, text = _report(objective_with(data=data), tmp_path / "uneven")
    assert "| share of the largest class | 0.9 | 0.9 | |" in text
    warned = (tmp_path / "uneven" / "train.log").read_text()
    assert "90% of the training samples have one class, and a constant prediction reaches this accuracy" in warned
    _report(objective_with(data=data, metric="macro_f1"), tmp_path / "f1")
    assert "costs nothing" not in (tmp_path / "f1" / "train.log").read_text()
    _, even = _report(objective_with(), tmp_path / "even")
    assert re.search(r"\| share of the largest class \| 0\.405\d+ \| 0\.388\d+ \| \|", even)
    assert "costs nothing" not in (tmp_path / "even" / "train.log").read_text()
