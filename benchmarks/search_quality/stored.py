"""hpsearch with a study in Postgres: the calls of a worker, one by one.

Needed for decisions that the database makes, such as promotions from rungs. `production.py` has the same samplers and
pruners in memory, which is faster; searches that both support are equal.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path

import optuna

from benchmarks.search_quality.problems import Problem
from benchmarks.search_quality.production import table
from benchmarks.search_quality.simulation import Work
from hpsearch.search.pruners.study_pruner import StudyPruner, make_rungs
from hpsearch.search.samplers.known_trials import make_sampler_study_view
from hpsearch.search.samplers.suggest import suggest
from hpsearch.search.spec.spec import parse_spec
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import ORIGIN, SPEC
from hpsearch.storage.database.connect import make_engine
from hpsearch.storage.database.migrate import migrate
from hpsearch.storage.database.roles import create_databases
from hpsearch.storage.embedded.postgres import EmbeddedPostgres
from hpsearch.storage.embedded.postgres_account import make_postgres_folder
from hpsearch.storage.rungs.rungs import PrunedTrial
from hpsearch.storage.study_storage.storage import PostgresStorage
from hpsearch.storage.trials.budget import create_spending
from hpsearch.storage.trials.claim_results import Claim, NoTrialAvailable
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome

LEASE = 10**6  # seconds: no worker fails in the simulation


@cache
def storage() -> PostgresStorage:
    """Start a Postgres server that ends with the process, and create a database."""
    # Not a TemporaryDirectory, which a process that is forked from this one would remove when it exits.
    home = Path(tempfile.mkdtemp(prefix="hpsearch-quality-")).resolve()
    home.chmod(0o755)  # if run as root, Postgres runs as another user, which needs access
    server = EmbeddedPostgres(make_postgres_folder(home), home / "postgres.log")
    port = server.start(None)
    Finalize(None, server.stop, exitpriority=2)  # `atexit` does nothing in a process of a pool
    Finalize(None, shutil.rmtree, (home,), {"ignore_errors": True}, exitpriority=1)
    made = create_databases(server.make_url(port), owner_password="o", worker_password="w", mlflow_password="m")
    migrate(made.owner_url)
    return PostgresStorage(make_engine(made.worker_url, application_name="search quality", pool_size=2))


class Stored:
    """A sampler and a pruner of hpsearch, given by their names or tables as in a study."""

    def __init__(self, problem: Problem, sampler: object, pruner: object, *, seed: int) -> None:
        objective = problem.objective
        self._objective, self._epochs, self._storage = objective(), problem.epochs, storage()
        name = f"{objective.name}-{seed}"
        if name in {study.study_name for study in self._storage.get_all_studies()}:
            self._storage.delete_study(self._storage.get_study_id_from_name(name))
        settings = {"name": name, "objective": objective.name, "metric": objective.metric, "seed": seed}
        settings |= {"direction": objective.direction, "epochs": problem.epochs, "n_trials": problem.trials}
        settings |= {"budget_epochs": problem.budget_epochs}
        self._spec = parse_spec({**settings, "sampler": table(sampler), "pruner": table(pruner)})
        new = optuna.create_study(study_name=name, storage=self._storage, direction=objective.direction)
        if problem.default is not None:
            new.enqueue_trial(dict(problem.default), user_attrs={ORIGIN: "default"})
        study = StoredStudy(self._spec, self._storage, self._storage.get_study_id_from_name(name))
        study.set_attr(SPEC, self._spec.model_dump())
        self._sampled = make_sampler_study_view(study.open())
        self._rungs = make_rungs(self._spec)
        self._pruner = StudyPruner(self._spec, self._storage, study.study_id)
        is_metered = problem.budget_epochs is not None
        if is_metered:
            with self._storage.engine.begin() as connection:
                create_spending(connection, study.study_id, epochs=problem.budget_epochs, seconds=None)
        self._claims = Claims(
            self._storage.engine,
            study.study_id,
            worker="simulated:0",
            lease=LEASE,
            rungs=self._rungs,
            metered_epochs=problem.epochs if is_metered else None,
        )
        self._claimed: dict[int, Claim] = {}
        self._values: dict[int, dict[int, float]] = {}

    def next_work(self) -> Work | None:
        """Claim a trial: a new one or a paused one."""
        while isinstance(claim := self._claims.claim(), PrunedTrial):
            pass
        if isinstance(claim, NoTrialAvailable):
            return None
        if not isinstance(claim, Claim):
            raise RuntimeError(f"no trial to claim: {claim}")
        begun = claim.number in self._values
        self._claimed[claim.number] = claim
        self._values.setdefault(claim.number, {})
        with self._storage.hold_trial(claim.trial_id, claim.attempt):
            suggest(self._objective, self._sampled, claim, self._spec)
        params = None if begun else self._storage.get_trial(claim.trial_id).params
        return Work(claim.number, self._epochs, params)

    def report(self, trial: int, epoch: int, value: float) -> bool:
        """Make the calls of a worker's session after an epoch, and end the trial if it is complete or pruned."""
        claim, values = self._claimed[trial], self._values[trial]
        with self._storage.hold_trial(claim.trial_id, claim.attempt):
            self._claims.report(claim, epoch, value)
            values[epoch] = value
            if epoch == self._epochs - 1:
                self._claims.finish_attempt(claim, Outcome.COMPLETE, value=self._best(trial))
                return False
            if self._pruner(self._storage.get_trial(claim.trial_id), values).prune:
                self._claims.finish_attempt(claim, Outcome.PRUNED, value=value)
                return False
            return self._is_promoted(trial, epoch)

    def _is_promoted(self, trial: int, epoch: int) -> bool:
        if self._rungs is None or epoch + 1 not in self._rungs.epochs:
            return True
        rung = self._rungs.epochs.index(epoch + 1)
        return self._claims.report_rung(self._claimed[trial], rung, self._best(trial)).is_promoted

    def _best(self, trial: int) -> float:
        values = self._values[trial].values()
        return max(values) if self._spec.maximize else min(values)
