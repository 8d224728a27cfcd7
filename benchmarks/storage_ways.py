"""The kinds of trials that `bench_storage` compares: those of a worker, and those of Optuna's public interface."""

from __future__ import annotations

import contextlib
import importlib.util
import random
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

import optuna
import sqlalchemy as sa
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import BaseStorage, RDBStorage, get_storage
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpsearch.search.pruners.study_pruner import StudyPruner
from hpsearch.search.spec.spec import parse_spec
from hpsearch.storage.attributes import SPEC
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome

EPOCHS = 10
GRPC = importlib.util.find_spec("grpc") is not None
PUBLIC = ("ours", "rdb", *(("grpc",) if GRPC else ()))
KINDS = ("worker", *PUBLIC)
SPACE = {
    "lr": FloatDistribution(1e-5, 1e-1, log=True),
    "dropout": FloatDistribution(0.0, 0.5),
    "layers": IntDistribution(1, 8),
    "optimizer": CategoricalDistribution(("sgd", "adam", "lamb")),
}


SPECIFIED = parse_spec(
    {
        "name": "bench",
        "objective": "bench",
        "metric": "score",
        "direction": "maximize",
        "epochs": EPOCHS + 1,
        "n_trials": 10**6,
        "pruner": {"name": "median", "n_warmup_steps": 0},
    }
)


class Watched(BaseStorage):
    """A wrapper of a storage that times all calls."""

    def __init__(self, inner: BaseStorage) -> None:
        self.inner = inner
        self.seconds = self.cpu = 0.0  # cpu: CPU time of this process

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        started, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started
            self.cpu += time.process_time() - cpu


def _timed(name: str) -> Callable[..., object]:
    def call(self: Watched, *args: object, **kwargs: object) -> object:
        with self.timed():
            return getattr(self.inner, name)(*args, **kwargs)

    return call


for _name in [name for name in vars(BaseStorage) if not name.startswith("_") and callable(getattr(BaseStorage, name))]:
    setattr(Watched, _name, _timed(_name))
Watched.__abstractmethods__ = frozenset()


def get_engine(storage: BaseStorage) -> sa.Engine | None:
    return getattr(getattr(storage, "_backend", storage), "engine", None)


def open_kind(kind: str, url: str, port: int = 0) -> BaseStorage:
    match kind:
        case "ours" | "worker":
            return open_storage(url, application_name="bench")
        case "rdb":
            return get_storage(RDBStorage(url, engine_kwargs={"pool_pre_ping": True}, skip_table_creation=True))
        case _:
            return optuna.storages.GrpcStorageProxy(host="127.0.0.1", port=port)


def make_study(storage: BaseStorage, name: str, sampler: str = "tpe", seed: int | None = None) -> optuna.Study:
    made = optuna.samplers.TPESampler(seed=seed) if sampler == "tpe" else optuna.samplers.RandomSampler(seed=seed)
    return optuna.create_study(
        storage=storage,
        study_name=name,
        sampler=made,
        pruner=optuna.pruners.MedianPruner(),
        direction="maximize",
        load_if_exists=True,
    )


def get_value(lr: float, epoch: int) -> float:
    return 1.0 - abs(lr - 0.01) - 1.0 / (epoch + 2)


def suggest(trial: optuna.Trial) -> float:
    lr = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    trial.suggest_float("dropout", 0.0, 0.5)
    trial.suggest_int("layers", 1, 8)
    trial.suggest_categorical("optimizer", ("sgd", "adam", "lamb"))
    return lr


class Runner:
    """A runner of trials of one kind in a study."""

    def __init__(self, kind: str, storage: BaseStorage, name: str, sampler: str = "tpe") -> None:
        self.kind, self.inner = kind, storage
        self.watched = Watched(storage)
        self.study = make_study(self.watched, name, sampler)
        self.claims: Claims | None = None
        if kind == "worker":
            storage.set_study_user_attr(self.study._study_id, SPEC, SPECIFIED.model_dump())
            self.claims = Claims(get_engine(storage), self.study._study_id, worker="bench")

    def trial(self) -> dict[str, float]:
        """Run one trial and return the milliseconds of its parts."""
        self.watched.seconds = self.watched.cpu = 0.0
        started = time.perf_counter()
        parts = self._public() if self.claims is None else self._claimed(self.claims)
        parts["trial"] = time.perf_counter() - started
        parts |= {"storage": self.watched.seconds, "cpu": self.watched.cpu}
        return {name: 1000 * seconds for name, seconds in parts.items()}

    def _public(self) -> dict[str, float]:
        clock = Clock()
        trial = self.study.ask()
        clock.lap("ask")
        lr = suggest(trial)
        clock.lap("suggest")
        for epoch in range(EPOCHS):
            trial.report(get_value(lr, epoch), epoch)
            clock.lap("report")
            trial.should_prune()
            clock.lap("should_prune")
        self.study.tell(trial, get_value(lr, EPOCHS))
        clock.lap("tell")
        return clock.parts()

    def _claimed(self, claims: Claims) -> dict[str, float]:
        storage, clock = self.inner, Clock()
        assert isinstance(storage, PostgresStorage)
        judge = StudyPruner(SPECIFIED, storage, self.study._study_id, max_age=1.0)
        with self.watched.timed():
            claim = claims.claim()
        assert isinstance(claim, Claim)
        with contextlib.ExitStack() as stack:
            with self.watched.timed():
                stack.enter_context(storage.hold_trial(claim.trial_id, claim.attempt))
            clock.lap("ask")
            batch = storage.batch_writes(claim.trial_id)
            batch.__enter__()
            lr = suggest(optuna.Trial(self.study, claim.trial_id))
            with self.watched.timed():
                batch.__exit__(None, None, None)
            clock.lap("suggest")
            frozen = storage.get_trial(claim.trial_id)
            for epoch in range(EPOCHS):
                with self.watched.timed():
                    claims.report(claim, epoch, get_value(lr, epoch))
                frozen.intermediate_values[epoch] = get_value(lr, epoch)
                clock.lap("report")
                judge(frozen, frozen.intermediate_values)
                clock.lap("should_prune")
            with self.watched.timed():
                claims.finish_attempt(claim, Outcome.COMPLETE, value=get_value(lr, EPOCHS))
            clock.lap("tell")
        return clock.parts()


class Clock:
    """Times of laps, summed by name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self.last
        self.last = now

    def parts(self) -> dict[str, float]:
        return {name: s / EPOCHS if name in ("report", "should_prune") else s for name, s in self.laps.items()}


def make_finished_trial(number: int) -> FrozenTrial:
    """Return a COMPLETE trial like those of `Runner`."""
    rng = random.Random(number)
    lr = 10 ** rng.uniform(-5, -1)
    start = datetime(2026, 1, 1) + timedelta(seconds=number)
    return FrozenTrial(
        number=0,
        trial_id=0,
        state=TrialState.COMPLETE,
        value=get_value(lr, EPOCHS),
        datetime_start=start,
        datetime_complete=start + timedelta(seconds=1),
        params={"lr": lr, "dropout": rng.uniform(0, 0.5), "layers": rng.randint(1, 8), "optimizer": "adam"},
        distributions=dict(SPACE),
        user_attrs={"hpsearch:attempt": 1, "hpsearch:worker": "host:1"},
        system_attrs={},
        intermediate_values={epoch: get_value(lr, epoch) for epoch in range(EPOCHS)},
    )


def make_running_trial(number: int) -> FrozenTrial:
    trial = make_finished_trial(number)
    return create_trial(
        state=TrialState.RUNNING,
        params=trial.params,
        distributions=trial.distributions,
        user_attrs=trial.user_attrs,
        intermediate_values=trial.intermediate_values,
    )
