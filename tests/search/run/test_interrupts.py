"""The end of a search after Ctrl-C, or while the database is unavailable."""

from __future__ import annotations

import io

import optuna
import pytest
from rich.console import Console

from hpsearch.search.run.search import _finish_search
from hpsearch.search.study.study import load_study
from hpsearch.storage.attributes import SPEC
from hpsearch.storage.database.retry import limit_retries
from hpsearch.storage.errors import ServiceUnavailableError
from hpsearch.storage.study_storage.storage import open_storage
from tests.conftest import PostgresServer
from tests.factories import spec_of


@pytest.mark.parametrize("interrupted", [True, False])
def test_the_database_is_unavailable_when_a_search_ends(
    postgres_server: PostgresServer, database: str, database_url: str, interrupted: bool
) -> None:
    storage = open_storage(database_url, application_name="test")
    created = optuna.create_study(study_name="s", storage=storage, direction="maximize")
    created.set_user_attr(SPEC, spec_of().model_dump(mode="json"))
    study, output = load_study(storage, "s"), io.StringIO()
    postgres_server.execute("ALTER DATABASE {} ALLOW_CONNECTIONS false", database)
    try:
        postgres_server.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = {}".replace("{}", f"'{database}'")
        )
        with limit_retries(0.0), pytest.raises(KeyboardInterrupt if interrupted else ServiceUnavailableError) as raised:
            _finish_search(Console(file=output, width=200), None, study, interrupted=interrupted, gave_up=())
    finally:
        postgres_server.execute("ALTER DATABASE {} ALLOW_CONNECTIONS true", database)
    said = output.getvalue() if interrupted else str(raised.value)
    assert said == f"the database is unavailable; start the database, and continue with: {study.resume_command}" + (
        "\n" if interrupted else ""
    )
