"""Extension points: a registered sampler, pruner or setting works everywhere, and messages list it."""

from __future__ import annotations

import re
from typing import Any, Literal

import optuna
import pytest
import typer
from optuna.trial import create_trial
from pydantic import Field
from typer.testing import CliRunner

from hpsearch.search.cli import options
from hpsearch.search.errors import SearchError
from hpsearch.search.pruners import PrunerSpec
from hpsearch.search.pruners.base_and_halving import Decision, OtherTrials, PruningContext
from hpsearch.search.pruners.study_pruner import StudyPruner
from hpsearch.search.samplers import SamplerSpec
from hpsearch.search.samplers.suggest import make_sampler
from hpsearch.search.spec import spec as specs
from hpsearch.search.spec.spec import StudySpec, parse_spec
from tests.factories import BASE, spec_of


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SamplerSpec, "registry", dict(SamplerSpec.registry))
    monkeypatch.setattr(PrunerSpec, "registry", dict(PrunerSpec.registry))

    class Steady(SamplerSpec):
        name: Literal["toy_steady"] = "toy_steady"
        points: int = Field(default=3, ge=1)

        def build(self, *, seed: int, common_seed: int, epochs: int) -> optuna.samplers.BaseSampler:
            others = optuna.samplers.RandomSampler(seed)
            return optuna.samplers.PartialFixedSampler({"x": 1 / self.points}, others)

    class Second(PrunerSpec):
        name: Literal["toy_second"] = "toy_second"

        def decide(self, case: PruningContext, peers: OtherTrials) -> Decision:
            before = len(peers.get_finished_trials())
            return case.prune(f"trial {case.number} comes after {before}", peers=before) if before else case.keep()


@pytest.mark.usefixtures("toys")
def test_a_registered_sampler_is_selected_by_name_and_suggests() -> None:
    spec = parse_spec({**BASE, "sampler": {"name": "toy_steady", "points": 2}})
    assert parse_spec(spec.model_dump()) == spec, "as it is stored, so it is read"
    study = optuna.create_study(sampler=make_sampler(spec.sampler, study_seed=0, trial_number=0, epochs=1))
    trial = study.ask()
    assert trial.suggest_float("x", 0, 1) == 0.5
    assert trial.suggest_float("y", 0, 1) != 0.5


@pytest.mark.usefixtures("toys")
def test_a_registered_pruner_decides_with_a_reason() -> None:
    study = optuna.create_study(direction="maximize")
    judge = StudyPruner(spec_of(name="toy_second"), study._storage, study._study_id)  # type: ignore[arg-type]

    def verdict() -> Decision:
        trial = study.ask()
        trial.report(0.5, 1)
        return judge(study._storage.get_trial(trial._trial_id), {1: 0.5})

    assert not verdict().prune
    study.add_trial(create_trial(value=0.0))
    decision = verdict()
    assert (decision.prune, decision.peers) == (True, 1)
    assert decision.reason == "toy_second pruner at epoch 2 of 20: trial 2 comes after 1"


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampler": {"name": "toy_staedy"}}, "sampler: unknown sampler 'toy_staedy'; did you mean 'toy_steady'?"),
        (
            {"sampler": {"name": "toy_steady", "point": 2}},
            "sampler.point: toy_steady has no such option; did you mean 'points'?",
        ),
        ({"sampler": {"name": "toy_steady", "points": 0}}, "sampler.points must be at least 1, not 0"),
        ({"pruner": {"name": "toy_second", "x": 1}}, "pruner.x: toy_second has no such option; remove pruner.x"),
    ],
)
def test_messages_list_registered_samplers_and_pruners(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SearchError) as caught:
        parse_spec({**BASE, **change})
    assert str(caught.value) == message


@pytest.mark.usefixtures("toys")
def test_a_name_can_be_registered_once() -> None:
    with pytest.raises(TypeError, match="sampler 'tpe' is already registered by TPE"):

        class Twin(SamplerSpec):
            name: Literal["tpe"] = "tpe"


def test_a_registered_setting_is_a_field_of_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its flag, the help, the check and the message come from the field."""

    class More(StudySpec):
        toy_sparkle: int = Field(default=3, ge=1, description="How much it glitters")

    monkeypatch.setattr(specs, "StudySpec", More)
    seen: list[dict[str, Any]] = []

    def toy(settings: options.Settings) -> int:
        seen.append(settings.values)
        return 0

    app = typer.Typer(rich_markup_mode=None)
    app.command()(options.add_flags(toy))
    said = CliRunner().invoke(app, ["--help"]).output
    assert re.search(r"--toy-sparkle +<int> +How much it glitters +\[default: 3\]", said), said
    assert CliRunner().invoke(app, ["digits", "--toy-sparkle", "5"]).exit_code == 0
    assert seen == [{"objective": "digits", "toy_sparkle": 5}]
    assert specs.parse_spec({**BASE, **seen[0]}).model_dump()["toy_sparkle"] == 5
    with pytest.raises(SearchError, match=r"^--toy-sparkle must be at least 1, not 0$"):
        specs.parse_spec({**BASE, "toy_sparkle": 0})
