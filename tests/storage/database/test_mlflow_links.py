"""MLflow's address in the databases is replaced when MLflow has got another port."""

from __future__ import annotations

from optuna.study import StudyDirection

from hpsearch.storage.attributes import RUN_URL, TRACKING_URI
from hpsearch.storage.database.mlflow_links import replace_address
from hpsearch.storage.database.roles import Databases
from hpsearch.storage.study_storage.storage import open_storage
from tests.conftest import execute

OLD, NEW = "http://127.0.0.1:4000", "http://127.0.0.1:5000"


def test_only_the_former_address_is_replaced(owner_url: str, database_url: str, empty_database_url: str) -> None:
    storage = open_storage(database_url, application_name="test")
    for name, address in (("own", OLD), ("other", "http://127.0.0.1:40001")):
        study_id = storage.create_new_study([StudyDirection.MAXIMIZE], name)
        storage.set_study_user_attr(study_id, TRACKING_URI, address)
        storage.set_study_user_attr(study_id, RUN_URL, f"{address}/#/experiments/1/runs/r")
    execute(empty_database_url, "CREATE TABLE model_versions (description varchar(5000))")
    databases = Databases(owner_url=owner_url, worker_url=database_url, mlflow_url=empty_database_url)
    replace_address(databases, OLD, NEW, setting="the test")
    found = {study.study_name: study.user_attrs for study in storage.get_all_studies()}
    storage.engine.dispose()
    assert (found["own"][TRACKING_URI], found["own"][RUN_URL]) == (NEW, f"{NEW}/#/experiments/1/runs/r")
    assert found["other"][TRACKING_URI] == "http://127.0.0.1:40001"
    assert found["other"][RUN_URL] == "http://127.0.0.1:40001/#/experiments/1/runs/r"
