"""All readers see the writes of a storage: PostgresStorage, RDBStorage, the dashboard and the `optuna` CLI."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import optuna
import optuna.cli
import pytest
import sqlalchemy as sa
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage

SPACE = {
    "x": FloatDistribution(0, 1),
    "n": IntDistribution(1, 9),
    "kind": CategoricalDistribution(("a", None, 2.5, True)),
}
VALUES = (0.25, -1e300, float("inf"), float("-inf"), float("nan"), 5e-324)


@pytest.fixture
def ours(database_url: str) -> Iterator[Callable[[], PostgresStorage]]:
    opened: list[PostgresStorage] = []

    def make() -> PostgresStorage:
        opened.append(open_storage(database_url, application_name=f"test {len(opened)}", retry_seconds=10))
        return opened[-1]

    yield make
    for storage in opened:
        storage.engine.dispose()


@pytest.fixture
def theirs(database_url: str) -> Iterator[RDBStorage]:
    storage = RDBStorage(database_url, skip_table_creation=True)
    yield storage
    storage.engine.dispose()


def plain(trial: FrozenTrial) -> str:
    """Return all data of a trial as text, so that NaN equals NaN and the order of parameters matters."""
    unordered = ("_user_attrs", "_system_attrs", "intermediate_values")
    return repr([(key, sorted(value.items()) if key in unordered else value) for key, value in vars(trial).items()])


def assert_same(one: BaseStorage, other: BaseStorage, study_id: int) -> None:
    assert [plain(t) for t in one.get_all_trials(study_id)] == [plain(t) for t in other.get_all_trials(study_id)]


class Actor:
    """Executes random operations on the trials of a study through one storage."""

    def __init__(self, storage: BaseStorage, study_id: int, seed: int) -> None:
        self.storage, self.study_id, self.rng = storage, study_id, random.Random(seed)

    def act(self, trial_ids: list[int]) -> None:
        if not trial_ids or self.rng.random() < 0.15:
            trial_ids.append(self.create())
            return
        trial_id = self.rng.choice(trial_ids)
        try:
            self.rng.choice((self.param, self.attr, self.step, self.step, self.attr, self.state))(trial_id)
        except UpdateFinishedTrialError:
            trial_ids.remove(trial_id)

    def create(self) -> int:
        state = self.rng.choice((TrialState.WAITING, TrialState.RUNNING, TrialState.COMPLETE, TrialState.FAIL))
        if self.rng.random() < 0.5:
            return self.storage.create_new_trial(self.study_id)
        template = create_trial(
            state=state,
            value=0.5 if state == TrialState.COMPLETE else None,
            params={"x": 0.5, "kind": None},
            distributions={"x": SPACE["x"], "kind": SPACE["kind"]},
            user_attrs={"given": {"a": [1, None]}},
            intermediate_values={3: float("nan"), 1: 2.0},
        )
        return self.storage.create_new_trial(self.study_id, template)

    def param(self, trial_id: int) -> None:
        name = self.rng.choice(list(SPACE))
        value: Any = {"x": self.rng.random(), "n": self.rng.randint(1, 9), "kind": self.rng.choice(("a", None, True))}
        distribution = SPACE[name]
        self.storage.set_trial_param(trial_id, name, distribution.to_internal_repr(value[name]), distribution)

    def attr(self, trial_id: int) -> None:
        setter = self.rng.choice((self.storage.set_trial_user_attr, self.storage.set_trial_system_attr))
        setter(trial_id, self.rng.choice("abc"), self.rng.choice((1, None, "text", [1.5, {"k": "ü"}])))

    def step(self, trial_id: int) -> None:
        self.storage.set_trial_intermediate_value(trial_id, self.rng.randrange(6), self.rng.choice(VALUES))

    def state(self, trial_id: int) -> None:
        state = self.rng.choice(list(TrialState))
        values = [self.rng.choice(VALUES[:4])] if state in (TrialState.COMPLETE, TrialState.PRUNED) else None
        self.storage.set_trial_state_values(trial_id, state, values)


@pytest.mark.parametrize("seed", range(2))
def test_all_readers_see_the_same_after_each_write(
    ours: Callable[[], PostgresStorage], theirs: RDBStorage, seed: int
) -> None:
    study_id = ours().create_new_study([StudyDirection.MINIMIZE], "s")
    actors = [Actor(ours(), study_id, seed), Actor(theirs, study_id, 100 + seed)]
    readers, rng, trial_ids = [ours(), actors[0].storage], random.Random(seed), list[int]()
    for turn in range(100):
        rng.choice(actors).act(trial_ids)
        for reader in readers:
            if rng.random() < 0.4:
                states = tuple(s for s in TrialState if rng.random() < 0.5)
                got = [plain(t) for t in reader.get_all_trials(study_id, deepcopy=False, states=states)]
                assert got == [plain(t) for t in theirs.get_all_trials(study_id, states=states)], (turn, states)
    for reader in [*readers, ours()]:
        assert_same(reader, theirs, study_id)


def test_readers_never_see_a_partly_finished_trial(ours: Callable[[], PostgresStorage], theirs: RDBStorage) -> None:
    """Fast writers of both kinds: a finished trial is complete when it is first read, and steps only grow."""
    study_id = ours().create_new_study([StudyDirection.MINIMIZE], "s")
    errors: list[BaseException] = []

    def write(storage: BaseStorage) -> None:
        try:
            for _ in range(8):
                trial_id = storage.create_new_trial(study_id)
                storage.set_trial_param(trial_id, "x", 0.5, SPACE["x"])
                for step in range(5):
                    storage.set_trial_intermediate_value(trial_id, step, float(step))
                    storage.set_trial_user_attr(trial_id, "last", step)
                storage.set_trial_state_values(trial_id, TrialState.COMPLETE, [1.0])
        except BaseException as error:  # the main thread raises it
            errors.append(error)

    writers = [threading.Thread(target=write, args=(s,)) for s in (ours(), ours(), theirs)]
    reader, first_seen, steps = ours(), dict[int, str](), dict[int, int]()
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        for states in ((TrialState.COMPLETE,), None):
            trials = reader.get_all_trials(study_id, deepcopy=False, states=states)
            assert [t.number for t in trials] == sorted(t.number for t in trials)
            for trial in trials:
                seen = len(trial.intermediate_values)
                assert list(trial.intermediate_values) == list(range(seen)), "a hole"
                assert seen >= steps.get(trial.number, 0), "went back"
                steps[trial.number] = seen
                if trial.state == TrialState.COMPLETE:
                    assert (seen, trial.user_attrs, trial.values, trial.params) == (5, {"last": 4}, [1.0], {"x": 0.5})
                    assert first_seen.setdefault(trial.number, plain(trial)) == plain(trial)
    assert errors == []
    assert [t.number for t in reader.get_all_trials(study_id)] == list(range(24))
    assert_same(reader, theirs, study_id)


def test_trial_numbers_of_concurrent_writers_are_distinct(
    ours: Callable[[], PostgresStorage], theirs: RDBStorage
) -> None:
    study_id = ours().create_new_study([StudyDirection.MINIMIZE], "s")
    waiting = create_trial(state=TrialState.WAITING)

    def make(storage: BaseStorage) -> list[int]:
        return [storage.create_new_trial(study_id, waiting if turn % 3 == 2 else None) for turn in range(12)]

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(make, (ours(), theirs, ours(), theirs)))
    trials = ours().get_all_trials(study_id)
    assert [t.number for t in trials] == list(range(48))
    assert [t._trial_id for t in trials] == sorted(trial_id for one in made for trial_id in one)


def test_a_reopened_trial_is_read_again(ours: Callable[[], PostgresStorage], owner_url: str) -> None:
    storage = ours()
    study_id = storage.create_new_study([StudyDirection.MINIMIZE], "s")
    trial_id = storage.create_new_trial(study_id)
    storage.set_trial_state_values(trial_id, TrialState.FAIL)
    assert [t.state for t in storage.get_all_trials(study_id)] == [TrialState.FAIL]
    with storage.engine.begin() as connection:
        connection.execute(sa.text("UPDATE trials SET state = 'WAITING', datetime_complete = NULL"))
    assert storage.get_trial(trial_id).state == TrialState.WAITING
    assert [t.state for t in storage.get_all_trials(study_id)] == [TrialState.WAITING]
    assert storage.get_all_trials(study_id, states=(TrialState.FAIL,)) == []
    storage.set_trial_state_values(trial_id, TrialState.RUNNING)
    storage.set_trial_state_values(trial_id, TrialState.COMPLETE, [2.0])
    assert [t.value for t in storage.get_all_trials(study_id, states=(TrialState.COMPLETE,))] == [2.0]
    assert storage.get_trial(trial_id).value == 2.0


def test_a_study_deleted_by_another_process_is_gone(ours: Callable[[], PostgresStorage], theirs: RDBStorage) -> None:
    one, two = ours(), ours()
    study_id = one.create_new_study([StudyDirection.MINIMIZE], "s")
    one.import_trials(study_id, [create_trial(value=1.0, intermediate_values={0: 1.0}, user_attrs={"a": 1})] * 3)
    trial_id = one.get_all_trials(study_id)[0]._trial_id
    with one.engine.begin() as connection:  # rows in hpsearch's tables are deleted with it
        connection.execute(
            sa.text(
                "INSERT INTO hpsearch_attempts (trial_id, attempt, claim_id, worker, process, expires_at)"
                "VALUES (:t, 1, gen_random_uuid(), 'w', 'p', now())"
            ),
            {"t": trial_id},
        )
    assert len(two.get_all_trials(study_id)) == 3
    two.delete_study(study_id)
    for storage in (one, two, theirs):
        with pytest.raises(KeyError):
            storage.get_all_trials(study_id)
        with pytest.raises(KeyError):
            storage.get_study_name_from_id(study_id)
    with pytest.raises(KeyError):
        one.create_new_trial(study_id)
    with one.engine.connect() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM hpsearch_attempts")).scalar() == 0


def test_names_and_attributes_are_shared(ours: Callable[[], PostgresStorage], theirs: RDBStorage) -> None:
    storage = ours()
    directions = [StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE]
    study_id = storage.create_new_study(directions, "mine")
    with pytest.raises(DuplicatedStudyError):
        theirs.create_new_study(directions, "mine")
    with pytest.raises(DuplicatedStudyError):
        ours().create_new_study(directions, "mine")
    storage.set_study_user_attr(study_id, "u", {"nan": [None, 1.5]})
    theirs.set_study_system_attr(study_id, "s", "of theirs")
    assert [vars(s) for s in storage.get_all_studies()] == [vars(s) for s in theirs.get_all_studies()]
    assert storage.get_study_system_attrs(study_id) == {"s": "of theirs"}
    assert theirs.get_study_directions(study_id) == directions


@pytest.mark.soak
def test_optimize_with_both_storages_on_one_study(ours: Callable[[], PostgresStorage], theirs: RDBStorage) -> None:
    optuna.create_study(storage=ours(), study_name="s", direction="minimize")

    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", -1, 1)
        for step in range(3):
            trial.report(x * x + step, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return x * x

    for storage in (ours(), theirs, ours(), optuna.storages.get_storage(theirs)):
        optuna.load_study(study_name="s", storage=storage).optimize(objective, n_trials=8)
    study = optuna.load_study(study_name="s", storage=ours())
    assert len(study.trials) == 32
    assert study.best_trial == optuna.load_study(study_name="s", storage=theirs).best_trial
    assert_same(ours(), theirs, study._study_id)


def test_the_dashboard_and_the_command_line_read_a_live_study(
    ours: Callable[[], PostgresStorage],
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import optuna_dashboard  # here because the import takes two seconds of the collection

    storage = ours()
    study = optuna.create_study(storage=storage, study_name="live", direction="maximize")
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=3)
    trial = study.ask()
    trial.report(0.5, 0)

    def cli(*arguments: str) -> Any:
        monkeypatch.setattr("sys.argv", ["optuna", *arguments, "--storage", database_url, "-f", "json"])
        assert optuna.cli.main() == 0
        return json.loads(capsys.readouterr().out)

    assert [s["name"] for s in cli("studies")] == ["live"]
    assert [t["state"] for t in cli("trials", "--study-name", "live")] == ["COMPLETE"] * 3 + ["RUNNING"]
    assert cli("best-trial", "--study-name", "live")["number"] == study.best_trial.number

    app = optuna_dashboard.wsgi(ours())

    def get(path: str) -> Any:
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "QUERY_STRING": "after=0", "wsgi.url_scheme": "http"}
        environ |= {"SERVER_NAME": "x", "SERVER_PORT": "80", "HTTP_HOST": "x"}
        statuses: list[str] = []
        body = b"".join(app(environ, lambda status, *_: statuses.append(status)))
        assert statuses == ["200 OK"]
        return json.loads(body)

    assert [s["study_name"] for s in get("/api/studies")["study_summaries"]] == ["live"]
    trials = get(f"/api/studies/{study._study_id}")["trials"]
    assert [t["state"] for t in trials] == ["Complete"] * 3 + ["Running"]
    assert [v["value"] for v in trials[3]["intermediate_values"]] == [0.5]
