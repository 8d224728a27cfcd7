"""A stored study: spec, storage, trials, budget and run directories."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from hpsearch.objectives.loading import load_objective, source_hash
from hpsearch.objectives.objective import BaseObjective
from hpsearch.objectives.training.trainer import device_named
from hpsearch.search.console import command
from hpsearch.search.errors import SearchError, nearest
from hpsearch.search.services import Services, why_away
from hpsearch.search.spec.spec import StudySpec, parse_spec
from hpsearch.search.study.ranking import front_of, rank_trials
from hpsearch.storage.attributes import FOLDER, RELEASE, SOURCE, SPEC, STARTED_AT, TRACKING_URI
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.health import check_server
from hpsearch.storage.study_storage.storage import PostgresStorage
from hpsearch.storage.trials.budget import GivenUp, Spending, done, read_spending
from hpsearch.storage.trials.claims import Claim
from hpsearch.storage.trials.history import finalist_studies


@dataclass(frozen=True)
class StoredStudy:
    """A study together with the spec stored in it."""

    spec: StudySpec
    storage: PostgresStorage
    study_id: int

    @property
    def engine(self) -> sa.Engine:
        """The database that the study is kept in."""
        return self.storage.engine

    @property
    def attrs(self) -> dict[str, Any]:
        """The study's user attributes as they are now."""
        return self.storage.get_study_user_attrs(self.study_id)

    @property
    def budget(self) -> int:
        """How many trials the study may have by now: it is extended while others have it open."""
        return int(self.attrs[SPEC]["n_trials"])

    @property
    def given_up(self) -> GivenUp | None:
        """That the rest of the budget was given up, and why; None while it was not."""
        return GivenUp.of(self.attrs)

    @property
    def spending(self) -> Spending | None:
        """What is spent of its budgets in epochs and seconds; None where it has none."""
        return read_spending(self.engine, self.study_id) if self.spec.metered else None

    def is_spent(self, finished: int) -> bool:
        """Whether the budget is, in trials, epochs or seconds, or its rest given up, with so many trials ended."""
        attrs = self.attrs
        budget, given_up = int(attrs[SPEC]["n_trials"]), GivenUp.of(attrs)
        last = budget if given_up is None else min(budget, given_up.started)
        return finished >= last or ((spending := self.spending) is not None and spending.over)

    def done(self, finished: int) -> str:
        """Return for a person what is spent, with so many trials that have ended: ``12 of 50 trials``."""
        if (spending := self.spending) is None:
            return f"{finished} of {self.budget} trials"
        return done(finished, self.budget, spending).replace("/", " of ")

    @property
    def out_of_time(self) -> bool:
        """Whether the study's time is up: nothing new is begun."""
        if self.spec.timeout is None:
            return False
        started = self.attrs.get(STARTED_AT)
        return started is not None and time.time() >= float(started) + self.spec.timeout

    @property
    def folder(self) -> str:
        """The name of the study's folders, for run directories and checkpoints; no other study has it."""
        # The number is the database's: a study deleted and made again must not find the old one's checkpoints.
        return str(self.attrs.get(FOLDER, f"{self.spec.name}-{self.study_id}"))

    @property
    def go_on(self) -> str:
        """The command that runs what is left of the study."""
        if (of := self.spec.finalists_of) is not None:
            return command("finalists", of.study) if of.refit is None else command("promote", of.study, "--refit")
        return command("run", self.spec.objective, "--name", self.spec.name)

    def require_search(self, remedy: str) -> None:
        """Reject a study that holds the finalists, or the refit, of another.

        Args:
            remedy: what to do instead; ``{study}`` is the name of the other study, ``{go_on}`` the command to continue.

        Raises:
            SearchError: it holds finalists or a refit.
        """
        if (of := self.spec.finalists_of) is not None:
            instead = remedy.format(study=of.study, go_on=self.go_on)
            raise SearchError(f"study {self.spec.name!r} holds {of.what}: {instead}")

    def set_attr(self, key: str, value: Any) -> None:
        """Set a user attribute of the study."""
        self.storage.set_study_user_attr(self.study_id, key, value)

    def objective(self) -> BaseObjective:
        """Load the study's objective, which reports all metrics that the study optimises or bounds.

        Raises:
            ObjectiveError: it cannot be loaded, or does not have such a metric.
        """
        objective = load_objective(self.spec.objective)
        judge_by_metrics(objective, self.spec)
        return objective

    def source_warning(self, objective: BaseObjective) -> str | None:
        """Return a warning when the objective's code is no longer what the study was created with."""
        if self.attrs.get(SOURCE, source_hash(objective)) == source_hash(objective):
            return None
        return (
            f"the code of {self.spec.objective} has changed since study {self.spec.name!r} was created: "
            "its trials may not be comparable; choose another --name to search the new code"
        )

    def open(self) -> optuna.Study:
        """Return Optuna's study with the spec's pruner; the sampler is set anew for each trial."""
        return optuna.load_study(
            study_name=self.spec.name,
            storage=self.storage,
            sampler=optuna.samplers.RandomSampler(),
            pruner=self.spec.pruner.build(),
        )

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return all trials, or those in the given states, without the deep copy that `study.trials` makes."""
        return self.storage.get_all_trials(self.study_id, deepcopy=False, states=states or None)

    def best_trials(self, *, infeasible: bool = False) -> list[FrozenTrial]:
        """Return the trials that have run to their end within all bounds, the best one first; see `rank_trials`."""
        return rank_trials(self.trials(TrialState.COMPLETE), self.spec.maximized, infeasible=infeasible)

    def front(self, *, infeasible: bool = False) -> list[FrozenTrial]:
        """Return those that no other dominates, the best by the first metric first; of one metric the best alone."""
        return front_of(self.trials(TrialState.COMPLETE), self.spec.maximized, infeasible=infeasible)


def load_study(storage: PostgresStorage, name: str) -> StoredStudy:
    """Return the study of that name.

    Raises:
        SearchError: there is none, or hpsearch did not make it.
    """
    study_id = find_study(storage, name)
    if study_id is None:
        names = [s.study_name for s in storage.get_all_studies()]
        hint = nearest(name, names) if names else "; there are none yet"
        raise SearchError(f"no study {name!r}{hint}")
    stored = storage.get_study_user_attrs(study_id).get(SPEC)
    if stored is None:
        raise SearchError(f"study {name!r} has no spec: it was not made by hpsearch; choose another name")
    return StoredStudy(parse_spec(stored), storage, study_id)


def find_study(storage: PostgresStorage, name: str) -> int | None:
    """Return the number of the study of that name, if there is one."""
    try:
        return storage.get_study_id_from_name(name)
    except KeyError:
        return None


def finalist_trials(study: StoredStudy) -> set[int]:
    """Return the numbers of the trials of a study that were ever finalists."""
    numbers: set[int] = set()
    for name in finalist_studies(study.engine, study.study_id):
        of = load_study(study.storage, name).spec.finalists_of
        numbers.update(of.trials if of is not None else ())
    return numbers


def parent_of(chosen: StoredStudy) -> StoredStudy:
    """Return the study whose finalists, or whose refit, a study holds.

    Raises:
        SearchError: it was deleted.
    """
    of = chosen.spec.finalists_of
    assert of is not None
    try:
        parent = load_study(chosen.storage, of.study)
    except SearchError:
        parent = None
    if parent is None or parent.study_id != of.study_id:
        whose = "finalists" if of.refit is None else "refit"
        raise SearchError(
            f"study {of.study!r}, whose {whose} {chosen.spec.name!r} holds, was deleted: "
            f"delete them too: {command('delete', chosen.spec.name)}"
        )
    return parent


# What a later attempt goes on with beside the checkpoint, which is found by the database's word alone.
_CARRIED = ("train.log", "steps.jsonl", "config.yaml", "changes.diff")


def open_attempt_dir(runs: Path, claim: Claim) -> Path:
    """Make the directory of an attempt, with the logs of the one before it, where this machine has them."""
    folder = runs / f"{claim.number:04d}-{claim.attempt}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for earlier in range(claim.attempt - 1, 0, -1):
        if (before := runs / f"{claim.number:04d}-{earlier}").is_dir():
            for name in _CARRIED:
                if (before / name).exists():
                    shutil.copy2(before / name, folder / name)
            break
    return folder


def remove_earlier(runs: Path, claim: Claim) -> None:
    """Remove the directories of the attempts before this one: the trial has ended."""
    for earlier in range(1, claim.attempt):
        shutil.rmtree(runs / f"{claim.number:04d}-{earlier}", ignore_errors=True)


def runs_folder(runs_dir: Path, study: StoredStudy) -> Path:
    """Return the folder of a study's run directories on this machine."""
    return runs_dir / study.folder


def outbox_folder(home: Path, study: StoredStudy) -> Path:
    """Return the folder of what this machine has for MLflow of a study."""
    return home / "outbox" / study.folder


def report_path(services: Services, study: StoredStudy) -> Path:
    """Return where the report of a study is written by default."""
    return services.home / "reports" / f"{study.spec.name}.html"


def known_tracking_uri(services: Services, study: StoredStudy) -> str | None:
    """Return the address of the study's tracking server; None where nobody has named one yet."""
    return services.tracking_uri or study.attrs.get(TRACKING_URI)


def tracking_uri_of(services: Services, study: StoredStudy) -> str:
    """Return the address of the study's tracking server.

    Raises:
        SearchError: nobody has named one.
    """
    if (uri := known_tracking_uri(services, study)) is None:
        raise SearchError(f"study {study.spec.name!r} names no tracking server: give --tracking-uri")
    return uri


def tracking_of(services: Services, study: StoredStudy) -> Tracking:
    """Return the study's tracking server, which answers.

    Raises:
        SearchError: nobody has named one.
        StorageError: it does not answer.
    """
    uri = tracking_uri_of(services, study)
    check_server(uri)
    return services.open_tracking(uri)


def with_tracking(services: Services, study: StoredStudy, *, required: bool = False) -> Services:
    """Return the services with the study's tracking server, and why it does not answer, if it does not.

    Raises:
        SearchError: nobody has named one.
        StorageError: its address is wrong, or it is `required` and does not answer.
    """
    uri = tracking_uri_of(services, study)
    return replace(services, tracking_uri=uri, tracking_away=why_away(uri, required=required))


def check_release(study: StoredStudy) -> None:
    """Refuse to train trials of a study that a release of another series made.

    Raises:
        SearchError: it names both.
    """
    made, own = study.attrs.get(RELEASE), version("hpsearch")
    if made is not None and _series(made) != _series(own):
        raise SearchError(
            f"study {study.spec.name!r} was made by hpsearch {made}, whose trials may come to other numbers than those "
            f"of {own} here: install hpsearch {made} on this machine"
        )


def _series(release: str) -> list[str]:
    """What changes when numbers may: the first part, and before 1.0 the second one as well."""
    parts = release.split(".")
    return parts[:2] if parts[0] == "0" else parts[:1]


def judge_by_metrics(objective: BaseObjective, spec: StudySpec) -> None:
    """Let the objective report all metrics that the study optimises or bounds.

    Raises:
        ObjectiveError: it does not have such a metric.
    """
    objective.judge_by(spec.metric, spec.direction)
    objective.also_report(spec.also_reported)


def require_measurable(spec: StudySpec, device: str | None) -> None:
    """Refuse to train where each trial would fail, for what a study asks for cannot be measured.

    Raises:
        SearchError: it cannot on that device.
        ObjectiveError: there is no such device.
    """
    if "peak_memory_mb" in spec.also_reported and (kind := device_named(device).type) != "cuda":
        raise SearchError(
            f"study {spec.name!r} asks for peak_memory_mb, which is measured on CUDA devices, and here it would be "
            f"trained on {kind}: train it where there is a GPU, or search by model_mb or parameters"
        )
