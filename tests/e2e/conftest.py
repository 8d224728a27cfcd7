"""One real search, run once with the command line and used by many tests, and fixtures to run more commands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import mlflow
import pytest

from hpsearch.storage.embedded.stack import StackInfo
from tests.e2e.browsing import CHROMIUM, FLAGS, PATIENCE
from tests.e2e.support import EPOCHS, TOP_MODELS, Cli, Search
from tests.faults.harness import Zygote

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture(scope="session")
def cli(stack: StackInfo, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    return Cli(stack, tmp_path_factory.mktemp("cwd"), zygote)


@pytest.fixture(scope="session")
def search(cli: Cli) -> Search:
    """Run 12 trials of digits with 3 workers on the embedded stack."""
    name = "end.to.end"  # contains characters that MLflow rejects in the name of a model
    output = cli(
        *("run", "digits", "--name", name, "--trials", "12", "--workers", "3", "--epochs", str(EPOCHS)),
        *("--sampler", "tpe", "--sampler-option", "n_startup_trials=4"),
        *("--pruner", "median", "--pruner-option", "n_startup_trials=3"),
        *("--pruner-option", "n_warmup_steps=1", "--top-models", str(TOP_MODELS)),
    )
    study = cli.study(name)
    mlflow.set_tracking_uri(cli.stack.tracking_uri)
    client = mlflow.MlflowClient(cli.stack.tracking_uri)
    return Search(name, output, study, client, study.user_attrs["hpsearch:mlflow_run_id"])


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """Return a page of a headless browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1300, "height": 1000}, reduced_motion="reduce")
        page.set_default_timeout(PATIENCE)
        yield page
        browser.close()
