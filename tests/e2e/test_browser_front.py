"""The pages of a multi-objective study in a real browser: the system's Chromium in headless mode."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from optuna.trial import FrozenTrial, TrialState
from playwright.sync_api import Page, expect

from hpsearch.search.study.ranking import find_pareto_front
from hpsearch.storage.web.token import add_token
from tests.e2e.browsing import MARKS, PATIENCE, address, fits, keep
from tests.e2e.support import Cli

pytestmark = [*MARKS, pytest.mark.soak]

TRADE = str(Path(__file__).with_name("trade.py"))
TRIALS = 24


@dataclass(frozen=True)
class Front:
    """A finished multi-objective study."""

    name: str
    output: str
    trials: list[FrozenTrial]

    @property
    def numbers(self) -> list[int]:
        """Return the trials of the Pareto front, sorted by the first metric, best first."""
        metrics = len(self.trials[0].values)
        return [trial.number for trial in find_pareto_front(self.trials, [place == 0 for place in range(metrics)])]


def run(cli: Cli, what: str, name: str, trials: int) -> Front:
    """Run a study without pruning, so that its results do not depend on the order of reports."""
    arguments = ("--trials", str(trials), "--workers", "2", "--sampler", "random", "--pruner", "none")
    return Front(name, cli("run", f"{TRADE}:{what}", "--name", name, *arguments), cli.study(name).trials)


@pytest.fixture(scope="module")
def two(cli: Cli) -> Front:
    return run(cli, "Trade", "two-metrics", TRIALS)


@pytest.fixture(scope="module")
def three(cli: Cli) -> Front:
    return run(cli, "Third", "three-metrics", 12)


def open_report(page: Page, cli: Cli, front: Front) -> None:
    page.goto((cli.stack.home / "reports" / f"{front.name}.html").as_uri())


def broken(front: Front) -> list[int]:
    return [trial.number for trial in front.trials if trial.params["width"] > 100]


def test_the_dashboard_plots_the_pareto_front(page: Page, two: Front) -> None:
    page.set_viewport_size({"width": 1300, "height": 1000})
    page.goto(add_token(address(two.output, "Optuna dashboard")))
    expect(page.get_by_text("Pareto Front").first).to_be_visible(timeout=PATIENCE)
    points = page.locator("#graph-pareto-front path.point")
    expect(points).to_have_count(TRIALS, timeout=PATIENCE)
    for name in ("accuracy", "cost"):
        expect(page.get_by_text(name, exact=True).first).to_be_visible(timeout=PATIENCE)
    best = page.get_by_role("heading", name=re.compile(r"^Trial \d+"))
    expect(best).to_have_text([f"Trial {number}" for number in sorted(two.numbers)], timeout=PATIENCE)
    keep(page, "dashboard-front")


@pytest.mark.parametrize("width", [1300, 400])
def test_the_report_draws_the_pareto_front(page: Page, cli: Cli, two: Front, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 1000})
    open_report(page, cli, two)
    expect(page.locator(".figure svg")).to_have_count(6, timeout=PATIENCE)
    fits(page, width)
    front = page.locator("#front")
    expect(front.locator(".dot.best")).to_have_count(len(two.numbers))
    expect(front.locator(".cross")).to_have_count(len(broken(two)))
    expect(front.locator("[data-trial]")).to_have_count(TRIALS)
    keep(page, f"front-{width}")
    number = two.numbers[0]
    front.locator(f'.dot.best[data-trial="{number}"]').hover()
    tooltip = page.locator("#tip")
    expect(tooltip).to_contain_text(f"trial {number} · complete")
    expect(tooltip).to_contain_text("on the Pareto front")
    for name, value in zip(("accuracy", "cost"), two.trials[number].values, strict=True):
        expect(tooltip).to_contain_text(f"{name} {float(f'{value:.4g}'):g}")
    for name in ("lr", "width"):
        expect(tooltip).to_contain_text(name)
    keep(page, f"front-{width}-pointed-at")
    out = broken(two)[0]
    front.locator(f'.cross[data-trial="{out}"]').hover(force=True)
    expect(tooltip).to_contain_text(f"out of bounds: width {two.trials[out].params['width']} is not <= 100")
    page.mouse.move(0, 0)
    expect(page.locator("#volume path.best")).to_have_count(1)
    page.emulate_media(color_scheme="dark")
    keep(page, f"front-{width}-dark")
    page.emulate_media(color_scheme="light")


def test_each_metric_is_sorted_in_its_own_direction(page: Page, cli: Cli, two: Front) -> None:
    page.set_viewport_size({"width": 1300, "height": 1000})
    open_report(page, cli, two)
    complete = [trial for trial in two.trials if trial.state == TrialState.COMPLETE]
    for name, place, column in (("accuracy", 0, 3), ("cost", 1, 4)):
        page.locator("#trials").get_by_role("button", name=name, exact=True).click()
        shown = page.locator(f"#trials tbody tr td:nth-child({column})").all_inner_texts()
        values = sorted((trial.values[place] for trial in complete), reverse=not place)
        assert [float(text) for text in shown] == [float(f"{value:.4g}") for value in values]


def test_two_of_three_metrics_can_be_selected_for_the_plot(page: Page, cli: Cli, three: Front) -> None:
    open_report(page, cli, three)
    before = page.locator("#front .path.best").get_attribute("d", timeout=PATIENCE)
    page.locator("#up").select_option("energy")
    expect(page.locator("#front text", has_text=re.compile("^energy"))).to_have_count(1)
    assert page.locator("#front .path.best").get_attribute("d") != before
    expect(page.locator("#front .dot.best")).to_have_count(len(three.numbers))
    page.locator("#across").select_option("cost")
    expect(page.locator("#front text", has_text=re.compile("^cost$"))).to_have_count(1)
    keep(page, "front-three")
