"""A stored study: its spec, trials and budget."""

from __future__ import annotations

import re
import shlex
import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import optuna
import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.custom_loop.loop_objective import LoopObjective
from hpsearch.objectives.loading import load_checked_objective, load_objective, source_hash
from hpsearch.objectives.references import BUILTIN
from hpsearch.redaction import redact
from hpsearch.search.console import format_command
from hpsearch.search.errors import SearchError, suggest_names
from hpsearch.search.spec.spec import NAME_PATTERN, FinalistsOf, StudySpec, parse_stored_spec
from hpsearch.search.study.ranking import find_pareto_front, rank_trials
from hpsearch.search.study.trust import Code, check_source, record_trust
from hpsearch.storage.attributes import (
    CHECKPOINT_URL,
    DATA_SHA256,
    DEVICES,
    FOLDER_NAME,
    LEAKS,
    RESTORED,
    RESTORED_CHECKPOINTS,
    RUN_ID,
    SOURCE_SHA256,
    SPEC,
    STARTED_AT,
    STOPPED,
    VAL_SAMPLES,
    VERSION,
    make_default_folder_name,
)
from hpsearch.storage.checkpoints.pointers import has_pointers
from hpsearch.storage.display import escape_line
from hpsearch.storage.errors import DamagedStudyError
from hpsearch.storage.study_storage.storage import PostgresStorage
from hpsearch.storage.trials.budget import Spending, format_progress, read_spending
from hpsearch.storage.trials.early_stop import EarlyStop
from hpsearch.storage.trials.history import has_other_owner, read_finalist_studies

_TYPE_BY_ATTRIBUTE = {
    DATA_SHA256: str,
    LEAKS: dict,
    RUN_ID: str,
    VAL_SAMPLES: int,
}  # any worker can write them; a wrong type must not stop a command

# Folder names, by the name and the id of a study. Earlier development versions generated the last two.
_FOLDER_PATTERN = r"{name}-({random}|{id}-{random}|{id})"
_RANDOM_PATTERN = "([0-9a-f]{8}|[0-9a-f]{16})"


@dataclass(frozen=True)
class StoredStudy:
    """A study that is stored in the database, with its spec."""

    spec: StudySpec
    storage: PostgresStorage
    study_id: int

    @property
    def engine(self) -> sa.Engine:
        """The SQLAlchemy engine of the study's database."""
        return self.storage.engine

    @property
    def attrs(self) -> dict[str, Any]:
        """The study's user attributes, read from the database at each access, without those of a wrong type."""
        found = self.storage.get_study_user_attrs(self.study_id)
        return {key: value for key, value in found.items() if isinstance(value, _TYPE_BY_ATTRIBUTE.get(key, object))}

    @property
    def budget(self) -> int:
        """The current budget in trials, read from the database at each access, because `extend` may change it."""
        return int(self.attrs[SPEC]["n_trials"])

    @property
    def stopped(self) -> str | None:
        """User, host and time of the stop of the study, as one line; None if the study is not stopped."""
        stopped = self.attrs.get(STOPPED)
        return None if stopped is None else escape_line(str(stopped)) or "by an unknown user"

    @property
    def early_stop(self) -> EarlyStop | None:
        """The record of the study's early termination; None if the study did not terminate early."""
        return EarlyStop.from_attrs(self.attrs)

    @property
    def spending(self) -> Spending | None:
        """The used epochs and seconds; None if the study has no budget in epochs or seconds."""
        return read_spending(self.engine, self.study_id) if self.spec.has_epoch_or_time_budget else None

    def is_spent(self, finished: int) -> bool:
        """Return whether, after `finished` trials, a budget is spent or an early termination is reached."""
        attrs = self.attrs
        budget, early_stop = int(attrs[SPEC]["n_trials"]), EarlyStop.from_attrs(attrs)
        last = budget if early_stop is None else min(budget, early_stop.started)
        return finished >= last or ((spending := self.spending) is not None and spending.is_exhausted)

    def format_progress(self, finished: int) -> str:
        """Return the used part of each budget after `finished` trials as text: ``12 of 50 trials``."""
        if (spending := self.spending) is None:
            return f"{finished} of {self.budget} trials"
        return format_progress(finished, self.budget, spending).replace("/", " of ")

    @property
    def is_timed_out(self) -> bool:
        """Whether the study's timeout has expired. No new trial starts after that."""
        if self.spec.timeout is None:
            return False
        started = self.attrs.get(STARTED_AT)
        return started is not None and time.time() >= float(started) + self.spec.timeout

    @property
    def folder(self) -> str:
        """The name, unique across studies, of the study's folders for run directories and checkpoints."""
        # The id in the database differs from that of a deleted study of the same name, which has other checkpoints.
        folder = str(self.attrs.get(FOLDER_NAME, make_default_folder_name(self.spec.name, self.study_id)))
        if not self._is_own_folder(folder):
            raise SearchError(
                f"study {self.spec.name!r} has the folder name {folder!r}, which hpsearch did not generate; "
                f"as the database owner, correct the study's attribute {FOLDER_NAME!r}"
            )
        return folder

    def _is_own_folder(self, folder: str) -> bool:
        """Return whether hpsearch generated the name of the folder for this study.

        Every worker's database role can create a study with any folder name and spec, and `delete` removes the folder.
        """
        name = self.storage.get_study_name_from_id(self.study_id)  # unique, unlike the name in the spec
        pattern = _FOLDER_PATTERN.format(name=re.escape(name), id=self.study_id, random=_RANDOM_PATTERN)
        is_generated = re.match(NAME_PATTERN, name) and re.fullmatch(pattern, folder)
        # The folder s-1-RANDOM is ambiguous: study s with the id 1, or study s-1.
        is_own = bool(is_generated) and name == self.spec.name  # the study may have been renamed
        return is_own and not has_other_owner(self.engine, self.study_id, folder)

    @property
    def finalists_of(self) -> FinalistsOf:
        """The finalists or the refit that this study holds; a search has none."""
        of = self.spec.finalists_of
        assert of is not None
        return of

    @property
    def resume_command(self) -> str:
        """The command line that resumes the study."""
        if (of := self.spec.finalists_of) is not None:
            again = ("finalists", of.study) if of.refit is None else ("promote", of.study, "--refit")
            return format_command(*again)
        return format_command("run", self.spec.objective, "--name", self.spec.name)

    def require_search(self, remedy: str) -> None:
        """Reject a finalist study or a refit study.

        Args:
            remedy: remedy for the error message. ``{study}`` is replaced by the name of the search, and
                ``{resume_command}`` by the command that resumes this study.

        Raises:
            SearchError: the study is a finalist or refit study.
        """
        if (of := self.spec.finalists_of) is not None:
            instead = remedy.format(study=of.study, resume_command=self.resume_command)
            raise SearchError(f"study {self.spec.name!r} holds {of.description}; {instead}")

    def set_attr(self, key: str, value: Any) -> None:
        """Set a user attribute of the study."""
        self.storage.set_study_user_attr(self.study_id, key, value)

    def objective(self, *, allow_changed: bool = False, loaded: BaseObjective | None = None) -> BaseObjective:
        """Load the study's objective, and set the metrics that the objective optimizes and reports.

        Args:
            allow_changed: whether to import code that has changed since the study was created; see `check_source`.
            loaded: an objective that this process has loaded before; it is returned, with the data that it has
                prepared, unless the study's reference leads to another class by now.

        Raises:
            SearchError: the user has to confirm the objective's code.
            ObjectiveError: the objective cannot be loaded, or a metric does not fit the objective.
        """
        reference = self.spec.objective
        code = check_source(self.spec.name, reference, self.attrs, allow_changed=allow_changed)
        if code is None:
            objective = load_objective(reference)
        else:
            objective = load_checked_objective(reference, code.file, code.sha256)
        if loaded is not None and type(loaded) is type(objective):
            objective = loaded
        set_metrics(objective, self.spec)
        return objective

    @property
    def external_settings(self) -> list[str]:
        """The settings by which the study runs code, or writes or deletes files elsewhere, as text."""
        code = self.spec.sampler.downloaded_code_description
        url = self.attrs.get(CHECKPOINT_URL)  # `restore` keeps it if the files are not in the backup
        named = {
            "tensorboard": self.spec.tensorboard,
            "wandb": self.spec.wandb,
            "checkpoint-url": None if url is None else redact(str(url)),
        }
        return [
            *([f"the sampler {code}"] if code is not None else []),
            *(f"--{name} {value}" for name, value in named.items() if value),
        ]

    @property
    def restored_checkpoints(self) -> list[str]:
        """The checkpoints of a restored study as text, unless its objective is built in; empty if there are none.

        Libraries such as DeepSpeed unpickle the files that a custom training loop has stored in its checkpoints.
        """
        is_relevant = self.attrs.get(RESTORED_CHECKPOINTS) and self.spec.objective not in BUILTIN
        return ["the files in its checkpoints"] if is_relevant and has_pointers(self.engine, self.study_id) else []

    def check_restored(self, objective: BaseObjective | None = None) -> None:
        """Check that the author of a backup has not chosen code, folders or files that the user has not confirmed.

        Args:
            objective: objective of the study; if it has a custom training loop, its checkpoints need a confirmation
                too. None if no training follows.

        Raises:
            SearchError: the user has to confirm them.
        """
        loaded = self.restored_checkpoints if isinstance(objective, LoopObjective) else []
        if named := [*(self.external_settings if self.attrs.get(RESTORED) else ()), *loaded]:
            name = self.spec.name
            raise SearchError(
                f"study {name!r} was restored from a backup and uses {' and '.join(named)}; "
                f"if you trust this, confirm it with: {format_command('trust', name)}"
            )

    def trust_code(self, code: Code | None, *, with_checkpoints: bool = False) -> None:
        """Record that the user confirms the code of the study's objective, and its `external_settings`.

        Args:
            code: code of the objective.
            with_checkpoints: whether the user also confirms the checkpoints of a restored study.

        Raises:
            StorageError: the record cannot be written.
        """
        record_trust(self.spec.objective, code)
        for mark in (RESTORED, RESTORED_CHECKPOINTS) if with_checkpoints else (RESTORED,):
            if self.attrs.get(mark):
                self.set_attr(mark, None)

    def source_warning(self, objective: BaseObjective) -> str | None:
        """Return a warning if the objective's code has changed since the study was created."""
        if self.attrs.get(SOURCE_SHA256, source_hash(objective)) == source_hash(objective):
            return None
        return (
            f"the code of {self.spec.objective} has changed since study {self.spec.name!r} was created, "
            "and its trials may not be comparable; choose another --name to search the new code"
        )

    def open(self) -> optuna.Study:
        """Return Optuna's study object with the spec's pruner. Workers set the sampler per trial.

        Raises:
            SearchError: another study has got the name since this one was loaded.
        """
        found = optuna.load_study(
            study_name=self.spec.name,
            storage=self.storage,
            sampler=optuna.samplers.RandomSampler(),
            pruner=self.spec.pruner.build(),
        )
        if found._study_id != self.study_id:
            name, other = self.spec.name, found._study_id
            raise SearchError(
                f"the name {name!r} now belongs to the study with the id {other} instead of {self.study_id}; "
                "repeat the command"
            )
        return found

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials in the given states, or all trials if none are given. The trials are not copied."""
        return self.storage.get_all_trials(self.study_id, deepcopy=False, states=states or None)

    def refresh(self) -> None:
        """Read attributes of finished trials again, such as links to MLflow that were stored after the trial ended."""
        self.storage.drop_caches(self.study_id)

    def find_devices_warning(self, devices: int) -> str | None:
        """Return a warning if trials would be trained on another number of devices than in the study's first `run`."""
        planned = self.attrs.get(DEVICES, devices)
        if planned == devices:
            return None
        at = "1 device" if devices == 1 else f"{devices} devices"
        return (
            f"study {self.spec.name!r} was started with --devices {planned}, but this command trains each trial on "
            f"{at}; a custom loop or a large model may need --devices {planned}"
        )

    def best_trials(self, *, infeasible: bool = False) -> list[FrozenTrial]:
        """Return the feasible COMPLETE trials, best first, as `rank_trials` does."""
        return rank_trials(self.trials(TrialState.COMPLETE), self.spec.maximize_each, infeasible=infeasible)

    def front(self, *, infeasible: bool = False) -> list[FrozenTrial]:
        """Return the Pareto front, best value of the first metric first; with one metric, only the best trial."""
        return find_pareto_front(self.trials(TrialState.COMPLETE), self.spec.maximize_each, infeasible=infeasible)


def load_study(storage: PostgresStorage, name: str) -> StoredStudy:
    """Return the stored study with this name.

    Raises:
        SearchError: the study does not exist, was renamed, or was not created by hpsearch.
        DamagedStudyError: an attribute of the study is damaged.
    """
    study_id = find_study(storage, name)
    if study_id is None:
        names = [s.study_name for s in storage.get_all_studies()]
        hint = suggest_names(name, names) if names else "; the database has no studies yet"
        raise SearchError(f"no study {name!r}{hint}")
    stored = storage.get_study_user_attrs(study_id).get(SPEC)
    if stored is None:
        raise SearchError(f"study {name!r} was not created by hpsearch; give another study")
    try:
        spec = parse_stored_spec(stored)
    except SearchError as error:
        raise DamagedStudyError(name, SPEC, str(error).partition(";")[0]) from error
    if spec.name != name:  # otherwise a worker's role could direct a command for this study to another one
        raise SearchError(
            f"study {name!r} was renamed: its settings have the name {spec.name!r}; rename or delete it in the Optuna "
            "dashboard"
        )
    return StoredStudy(spec, storage, study_id)


def load_study_by_id(storage: PostgresStorage, study_id: int) -> StoredStudy:
    """Return the stored study with this id.

    A name may lead to another study in each read, because every worker's database role can rename studies.

    Raises:
        SearchError: the study does not exist, was renamed, or was not created by hpsearch.
        DamagedStudyError: an attribute of the study is damaged.
    """
    try:
        name = storage.get_study_name_from_id(study_id)
    except KeyError:
        raise SearchError(f"the study with the id {study_id} was deleted; repeat the command") from None
    study = load_study(storage, name)
    if study.study_id != study_id:
        raise SearchError(f"the study with the id {study_id} no longer has the name {name!r}; repeat the command")
    return study


def load_companion(study: StoredStudy, name: str) -> StoredStudy:
    """Return the finalist or refit study of a search with this name.

    Every worker's database role could give the name to another study after the command has read it.

    Raises:
        SearchError: the study does not exist, or does not belong to the search.
    """
    found = load_study(study.storage, name)
    of = found.spec.finalists_of
    if of is None or of.study_id != study.study_id:
        raise SearchError(f"study {name!r} no longer belongs to study {study.spec.name!r}; repeat the command")
    return found


def find_study(storage: PostgresStorage, name: str) -> int | None:
    """Return the id of a study; None if the study does not exist."""
    try:
        return storage.get_study_id_from_name(name)
    except KeyError:
        return None


def list_finalist_trials(study: StoredStudy) -> set[int]:
    """Return the numbers of the trials in the current or an earlier set of finalists."""
    numbers: set[int] = set()
    for name in read_finalist_studies(study.engine, study.study_id):
        numbers.update(load_companion(study, name).finalists_of.trials)
    return numbers


def load_parent_study(chosen: StoredStudy) -> StoredStudy:
    """Return the search to which a finalist or refit study belongs.

    Raises:
        SearchError: the search was deleted.
    """
    of = chosen.finalists_of
    try:
        parent = load_study(chosen.storage, of.study)
    except SearchError:
        parent = None
    if parent is None or parent.study_id != of.study_id:
        raise SearchError(
            f"study {chosen.spec.name!r} holds {of.description}, which was deleted; delete this study with: "
            f"{format_command('delete', chosen.spec.name)}"
        )
    return parent


# Files that the next attempt continues. The checkpoint is not among them, because the database selects it.


def check_release(study: StoredStudy) -> None:
    """Reject a study that was created by hpsearch of another release series (see `_get_series`).

    Raises:
        SearchError: the series differ.
    """
    made, installed = study.attrs.get(VERSION), version("hpsearch")
    if made is not None and _get_series(str(made)) != _get_series(installed):
        raise SearchError(
            f"study {study.spec.name!r} was created by hpsearch {made}, whose results may differ from those of "
            f"{installed}; install hpsearch {shlex.quote(str(made))} on this machine"
        )


def _get_series(release: str) -> list[str]:
    """Return the parts of a version number that identify the release series.

    Within a series, equal seeds give equal results. The series is the first part, and before 1.0 also the second part.
    """
    parts = release.split(".")
    return parts[:2] if parts[0] == "0" else parts[:1]


def set_metrics(objective: BaseObjective, spec: StudySpec) -> None:
    """Set the metrics that the objective optimizes and reports.

    Raises:
        ObjectiveError: a metric does not fit the objective.
    """
    objective.set_metric(spec.metric, spec.direction)
    objective.set_reported_metrics(spec.reported_metrics)


def require_measurable(spec: StudySpec, device: str | None) -> None:
    """Reject a device on which a metric of the study, such as peak GPU memory, cannot be measured.

    Raises:
        SearchError: the device cannot measure a metric.
        ObjectiveError: the device does not exist.
    """
    if "peak_memory_mb" not in spec.reported_metrics:
        return
    # Imports torch, which most commands do not need.
    from hpsearch.objectives.training.base_trainer import resolve_device

    if (kind := resolve_device(device).type) != "cuda":
        raise SearchError(
            f"study {spec.name!r} uses the metric peak_memory_mb, which is not available on device {kind}; "
            "use a CUDA device, or the metric model_mb or parameters"
        )


def require_one_device(folds: object, devices: int) -> None:
    """Reject several devices per trial in a study with folds.

    Raises:
        SearchError: the combination is not available.
    """
    if folds is not None and devices > 1:
        raise SearchError("--folds trains each trial on one device; remove --devices and --nodes, or --folds")
