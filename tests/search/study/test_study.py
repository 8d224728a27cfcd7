"""A stored study has the hash of the code that it was created with."""

from __future__ import annotations

from pathlib import Path

import optuna

from hpsearch import load_objective, source_hash
from hpsearch.objectives.template import write_template
from hpsearch.search.study.study import load_study
from hpsearch.storage.attributes import SOURCE_SHA256, SPEC
from hpsearch.storage.study_storage.storage import open_storage
from tests.factories import spec_of


def test_changed_code_of_a_study_is_reported(database_url: str, tmp_path: Path) -> None:
    path = tmp_path / "wine.py"
    write_template(path)
    storage = open_storage(database_url, application_name="test")
    study_id = optuna.create_study(study_name="s", storage=storage)._study_id
    storage.set_study_user_attr(study_id, SPEC, spec_of(name="none").model_dump())
    storage.set_study_user_attr(study_id, SOURCE_SHA256, source_hash(load_objective(str(path))))
    assert load_study(storage, "s").source_warning(load_objective(str(path))) is None
    path.write_text(path.read_text().replace("1e-4", "1e-3"))
    warning = load_study(storage, "s").source_warning(load_objective(str(path)))
    assert warning is not None
    assert "has changed since study 's' was created" in warning
