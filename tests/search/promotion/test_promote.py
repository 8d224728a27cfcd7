"""Promotions by the command and in the MLflow UI, on a real model registry."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState, create_trial

from hpsearch.search.console import PlainConsole
from hpsearch.search.errors import SearchError
from hpsearch.search.promotion.evidence_update import refresh_evidence
from hpsearch.search.promotion.promote import promote
from hpsearch.search.promotion.registry_watch import RegistryWatcher, sync_promotions
from hpsearch.search.report import write_report
from hpsearch.search.report.show import format_promotions
from hpsearch.search.report.show_trial import print_trial
from hpsearch.search.study.study import load_study
from hpsearch.search.study.summary import summarise
from hpsearch.search.tracking.study_run import study_note
from hpsearch.storage.attributes import REASON, REMOVED_BY, TRACKING
from hpsearch.storage.database.locks import registry_lock
from hpsearch.storage.errors import ServiceUnavailableError, StorageError
from hpsearch.storage.mlflow.run_links import RunLinks
from hpsearch.storage.records.promotions import end_promotion, record_promotion
from hpsearch.storage.records.test_evaluations import record_test_evaluation, write_scores
from hpsearch.storage.trials.history import read_finalist_studies
from tests.search.promotion.support import Tracked, train_finalists

WHO = r"\S+@\S+"


def test_the_best_trial_is_promoted_with_its_metadata(tracked: Tracked, capsys: pytest.CaptureFixture[str]) -> None:
    done = promote(tracked.stored, tracked.tracking)
    assert (done.trial, done.model, done.version, done.alias) == (1, tracked.name, 1, "champion")
    assert done.old_version is None
    version = tracked.version("champion")
    assert version.run_id == tracked.run_of(1)
    assert version.source == f"models:/{tracked.model_of(1)}"
    tags = {key.removeprefix("hpsearch."): value for key, value in version.tags.items()}
    assert {key: tags[key] for key in ("study", "trial", "attempts", "metric", "value", "seed", "data_sha256")} == {
        "study": tracked.name,
        "trial": "1",
        "attempts": "1",
        "metric": "val_accuracy",
        "value": "0.9",
        "seed": "7",
        "data_sha256": "abc",
    }
    assert tags["config"] == '{"lr": 0.1}'
    assert tags["git_sha"] == "123 (with changes)"
    assert (tags["confirmed"], tags["unconfirmed"]) == ("false", "no finalists were trained")
    for words in ("trial 1", tracked.name, "**Unconfirmed**: no finalists were trained", "0.9", "git 123"):
        assert words in version.description
    ((trial, model, number, alias, by, holds),) = tracked.promotion_rows()
    assert (trial, model, number, alias, holds) == (1, tracked.name, 1, "champion", True)
    assert re.fullmatch(WHO, by)
    print_trial(PlainConsole(), tracked.stored, 1)
    output = capsys.readouterr().out
    assert f" promoted  trial 1 is {tracked.name}@champion (version 1), by {by} on " in output


def test_promoting_again_changes_nothing(tracked: Tracked) -> None:
    assert promote(tracked.stored, tracked.tracking) == promote(tracked.stored, tracked.tracking)
    assert len(tracked.promotion_rows()) == 1
    assert [v.version for v in tracked.client.search_model_versions(f"name = '{tracked.name}'")] == ["1"]


def test_the_previous_model_can_be_promoted_again(tracked: Tracked) -> None:
    promote(tracked.stored, tracked.tracking)
    done = promote(tracked.stored, tracked.tracking, trial=2)
    assert (done.version, done.old_version) == (2, 1)
    assert tracked.version("champion").run_id == tracked.run_of(2)
    assert tracked.version("previous").run_id == tracked.run_of(1)
    assert [(trial, holds) for trial, *_, holds in tracked.promotion_rows()] == [(1, False), (2, True)]
    promote(tracked.stored, tracked.tracking, trial=0, alias="staging")
    promote(tracked.stored, tracked.tracking, trial=1, alias="staging")
    assert tracked.version("previous-staging").run_id == tracked.run_of(0)
    assert tracked.version("previous").run_id == tracked.run_of(1), "another alias takes nothing from the champion's"


def test_a_stored_configuration_with_aliases_is_not_read(own_tracked: Tracked, tmp_path: Path) -> None:
    """Nested aliases could fill the memory, and anyone with the token of MLflow can replace the file."""
    config = tmp_path / "config.yaml"
    config.write_text("config:\n  a: &a [1]\n  b: [*a, *a]\nseed: 7\n")
    own_tracked.tracking.client.log_artifact(own_tracked.run_of(1), str(config))
    promote(own_tracked.stored, own_tracked.tracking)
    assert "hpsearch.config" not in own_tracked.version("champion").tags


def test_values_that_mlflow_rejects_are_an_error_before_any_change(tracked: Tracked) -> None:
    for setting in ({"alias": "two words"}, {"model": "a/b"}):
        with pytest.raises(
            StorageError, match=r"^--(alias 'two words'|model 'a/b'):? .*(only letters|slash|characters|name)"
        ):
            promote(tracked.stored, tracked.tracking, **setting)
    assert tracked.client.search_registered_models(f"name = '{tracked.name}'") == []
    assert tracked.promotion_rows() == []


def test_promoting_a_trial_that_is_not_complete_is_an_error(tracked: Tracked) -> None:
    states = {
        TrialState.PRUNED: r"the trial was pruned \(why\); give the number of a complete trial, such as 1",
        TrialState.FAIL: r"the trial failed \(why\); give",
        TrialState.RUNNING: "the trial is still running; give",
        TrialState.WAITING: "the trial has not been run yet; give",
    }
    for number, (state, said) in enumerate(states.items(), len(tracked.stored.trials())):
        trial = create_trial(state=state, user_attrs={"hpsearch:reason": "why"} if state.is_finished() else {})
        tracked.storage.import_trials(tracked.stored.study_id, [trial])
        with pytest.raises(SearchError, match=f"^--trial {number}: {said}"):
            promote(tracked.stored, tracked.tracking, trial=number)


def test_promoting_an_infeasible_unknown_or_modelless_trial_is_an_error(own_tracked: Tracked) -> None:
    attrs = {"hpsearch:infeasible": True, "hpsearch:reason": "NaN"}
    own_tracked.storage.import_trials(
        own_tracked.stored.study_id, [create_trial(state=TrialState.PRUNED, user_attrs=attrs)]
    )
    with pytest.raises(SearchError, match=r"^--trial 4: the trial is infeasible \(NaN\)"):
        promote(own_tracked.stored, own_tracked.tracking, trial=4)
    with pytest.raises(SearchError, match=r"^--trial 9: study .* has no such trial; give a number from 0 to 4$"):
        promote(own_tracked.stored, own_tracked.tracking, trial=9)
    own_tracked.client.delete_logged_model(own_tracked.model_of(2))
    links, trial_id = RunLinks(own_tracked.stored.engine), own_tracked.stored.trials()[2]._trial_id
    for key, value, said in (
        (
            TRACKING,
            "pending: records not yet sent from host",
            r"no model of this trial yet \(pending: .* host\); send the model with .* sync s-",
        ),
        (
            REMOVED_BY,
            "hpsearch gc removed it",
            r"no model of this trial \(hpsearch gc removed it\); promote a trial with a model$",
        ),
    ):
        links.set_attr_of_trials([trial_id], key, value)
        with pytest.raises(SearchError, match=rf"^--trial 2: MLflow has {said}"):
            promote(own_tracked.stored, own_tracked.tracking, trial=2)
    for key in (TRACKING, REMOVED_BY):
        links.remove_attr_of_trials([trial_id], key)
    with pytest.raises(SearchError, match=r"^the weights of trial 2 are unusable: .*; nothing was promoted$"):
        promote(own_tracked.stored, own_tracked.tracking, trial=2)


def test_finalists_are_promoted_through_their_search(tracked: Tracked) -> None:
    train_finalists(tracked, [1, 2], winner=1)
    (name,) = read_finalist_studies(tracked.storage.engine, tracked.stored.study_id)
    with pytest.raises(
        SearchError, match=rf"holds the finalists of '{tracked.name}'; promote the winner with .*promote"
    ):
        promote(load_study(tracked.storage, name), tracked.tracking)


def test_an_unreachable_server_is_an_error_of_one_line(tracked: Tracked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    elsewhere = type(tracked.client)("http://127.0.0.1:9")
    monkeypatch.setattr(tracked.tracking, "client", elsewhere)
    with pytest.raises(ServiceUnavailableError, match=r"^MLflow did not look up run .*") as error:
        promote(tracked.stored, tracked.tracking)
    assert "\n" not in str(error.value)


# Promotions in the MLflow UI


def register(tracked: Tracked, trial: int, *, model: str | None = None) -> str:
    """Register a trial's model by its artifact URI, as the UI's button does."""
    name = model or tracked.name
    if not tracked.client.search_registered_models(f"name = '{name}'"):
        tracked.client.create_registered_model(name)
    logged = tracked.client.get_logged_model(tracked.model_of(trial))
    made = tracked.client.create_model_version(
        name, logged.artifact_location, run_id=tracked.run_of(trial), model_id=logged.model_id
    )
    return str(made.version)


def test_a_promotion_in_the_ui_is_recorded_and_completed(tracked: Tracked) -> None:
    version = register(tracked, 2)
    tracked.client.update_model_version(tracked.name, version, "What I think of it.")
    assert sync_promotions(tracked.storage, tracked.tracking).get((tracked.name, "champion")) is None
    tracked.client.set_registered_model_alias(tracked.name, "champion", version)
    sync_promotions(tracked.storage, tracked.tracking)
    sync_promotions(tracked.storage, tracked.tracking)
    assert tracked.promotion_rows() == [(2, tracked.name, 1, "champion", "MLflow UI", True)]
    found = tracked.version("champion")
    assert found.tags["hpsearch.trial"] == "2"
    assert found.tags["hpsearch.confirmed"] == "false"
    assert found.description.startswith("What I think of it.\n\n## Lineage\n")
    (line,) = format_promotions(tracked.stored)
    assert line.startswith(f"promoted: trial 2 is {tracked.name}@champion (version 1), by MLflow UI on ")
    assert line.endswith(", unconfirmed (no finalists were trained)")
    attrs = tracked.storage.get_study_system_attrs(tracked.stored.study_id)
    note = "".join(value for key, value in sorted(attrs.items()) if key.startswith("dashboard:note_str"))
    assert line in note
    assert note == study_note(tracked.stored, summarise(tracked.stored))


def test_moving_or_deleting_the_alias_ends_the_promotion(tracked: Tracked) -> None:
    promote(tracked.stored, tracked.tracking, trial=1)
    tracked.client.set_registered_model_alias(tracked.name, "champion", register(tracked, 0))
    sync_promotions(tracked.storage, tracked.tracking)
    assert [(trial, by, holds) for trial, _, _, _, by, holds in tracked.promotion_rows()] == [
        (1, tracked.promotion_rows()[0][4], False),
        (0, "MLflow UI", True),
    ]
    with pytest.raises(Exception, match=r"previous"):
        tracked.version("previous")  # the user moved one alias in the UI, and other aliases do not change
    tracked.client.set_registered_model_alias(tracked.name, "champion", "1")
    sync_promotions(tracked.storage, tracked.tracking)
    assert tracked.promotion_rows()[-1][:5] == (1, tracked.name, 1, "champion", "MLflow UI"), "as tagged first"
    tracked.client.delete_registered_model_alias(tracked.name, "champion")
    sync_promotions(tracked.storage, tracked.tracking)
    assert [holds for *_, holds in tracked.promotion_rows()] == [False, False, False]


def test_deleting_the_version_ends_the_promotion(tracked: Tracked) -> None:
    promote(tracked.stored, tracked.tracking)
    tracked.client.delete_registered_model(tracked.name)
    sync_promotions(tracked.storage, tracked.tracking)
    assert [holds for *_, holds in tracked.promotion_rows()] == [False]


def test_a_promotion_whose_process_died_is_recorded_under_its_name(tracked: Tracked) -> None:
    promote(tracked.stored, tracked.tracking)
    by = tracked.promotion_rows()[0][4]
    with tracked.storage.engine.begin() as connection:  # the alias is set, but the promotion is not in the database
        connection.exec_driver_sql("DELETE FROM hpsearch_promotions")
    sync_promotions(tracked.storage, tracked.tracking)
    assert tracked.promotion_rows() == [(1, tracked.name, 1, "champion", by, True)]


def test_a_study_that_is_deleted_during_its_promotion_keeps_the_alias(
    own_tracked: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delete_study(*_: object) -> None:
        own_tracked.storage.delete_study(own_tracked.stored.study_id)

    monkeypatch.setattr("hpsearch.search.promotion.promote.write_evidence", delete_study)
    with pytest.raises(SearchError, match="was deleted during the promotion"):
        promote(own_tracked.stored, own_tracked.tracking)
    assert own_tracked.client.get_registered_model(own_tracked.name).aliases == {}


def test_damaged_attributes_stop_no_other_promotion(tracked: Tracked, caplog: pytest.LogCaptureFixture) -> None:
    """A worker's role can write any attributes."""
    promote(tracked.stored, tracked.tracking)
    with tracked.storage.engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM hpsearch_promotions")
        connection.exec_driver_sql(
            "INSERT INTO trial_user_attributes (trial_id, key, value_json) "
            "SELECT trial_id, 'hpsearch:attempt', '\"x\"' FROM trials "
            f"WHERE number = 1 AND study_id = {tracked.stored.study_id} "
            "ON CONFLICT (trial_id, key) DO UPDATE SET value_json = EXCLUDED.value_json"
        )
    register(tracked, 2, model="other")
    tracked.client.set_registered_model_alias("other", "champion", "1")
    for key, value in (("hpsearch:val_samples", "x"), ("hpsearch:leaks", 1)):
        tracked.stored.set_attr(key, value)
    tracked.stored.refresh()
    sync_promotions(tracked.storage, tracked.tracking)
    assert f"promotion {tracked.name}@champion of study {tracked.name} not recorded" in caplog.text
    assert [(trial, model) for trial, model, *_ in tracked.promotion_rows()] == [(2, "other")]


def test_models_of_other_projects_are_not_changed(tracked: Tracked) -> None:
    run = tracked.client.create_run(tracked.tracking.experiment_id).info.run_id
    tracked.client.create_registered_model(tracked.name)
    source = tracked.client.get_run(run).info.artifact_uri
    tracked.client.create_model_version(tracked.name, source, run_id=run)
    tracked.client.set_registered_model_alias(tracked.name, "champion", "1")
    sync_promotions(tracked.storage, tracked.tracking)
    assert tracked.promotion_rows() == []
    assert tracked.version("champion").tags == {}


def test_a_promotion_on_another_server_stays_current(tracked: Tracked) -> None:
    promote(tracked.stored, tracked.tracking)
    tracked.client.delete_registered_model(tracked.name)
    with tracked.storage.engine.begin() as connection:
        connection.exec_driver_sql(
            "UPDATE hpsearch_promotions SET evidence = jsonb_set(evidence, '{run_id}', '\"0123\"')"
        )
    sync_promotions(tracked.storage, tracked.tracking)
    assert [holds for *_, holds in tracked.promotion_rows()] == [True]


def test_the_background_sync_detects_promotions_and_survives_outages(tracked: Tracked) -> None:
    asked: list[None] = []

    def server() -> object:
        asked.append(None)
        if len(asked) < 3:
            raise StorageError("away")
        return tracked.tracking

    version = register(tracked, 0)
    tracked.client.set_registered_model_alias(tracked.name, "champion", version)
    with RegistryWatcher(tracked.storage, server, every=0.01) as watch:
        while not tracked.promotion_rows():
            watch._end.wait(0.02)
    assert tracked.promotion_rows() == [(0, tracked.name, 1, "champion", "MLflow UI", True)]
    assert not watch._thread.is_alive()


def test_two_concurrent_syncs_record_a_promotion_once(tracked: Tracked) -> None:
    tracked.client.set_registered_model_alias(tracked.name, "champion", register(tracked, 0))
    with (
        RegistryWatcher(tracked.storage, lambda: tracked.tracking, every=0.01) as one,
        RegistryWatcher(tracked.storage, lambda: tracked.tracking, every=0.01),
    ):
        while not tracked.promotion_rows():
            one._end.wait(0.02)
    assert len(tracked.promotion_rows()) == 1


def test_later_finalists_and_test_scores_update_a_promotion(tracked: Tracked) -> None:
    promote(tracked.stored, tracked.tracking)
    train_finalists(tracked, [1, 2], winner=2)
    refresh_evidence(tracked.stored, tracked.tracking)
    assert tracked.version("champion").tags["hpsearch.unconfirmed"] == "the winner among the finalists is trial 2"
    done = promote(tracked.stored, tracked.tracking)
    assert (done.trial, done.unconfirmed_reason) == (2, "the model was not evaluated on the test set")
    (name,) = read_finalist_studies(tracked.storage.engine, tracked.stored.study_id)
    opening = record_test_evaluation(
        tracked.storage.engine,
        tracked.stored.study_id,
        trial_number=2,
        model_sha256="0" * 64,
        opened_by="me",
        finalists=name,
    )
    write_scores(tracked.storage.engine, tracked.stored.study_id, opening, {"accuracy": 0.875})
    refresh_evidence(tracked.stored, tracked.tracking)
    refresh_evidence(tracked.stored, tracked.tracking)
    found = tracked.version("champion")
    assert (found.tags["hpsearch.confirmed"], found.tags["hpsearch.unconfirmed"]) == ("true", "")
    assert json.loads(found.tags["hpsearch.test"])["scores"] == {"accuracy": 0.875}
    assert json.loads(found.tags["hpsearch.finalists"])["winner"] == 2
    for words in ("Confirmed: ", "| test accuracy | 0.875 |", "| **2** | 0.8 | 0.82 | 0.84 | 0.83 |"):
        assert words in found.description
    (holds,) = [promotion for promotion in tracked.promotions() if promotion.ended_at is None]
    assert holds.is_confirmed
    assert "unconfirmed" not in format_promotions(tracked.stored)[0]


def test_a_stored_promotion_of_another_run_changes_no_version(tracked: Tracked) -> None:
    """Any worker can store a promotion, and the owner may change versions of other users."""
    version = register(tracked, 1)
    tracked.client.set_registered_model_alias(tracked.name, "champion", version)
    evidence = {"study": tracked.stored.spec.name, "study_id": tracked.stored.study_id, "trial": 0}
    with registry_lock(tracked.storage.engine) as connection:
        record_promotion(connection, evidence, tracked.name, int(version), "champion", by="a worker")
    refresh_evidence(tracked.stored, tracked.tracking)
    found = tracked.version("champion")
    assert (found.tags, found.description or "") == ({}, "")


def test_a_test_score_without_finalists_does_not_confirm_a_promotion(tracked: Tracked) -> None:
    engine = tracked.storage.engine
    opening = record_test_evaluation(
        engine, tracked.stored.study_id, trial_number=1, model_sha256="0" * 64, opened_by="me", finalists=None
    )
    write_scores(engine, tracked.stored.study_id, opening, {"accuracy": 0.875})
    assert promote(tracked.stored, tracked.tracking).unconfirmed_reason == "no finalists were trained"
    train_finalists(tracked, [1, 2], winner=1)
    done = promote(tracked.stored, tracked.tracking)
    assert done.unconfirmed_reason == "the model was evaluated on the test set before it won among finalists"


def test_an_ended_promotion_stays_ended(tracked: Tracked) -> None:
    promote(tracked.stored, tracked.tracking)
    with registry_lock(tracked.storage.engine) as connection:
        end_promotion(connection, tracked.promotions()[0])
    first = tracked.promotions()[0].ended_at
    with registry_lock(tracked.storage.engine) as connection:
        end_promotion(connection, tracked.promotions()[0])
    assert tracked.promotions()[0].ended_at == first is not None


def test_recreating_a_registered_model_ends_its_earlier_promotion(tracked: Tracked) -> None:
    """A registered model that is deleted and made again counts its versions from 1."""
    promote(tracked.stored, tracked.tracking, trial=1)
    tracked.client.delete_registered_model(tracked.name)
    promote(tracked.stored, tracked.tracking, trial=0)
    assert [(trial, version, holds) for trial, _, version, _, _, holds in tracked.promotion_rows()] == [
        (1, 1, False),
        (0, 1, True),
    ]


def test_a_nan_score_is_recorded_as_none(tracked: Tracked) -> None:
    with tracked.storage.engine.begin() as connection:
        trial = {"study_id": tracked.stored.study_id, "trial": 1}
        evidence = {"test": {"scores": {"loss": math.nan, "auroc": 0.5}}, "best": [math.inf]}
        record_promotion(connection, trial | evidence, tracked.name, 1, "a", by="x")
    [promotion] = tracked.promotions()
    assert promotion.evidence == {**trial, "test": {"scores": {"loss": None, "auroc": 0.5}}, "best": [None]}


def test_the_report_escapes_texts_of_promotions(tracked: Tracked, tmp_path: Path) -> None:
    reason = "TypeError: expected <class 'torch.Tensor'> & <script>alert(1)</script>"
    study = optuna.load_study(study_name=tracked.name, storage=tracked.storage)
    study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.FAIL, user_attrs={REASON: reason}))
    page = write_report(tracked.stored, tmp_path / "report.html", dashboard_url=None).read_text()
    assert "&lt;class &#39;torch.Tensor&#39;&gt; &amp; &lt;script&gt;alert(1)" in page
    assert "<script>alert(1)" not in page
