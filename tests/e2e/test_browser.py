"""The pages in a real browser: the system's Chromium in headless mode."""

from __future__ import annotations

import re

import pytest
from optuna.trial import TrialState
from playwright.sync_api import Page, expect

from hpsearch.storage.web.token import add_token
from tests.e2e.browsing import MARKS, PATIENCE, address, fits, keep
from tests.e2e.support import Cli, Search

pytestmark = MARKS


def test_the_dashboard_shows_the_study_and_its_best_value(page: Page, search: Search) -> None:
    page.goto(add_token(address(search.output, "Optuna dashboard")))
    expect(page.get_by_text(search.name).first).to_be_visible(timeout=PATIENCE)
    expect(page.get_by_text("Best Trial").first).to_be_visible(timeout=PATIENCE)
    best = search.study.best_trial
    expect(page.get_by_text(f"Best Trial (number={best.number})").first).to_be_visible(timeout=PATIENCE)
    expect(page.get_by_text(str(best.value)).first).to_be_visible(timeout=PATIENCE)
    keep(page, "dashboard")


@pytest.mark.soak  # needs MLflow's pages; test_search.py checks that the links exist and work
def test_the_note_in_the_dashboard_links_to_the_study_in_mlflow(page: Page, search: Search) -> None:
    page.goto(add_token(address(search.output, "Optuna dashboard") + "/note"))
    page.get_by_role("link", name="The study in MLflow").click()
    page.wait_for_url(f"**/runs/{search.parent}*")
    assert f"/runs/{search.parent}" in address(search.output, "MLflow, study"), "the summary leads there too"
    expect(page.get_by_role("heading", name=search.name)).to_be_visible(timeout=PATIENCE)
    expect(page.get_by_role("link", name=f"{search.name}-0011")).to_be_visible(timeout=PATIENCE)
    expect(page.get_by_text("best_val_accuracy").first).to_be_visible(timeout=PATIENCE)
    shown = page.get_by_text(f"{search.study.best_value:.6f}"[:7])
    expect(shown.first).to_be_visible(timeout=PATIENCE)
    keep(page, "mlflow-study")


@pytest.mark.soak  # needs MLflow's pages; test_search.py registers and loads the model
def test_the_page_of_the_best_run_links_to_a_model_that_can_be_registered(page: Page, search: Search) -> None:
    best = search.study.best_trial
    page.goto(add_token(address(search.output, "MLflow, best trial")))
    # The table of logged models. The same name next to each metric only opens a note.
    page.locator("[role=gridcell] a", has_text=f"{search.model_name}-trial-{best.number}").first.click()
    expect(page.get_by_role("button", name="Register model").first).to_be_visible(timeout=PATIENCE)
    keep(page, "mlflow-model")


@pytest.mark.parametrize("width", [1300, 400])
def test_the_report_draws_its_figures(page: Page, cli: Cli, search: Search, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 1000})
    page.goto((cli.stack.home / "reports" / f"{search.name}.html").as_uri())
    expect(page.locator(".figure svg")).to_have_count(4, timeout=PATIENCE)
    fits(page, width)
    keep(page, f"report-{width}")
    best = search.study.best_trial
    page.locator("#history .dot.best").hover()
    tooltip = page.locator("#tip")
    expect(tooltip).to_contain_text(f"trial {best.number} · complete")
    for name in best.params:
        expect(tooltip).to_contain_text(name)
    keep(page, f"report-{width}-pointed-at")
    page.mouse.move(0, 0)
    page.emulate_media(color_scheme="dark")
    keep(page, f"report-{width}-dark")
    page.emulate_media(color_scheme="light")


def test_the_table_of_the_report_sorts_by_pointer_and_by_keyboard(page: Page, cli: Cli, search: Search) -> None:
    page.goto((cli.stack.home / "reports" / f"{search.name}.html").as_uri())
    values = [trial.value for trial in search.study.trials]

    def column(index: int) -> list[str]:
        return page.locator(f"#trials tbody tr td:nth-child({index})").all_inner_texts()

    page.locator("#trials").get_by_role("button", name="val accuracy").click()
    assert column(3) == [f"{value:.4f}" for value in sorted(values, reverse=True)]
    expect(page.locator("#trials th[aria-sort=descending]")).to_have_text("val accuracy")
    page.locator("#trials").get_by_role("button", name="trial", exact=True).focus()
    page.keyboard.press("Enter")
    assert column(1) == list(map(str, range(12)))
    expect(page.locator("#trials th[aria-sort]")).to_have_text("trial")
    page.locator("#trials tbody tr").first.focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#trials tr:focus")).to_have_attribute("data-trial", "1")
    expect(page.locator("#curves .hot").first).to_have_attribute("data-trial", "1")


@pytest.mark.soak  # takes half a minute in MLflow's pages; search/promotion/test_promote.py tests hpsearch's part
def test_a_promotion_in_the_mlflow_ui_is_shown_in_the_study(page: Page, cli: Cli, search: Search) -> None:
    """As a user does it: the study's trials by metric, the best run, "Register model", the alias."""
    model = "promoted-by-hand"
    page.set_viewport_size({"width": 1500, "height": 1000})
    page.goto(add_token(address(search.output, "MLflow, all trials")))
    expect(page.get_by_role("columnheader", name="batch_size").first).to_be_attached(timeout=PATIENCE)
    complete = search.study.get_trials(states=(TrialState.COMPLETE,))
    expect(page.get_by_text("matching runs")).to_have_text("12 matching runs", timeout=PATIENCE)
    best = page.locator("[row-index='0'] a[href*='/runs/']")  # the page has another order of the rows
    equals = [t.number for t in complete if t.value == search.study.best_value]
    expect(best).to_have_text(
        re.compile("|".join(f"{search.name}-{number:04d}" for number in equals)), timeout=PATIENCE
    )
    keep(page, "mlflow-children")
    number = int(best.inner_text().rpartition("-")[2])
    best.click()
    page.locator("[role=gridcell] a", has_text=f"{search.model_name}-trial-{number}").first.click()
    page.get_by_role("button", name="Register model").first.click()
    asked = page.get_by_role("dialog")
    asked.get_by_role("combobox").first.click()
    page.get_by_text("Create New Model").last.click()
    asked.get_by_placeholder("Input a model name").fill(model)
    asked.get_by_role("button", name="Register").click()
    expect(page.get_by_text("Model registered successfully")).to_be_visible(timeout=PATIENCE)

    page.goto(add_token(f"{cli.stack.tracking_uri}/#/models/{model}/versions/1"))
    page.get_by_role("button", name="Add", exact=True).first.click()
    naming = page.get_by_role("dialog").get_by_role("combobox")
    naming.fill("champion")
    naming.press("Enter")
    page.get_by_role("dialog").get_by_role("button", name="Save aliases").click()
    expect(page.get_by_role("dialog")).to_be_hidden(timeout=PATIENCE)
    shown = cli("show", search.name)
    assert f"promoted: trial {number} is {model}@champion (version 1), by MLflow UI on " in shown

    page.reload()
    expect(page.get_by_text("Unconfirmed").first).to_be_visible(timeout=PATIENCE)
    keep(page, "mlflow-version")
    page.goto(add_token(address(search.output, "Optuna dashboard") + "/note"))
    expect(page.get_by_text(f"{model}@champion").first).to_be_visible(timeout=PATIENCE)
    keep(page, "dashboard-note")


@pytest.mark.soak  # test_promotion.py checks that the dashboard serves the files
def test_the_dashboard_shows_the_artifacts_of_a_trial(page: Page, search: Search) -> None:
    page.goto(add_token(address(search.output, "Optuna dashboard") + "/trials?numbers=0"))
    expect(page.get_by_role("img", name="curves.png").first).to_be_visible(timeout=PATIENCE)
    keep(page, "dashboard-artifacts")
