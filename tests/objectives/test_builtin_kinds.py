"""The built-in objectives for one kind of problem each: splits do not leak, and models learn and export."""

import math
import sys
from functools import cache
from itertools import chain

import optuna
import pytest
import torch

import hpsearch.objectives.builtin.molecules as module_of_molecules
from hpsearch import LocalSession, LoopObjective, ObjectiveError, Verdict, load_objective
from hpsearch.objectives.builtin.gan import build_networks, frechet_distance, load_images
from hpsearch.objectives.builtin.language import ALPHABET, load_corpus
from hpsearch.objectives.builtin.series import FORECAST_WEEKS, INPUT_WEEKS, load_weekly_values
from hpsearch.objectives.builtin.text import LONGEST, SHORTEST, TOPICS, load_paragraphs
from hpsearch.objectives.fit import fit
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.data.tree import tensors

NAMES = ("text", "molecules", "language", "series", "denoise")
SLOW = ("text", "molecules", "language")


@pytest.fixture(scope="module", autouse=True)
def _read_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_of_molecules, "load_molecules", cache(module_of_molecules.load_molecules))
        yield


@cache
def _splits(name, seed=0):
    return load_objective(name).data(seed)


def _with_splits(name):
    """Return the objective with cached data."""
    objective = load_objective(name)
    objective.data = lambda seed: _splits(name, seed)
    return objective


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.soak) for name in NAMES if name != "series"), "series", "gan"]
)
def test_every_configuration_of_the_space_returns_finite_outputs(name):
    objective = load_objective(name)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(6):
        config = objective.configure(study.ask())
        if isinstance(objective, LoopObjective):
            outputs = build_networks(config, torch.device("cpu"))["drawing"](torch.randn(5, config.noise))
        else:
            train = _splits(name).train
            x = train.inputs(torch.arange(5))
            model = objective.model(config, train)
            outputs = model(**x) if isinstance(x, dict) else model(x)
        assert len(outputs) == 5
        assert bool(torch.isfinite(outputs).all())


def test_no_paragraph_is_in_two_splits_or_of_two_topics():
    from pydoc_data.topics import topics

    found, splits = list(load_paragraphs()), _splits("text")
    rows = torch.cat([part.rows for _, part in splits.parts()])
    assert sorted(rows.tolist()) == list(range(len(found)))
    assert len(set(found)) == len(found) > 900
    flat = {name: " ".join(topics[name].lower().split()) for name in TOPICS}
    for words, number in list(load_paragraphs().items())[::50]:
        assert SHORTEST <= len(words) <= LONGEST
        assert words[0] in flat[TOPICS[number]]
    ids = [{tuple(sample[0]) for sample in part.samples} for _, part in splits.parts()]
    assert len(set.union(*ids)) == sum(map(len, ids))


@pytest.mark.soak
@pytest.mark.slow
def test_no_scaffold_and_no_molecule_is_in_two_splits():
    graphs, areas, scaffolds = module_of_molecules.load_molecules()
    parts = [part.rows.tolist() for _, part in _splits("molecules").parts()]
    assert sorted(chain(*parts)) == list(range(len(graphs)))
    assert len(areas) > 4900
    seen = [{scaffolds[row] for row in rows} for rows in parts]
    assert min(map(len, seen)) > 400
    assert len(set.union(*seen)) == sum(map(len, seen)), "a scaffold is in two splits"


def test_validation_text_comes_after_all_training_text():
    splits, text = _splits("language"), load_corpus()
    assert len(set(text.split("\n\n"))) == len(text.split("\n\n")) > 1000, "no paragraph stands twice"
    pieces = [torch.cat([part.x, part.y[:, -1:]], dim=1).flatten() for _, part in splits.parts()]
    whole = torch.cat(pieces)
    assert whole.tolist() == [min(ord(character), ALPHABET - 1) for character in text[: len(whole)]]
    assert len(text) - len(whole) < 65
    for _, part in splits.parts():
        assert torch.equal(part.x[:, 1:], part.y[:, :-1])


def test_no_forecast_week_is_in_two_splits_or_in_earlier_inputs():
    values, last = load_weekly_values(), -1
    for _, part in _splits("series").parts():
        first = int(part.rows[0])
        assert first > last, "weeks that the split before forecasts"
        last = int(part.rows[-1]) + FORECAST_WEEKS - 1
        for place in (0, len(part) - 1):
            row = int(part.rows[place])
            assert torch.equal(part.x[place], values[row - INPUT_WEEKS : row])
            assert torch.equal(part.y[place], values[row : row + FORECAST_WEEKS])
    assert last == len(values) - 1


def test_the_validation_noise_is_the_same_for_every_trial():
    one, two = _splits("denoise"), load_objective("denoise").data(0)
    assert one.hash() == two.hash()
    assert float((one.val.x - one.val.y).std()) == pytest.approx(4.0, rel=0.02)


# Epochs that suffice to beat a baseline clearly, and this baseline: see the table of built-in objectives.
LEARNED = {
    "text": (3, 0.25),  # the largest topic
    "molecules": (4, 12.6),  # a linear model of the atom counts per element
    "language": (1, 3.65),  # the previous character only
    "series": (4, 0.58),  # last year's weeks plus this year's offset
    "denoise": (12, 17.5),  # the linear autoencoder
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if name in SLOW else []) for name in NAMES]
)
def test_an_objective_beats_its_baseline_and_its_export_reproduces_the_score(name):
    epochs, baseline = LEARNED[name]
    objective = _with_splits(name)
    result = fit(objective, objective.default_config(), RunPlan(epochs, 0, 0), device="cpu")
    ahead = result.best_value - baseline if objective.direction == "maximize" else baseline - result.best_value
    assert ahead > 0
    exported = result.exportable_model()
    shapes = [dict.fromkeys(free, torch.export.Dim.AUTO) for free in exported.dynamic_dims]
    arguments = tuple(part for _, part in exported.inputs)
    program = torch.export.export(exported.module, arguments, dynamic_shapes=shapes)
    loaded = program.module()
    for rows in (1, 7, len(result.val)):
        batch = result.val.batch(torch.arange(rows))
        outputs = loaded(*(part for _, part in tensors(batch.x))).detach()
        torch.testing.assert_close(outputs, result.call(result.model, batch.x))
    assert SCORES[objective.metric](outputs, batch.y) == pytest.approx(result.best_value, rel=1e-5)


SCORES = {
    "accuracy": lambda output, y: float((output.argmax(1) == y).double().mean()),
    "rmse": lambda output, y: float((output - y).square().mean().sqrt()),
    "mae": lambda output, y: float((output - y).abs().mean()),
    "bits_per_character": lambda output, y: float(
        torch.nn.functional.cross_entropy(output.flatten(0, 1), y.flatten()) / math.log(2)
    ),
    "psnr": lambda output, y: float((10 * torch.log10(256 / (output - y).square().flatten(1).mean(dim=1))).mean()),
}


def test_the_frechet_distance_is_exact_for_normal_features():
    real, other = load_images(0).train.x, load_images(0).val.x
    assert frechet_distance(real, real, 0) == pytest.approx(0, abs=1e-4)
    assert frechet_distance(real, other, 0) == pytest.approx(frechet_distance(other, real, 0), rel=1e-4)
    torch.manual_seed(0)
    near, far = (frechet_distance(real + noise * torch.randn_like(real), other, 0) for noise in (2, 6))
    assert frechet_distance(real, other, 0) < near < far


class _Stops(LocalSession):
    """Stops the run after its fourth epoch, like a worker that shuts down."""

    def report(self, record):
        return Verdict.STOP if record.epoch == 3 else Verdict.CONTINUE


@pytest.mark.soak
def test_a_gan_learns_and_resumes_bit_identically(tmp_path):
    gan = load_objective("gan")
    plan = RunPlan(8, 0, 0)
    whole = fit(gan, gan.default_config(), plan, device="cpu")
    assert fit(gan, gan.default_config(), plan, session=_Stops(tmp_path), device="cpu").status == "stopped"
    resumed = fit(gan, gan.default_config(), plan, session=LocalSession(tmp_path), device="cpu")
    keys = [key for key in whole.history[0].metrics if key != "epoch_seconds"]
    assert [[r.metrics[key] for key in keys] for r in whole.history] == [
        [r.metrics[key] for key in keys] for r in resumed.history
    ]
    pixels = load_images(0).train.x.flatten(1)
    columns = [pixels[torch.randint(len(pixels), (2000,)), pixel] for pixel in range(64)]
    assert whole.best_value < frechet_distance(
        torch.stack(columns, dim=1).reshape(-1, 1, 8, 8), load_images(0).val.x, 0
    )
    tested = gan.test(whole.best, whole.config, torch.device("cpu"), 0)
    assert tested["frechet"] == pytest.approx(whole.best_value, rel=0.3)
    generator, noise = gan.export(whole.best, whole.config)
    assert generator(noise).shape == (4, 1, 8, 8)


@pytest.mark.parametrize(("name", "package"), [("molecules", "rdkit"), ("series", "statsmodels")])
def test_a_missing_package_is_named_with_the_command_that_installs_it(name, package, monkeypatch):
    if name == "molecules":  # not the cached data
        monkeypatch.setattr(module_of_molecules, "load_molecules", module_of_molecules.load_molecules.__wrapped__)
    for module in [module for module in sys.modules if module.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delenv("HPSEARCH_COMMAND", raising=False)
    with pytest.raises(ObjectiveError, match=f"^{name} needs package {package}; run pip install {package}$"):
        load_objective(name).data(0)
