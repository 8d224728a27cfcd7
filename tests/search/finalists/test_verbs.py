"""Commands on finalists, and the evaluation of the test set."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpsearch.search.errors import SearchError
from hpsearch.search.finalists import read_finalists
from hpsearch.search.finalists.choose import create_or_join
from hpsearch.search.study.checkpoints import StudyCheckpoints
from hpsearch.search.study.study import StoredStudy, load_parent_study
from hpsearch.storage.attributes import RESTORED, SPEC
from hpsearch.storage.errors import CheckpointStoreError
from hpsearch.storage.records.test_evaluations import record_test_evaluation, write_scores
from hpsearch.storage.study_storage.storage import PostgresStorage
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from tests.search.finalists.support import Say, finished, search, train


def test_other_commands_work_with_finalists(study: StoredStudy, say: Say) -> None:
    chosen, _ = create_or_join(study, top=2, seeds=2)
    assert "s.finalists (finalists)" in say("studies")
    assert "holds the finalists of 's'" in say("extend", "s.finalists", "--trials", "+1", code=2)
    unreachable = ("--tracking-uri", "http://127.0.0.1:1")
    assert "continue with hpsearch finalists s" in say("finalists", "s.finalists", *unreachable, code=2)
    assert "see the report of 's'" in say("report", "s.finalists", code=2)
    assert "evaluate the test set of 's'" in say("evaluate-test", "s.finalists", code=2)
    assert "hpsearch finalists s" in say("start", "s.finalists")
    assert f"trials=[1, 3], seeds={chosen.spec.finalists_of.seeds}" in say("show", "s.finalists")  # type: ignore[union-attr]
    shown = say("show", "s")
    assert "finalists: 0 of 4 runs ended" in shown
    assert all(line == line.rstrip() for line in shown.splitlines()), "short cells are not filled with blanks"
    train(chosen, lambda trial, _seed: 0.8 + trial / 100)
    shown = say("show", "s")
    assert "winner: trial 3, val accuracy 0.8300 on 2 new seeds" in shown
    assert "in the search, trial 1 was tied with trial 3: the same value\n" in shown


def test_finalists_of_an_untrusted_study_are_not_created(storage: PostgresStorage, say: Say, tmp_path: Path) -> None:
    study = search(storage, "s", [finished(0, 0.5)], tensorboard=str(tmp_path))
    study.set_attr(RESTORED, True)
    assert "hpsearch trust s" in say("finalists", "s", "--tracking-uri", "http://127.0.0.1:1", code=2)
    assert len(study.storage.get_all_studies()) == 1


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("objective", "/code/other.py:Other"),
        ("sampler", {"name": "optunahub", "package": "samplers/x", "ref": "0" * 40}),
        ("tensorboard", "/events"),
    ],
)
def test_finalists_with_code_that_a_worker_role_has_chosen_are_not_trained(
    study: StoredStudy, storage: PostgresStorage, say: Say, setting: str, value: object
) -> None:
    made, _ = create_or_join(study, top=2, seeds=1)
    storage.delete_study(made.study_id)
    forged = {SPEC: {**made.spec.model_dump(), setting: value}}
    directions = storage.get_study_directions(study.study_id)
    storage.create_filled_study(directions, "s.finalists", user_attrs=forged, trials=[])
    error = say("finalists", "s", "--tracking-uri", "http://127.0.0.1:1", code=2)
    assert error.startswith(f"hpsearch: study 's.finalists' has another {setting} than hpsearch sets for the finalists")


def test_deleting_a_search_deletes_its_finalists(study: StoredStudy, say: Say) -> None:
    chosen, _ = create_or_join(study, top=2, seeds=2)
    claim = Claims(chosen.storage.engine, chosen.study_id, worker="host:1").claim()
    assert isinstance(claim, Claim)
    assert "'s.finalists' has 1 running trial;" in say("delete", "s", "--yes", code=2)
    Claims(chosen.storage.engine, chosen.study_id, worker="host:1").finish_attempt(claim, Outcome.RELEASED)
    said = say("delete", "s", "--yes")
    assert said.splitlines() == [f"deleted study {name}; its MLflow runs are kept" for name in ("s.finalists", "s")]
    assert chosen.storage.get_all_studies() == []


def test_an_interrupted_deletion_can_be_repeated(study: StoredStudy, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: StudyCheckpoints) -> None:
        raise CheckpointStoreError("the store does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(StudyCheckpoints, "delete", fail)
        say("delete", "s", "--yes", code=2)
    assert say("delete", "s", "--yes") == "deleted study s; its MLflow runs are kept\n"
    assert study.storage.get_all_studies() == []


def test_finalists_remain_if_another_program_deletes_the_search(study: StoredStudy) -> None:
    chosen, _ = create_or_join(study, top=2, seeds=2)
    study.storage.delete_study(study.study_id)
    with pytest.raises(SearchError, match=r"'s.finalists' holds the finalists of 's', which was deleted"):
        load_parent_study(chosen)
    again = search(study.storage, "s", [finished(0, 0.5)])
    assert read_finalists(again) is None, "another study under the old name"
    with pytest.raises(SearchError, match="was deleted"):
        load_parent_study(chosen)
    assert create_or_join(again, top=1, seeds=1)[0].spec.name == "s.finalists-2"


def test_a_spec_file_cannot_create_finalists(say: Say, tmp_path) -> None:
    path = tmp_path / "spec.toml"
    path.write_text('objective = "digits"\n[finalists_of]\nstudy = "s"\n')
    assert "finalists_of cannot be set" in say("run", "--spec", str(path), code=2)


def test_a_search_cannot_have_the_name_of_finalists(say: Say, study: StoredStudy) -> None:
    away = ("--tracking-uri", "http://127.0.0.1:1", "--workers", "0")
    said = say("run", "digits", "--name", "s.finalists-2", *away, code=2)
    assert "--name 's.finalists-2' is reserved for the finalists or the refit of 's'" in said
    assert len(study.storage.get_all_studies()) == 1


def test_evaluate_test_needs_a_winner(study: StoredStudy, say: Say) -> None:
    assert "'s' has no finalists" in say("evaluate-test", "s", "--yes", code=2)
    assert "--trial 77" in say("evaluate-test", "s", "--yes", "--unconfirmed", "--trial", "77", code=2)
    chosen, _ = create_or_join(study, top=2, seeds=1)
    assert "have 2 unfinished runs" in say("evaluate-test", "s", "--yes", code=2)
    train(chosen, lambda trial, _seed: 0.8 + trial / 100)
    assert "the winner 3 of 's'; remove --trial, or evaluate an unconfirmed trial with --unconfirmed --trial 1" in say(
        "evaluate-test", "s", "--yes", "--trial", "1", code=2
    )
    assert "has no tracking server" in say("evaluate-test", "s", "--yes", code=2)


def test_an_opened_test_set_is_shown_but_not_evaluated_again(study: StoredStudy, say: Say) -> None:
    engine = study.storage.engine
    opening = record_test_evaluation(
        engine, study.study_id, trial_number=1, model_sha256="a" * 64, opened_by="ann@host", finalists=None
    )
    assert "evaluated on" in say("evaluate-test", "s", "--yes", "--trial", "3", "--unconfirmed", code=2)
    write_scores(engine, study.study_id, opening, {"loss": 0.5, "accuracy": 0.875})
    assert "test set: accuracy 0.8750, evaluated on " in say("show", "s")
    refused = say("evaluate-test", "s", "--yes", code=2)
    assert "by ann@host for trial 1; it can be evaluated only once; see the scores with hpsearch show s" in refused
