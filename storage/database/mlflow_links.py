"""The addresses of MLflow that the study database and MLflow's database contain, which change with its port."""

from __future__ import annotations

import json
from typing import Any

from hpsearch.storage.attributes import TRACKING_URI
from hpsearch.storage.database.connect import open_cursor
from hpsearch.storage.database.roles import Databases

RUN_PAGE = "/#/experiments/"  # path of a run's page


def replace_address(databases: Databases, old: str, new: str, *, setting: str) -> None:
    """Replace MLflow's address in both databases.

    Args:
        databases: URLs of the databases.
        old: former address of the server, without a path.
        new: current address of the server.
        setting: setting that the URLs come from, for error messages.

    Raises:
        StorageError: a database cannot be used.
    """
    with (
        open_cursor(databases.owner_url, application_name="hpsearch up", setting=setting) as studies,
        open_cursor(databases.mlflow_url, application_name="hpsearch up", setting=setting) as mlflow,
    ):
        studies.execute(
            "UPDATE study_user_attributes SET value_json = %s WHERE key = %s AND value_json = %s",
            (json.dumps(new), TRACKING_URI, json.dumps(old)),
        )
        replace_run_links(studies, mlflow, old, new)


def replace_run_links(studies: Any, mlflow: Any | None, old: str, new: str) -> None:
    """Replace the address in all links to pages of runs.

    Args:
        studies: cursor on the study database.
        mlflow: cursor on MLflow's database; None to leave it unchanged.
        old: former address of the server for browsers, without a path.
        new: current address.
    """
    former, current = f"{old}{RUN_PAGE}", f"{new}{RUN_PAGE}"
    columns = [
        (studies, "study_user_attributes", "value_json", "text"),
        (studies, "trial_user_attributes", "value_json", "text"),
        (studies, "study_system_attributes", "value_json", "text"),
        (studies, "hpsearch_promotions", "evidence", "jsonb"),
    ]
    if mlflow is not None:  # descriptions of promoted versions; the cast cuts them at MLflow's limit
        columns.append((mlflow, "model_versions", "description", "varchar(5000)"))
    for cursor, table, column, kind in columns:
        cursor.execute(
            f"UPDATE {table} SET {column} = replace({column}::text, %s, %s)::{kind} "  # noqa: S608 constant names
            f"WHERE strpos({column}::text, %s) > 0",
            (former, current, former),
        )
