"""`Study`: a search as an object, created or opened, run, steered, inspected, confirmed and promoted."""

from __future__ import annotations

import html
import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from hpsearch.search.errors import SearchError, suggest_names
from hpsearch.storage.urls import Addresses

if TYPE_CHECKING:
    import optuna
    import pandas as pd
    from optuna.trial import FrozenTrial

    from hpsearch.objectives.objective import BaseObjective
    from hpsearch.search.api.opening import StudyRow
    from hpsearch.search.finalists import Finalists
    from hpsearch.search.finalists.refit import Refit
    from hpsearch.search.promotion.promote import PromotionResult
    from hpsearch.search.run.finalists import RetrainResult
    from hpsearch.search.run.sync import SyncResult
    from hpsearch.search.services import Services
    from hpsearch.search.spec.spec import Settings, StudySpec
    from hpsearch.search.study.cleanup import Garbage
    from hpsearch.search.study.enqueue import Configurations
    from hpsearch.search.study.steering import BudgetChange
    from hpsearch.search.study.study import StoredStudy
    from hpsearch.search.study.summary import Summary
    from hpsearch.search.worker.options import FleetWorkerOptions, WorkerOptions


class Study:
    """A search in its database. Make one with `create`, or find one with `open`.

    Faults that a user can correct raise SearchError, StorageError or ObjectiveError with a message of one line. The
    keywords `storage_url`, `tracking_uri`, `checkpoint_url` and `home` say where a study is kept; without them the
    environment does (HPSEARCH_STORAGE_URL and so on), and without that it is the embedded stack, which is started.

    Attributes:
        name: name of the study.

    Example:
        from hpsearch import Study

        study = Study.create("wine.py", n_trials=50)
        study.run(workers=4)
        print(study.best_value, study.best_params)
        print(study.train_finalists(top=5, seeds=2).winner)
        study.promote()
    """

    def __init__(self, stored: StoredStudy, services: Services) -> None:
        self.name = stored.spec.name
        self._services = services
        self._storage = stored.storage
        self._is_new = False

    # --- create and open ---

    @classmethod
    def create(
        cls,
        objective: str | type[BaseObjective] | None = None,
        *,
        spec: Mapping[str, Any] | Path | str | None = None,
        enqueue: Configurations | None = None,
        **settings: Unpack[Settings],
    ) -> Study:
        """Create a study, or join the study of that name if its settings agree with the given ones.

        Args:
            objective: digits or another built-in, package.module:Class, my_file.py; or a class in such a file.
            spec: settings by their keys, or a .toml or .yaml file of them; keywords override it.
            enqueue: configurations to run first: see `enqueue_trial`.
            settings: addresses, and settings of the study; a table for a sampler or pruner has its `name` and options.

        Example:
            study = Study.create("wine.py", name="example", n_trials=2, epochs=2)
            assert Study.create(spec={"objective": "wine.py", "name": "example"}).name == study.name
        """
        from hpsearch.search.spec import spec as specs
        from hpsearch.search.spec.settings import check_settings, expand_names, keys_in_errors, read_spec_file

        _require_known(cls.create, settings, specs.Settings.__annotations__)
        given: dict[str, Any] = {key: value for key, value in settings.items() if value is not None}
        where: Any = {key: given.pop(key) for key in Addresses.__annotations__ if key in given}
        with keys_in_errors():
            if spec is not None:
                given = {**(read_spec_file(Path(spec)) if isinstance(spec, str | Path) else spec), **given}
            if objective is not None:
                from hpsearch.search.api.actions import find_objective_reference

                given["objective"] = find_objective_reference(objective)
            given = expand_names(given)
            check_settings(given)

            from hpsearch.search.console import PlainConsole
            from hpsearch.search.services import resolve_addresses
            from hpsearch.search.study.create import begin_search
            from hpsearch.search.tracking.tracker import check_trackers

            addresses = resolve_addresses(where)
            services, stored, created = begin_search(given, addresses, PlainConsole(), enqueue, check=check_trackers)
        study = cls(stored, services)
        study._is_new = created
        return study

    @classmethod
    def open(cls, name: str, *, progress: Callable[[str], None] | None = None, **where: Unpack[Addresses]) -> Study:
        """Open a stored study.

        Args:
            name: name of the study.
            progress: callback for each step of starting services, as text.
            where: addresses.

        Example:
            study = Study.open("example")
        """
        from hpsearch.search.api.opening import open_study

        return cls(*open_study(name, where, progress))

    @classmethod
    def _unsent(cls, name: str | None = None, **where: Unpack[Addresses]) -> list[Study]:
        """Return the studies with records on this machine that were not sent yet, or the study of that name."""
        from hpsearch.search.api.opening import open_services
        from hpsearch.search.run.sync import find_studies_to_sync
        from hpsearch.search.study.study import load_study

        services, storage = open_services(where)
        found = find_studies_to_sync(storage, services.home) if name is None else [load_study(storage, name)]
        return [cls(stored, services) for stored in found]

    # --- run ---

    def run(self, workers: int = 2, **how: Unpack[FleetWorkerOptions]) -> Summary:
        """Run the study with worker processes on this machine until its budget is spent, and show its progress.

        It also returns when the study is stopped from elsewhere. An interrupt (Ctrl-C, a notebook's stop button) ends
        the running epochs, saves, and raises KeyboardInterrupt; call `run` again to continue.

        Args:
            workers: number of processes; 0 only prepares the study.
            how: options of the workers.

        Raises:
            SearchError: the study is stopped, or its workers gave up before the budget was spent.

        Example:
            summary = study.run(workers=1)
            assert summary.finished == 2
        """
        options = self._options(self.run, workers, how)
        from hpsearch.search.console import PlainConsole
        from hpsearch.search.run.search import run_search

        is_new, self._is_new = self._is_new, False
        ran = run_search(self._services, self._stored, options, workers=workers, created=is_new, console=PlainConsole())
        _raise_early_end(interrupted=ran.is_interrupted, gave_up=() if ran.is_finished or ran.stopped else ran.gave_up)
        return ran.summary

    def _options(self, method: Callable[..., Any], workers: int, how: FleetWorkerOptions) -> WorkerOptions:
        """Return the options of a fleet, and load what its workers need while this process loads what it needs."""
        if not isinstance(workers, int) or workers < 0:
            raise SearchError(f"{method.__name__}(workers={workers!r}): give a number of processes, such as workers=2")
        from hpsearch.search.fleet.fork import start_fork_server

        start_fork_server(workers)
        return self._worker_options(method, how)

    def _worker_options(
        self, method: Callable[..., Any], how: FleetWorkerOptions, device: str | None = None
    ) -> WorkerOptions:
        from hpsearch.search.spec.settings import keys_in_errors
        from hpsearch.search.worker import options

        _require_known(method, how, options.FleetWorkerOptions.__annotations__)
        with keys_in_errors():
            return options.WorkerOptions(**self._services.addresses, device=device, **how)

    def run_worker(self, *, device: str | None = None, **how: Unpack[FleetWorkerOptions]) -> Summary:
        """Be a worker of the study, in this process, until its budget is spent or it is stopped.

        It logs at level INFO. An interrupt ends the epoch, saves, releases the trial and raises KeyboardInterrupt; in a
        thread other than the main one only `stop` ends it.

        Args:
            device: device to train on; by default a GPU where there is one.
            how: options of the worker: see `run`.

        Raises:
            SearchError: the objective fails every trial, or the database does not answer.

        Example:
            study.extend("+1")
            assert study.run_worker().finished == 3
        """
        from hpsearch.search import process
        from hpsearch.search.worker.join import run_worker

        if (devices := how.get("devices", 1)) != 1:
            raise SearchError(f"run_worker(devices={devices}): this process is one device: use run(devices={devices})")
        options = self._worker_options(self.run_worker, how, device)
        with process.restore_handlers():
            stop = process.stop_on_signals(kill=process.raise_interrupt)
            process.shield_children()
            code = run_worker(self.name, options, stop)
        why = f"the worker gave up (exit code {code}): see its log, and `describe_trial` of the trials"
        _raise_early_end(interrupted=stop.is_set(), gave_up=() if code in {0, process.EXIT_DRAINED} else (why,))
        return self.summary()

    # --- inspect ---

    @property
    def _stored(self) -> StoredStudy:
        """The study as it is in its database now; `extend` changes its spec."""
        from hpsearch.search.study.study import load_study

        return load_study(self._storage, self.name)

    @property
    def spec(self) -> StudySpec:
        """Every setting of the study.

        Example:
            assert study.spec.epochs == 2
        """
        return self._stored.spec

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials by number, as Optuna's objects.

        Example:
            assert [trial.number for trial in study.trials] == [0, 1, 2]
        """
        return self._storage.get_all_trials(self._stored.study_id, deepcopy=True)

    def trials_dataframe(self) -> pd.DataFrame:
        """Return a row per trial: number, state, value, parameters, epochs, duration, worker, reason.

        With several metrics `value` is that of the first, and each has a column such as ``values_accuracy``. With
        constraints the last column lists those that the trial violates.

        Example:
            frame = study.trials_dataframe()
            assert frame["params_lr"].between(1e-4, 1e-1).all()
        """
        from hpsearch.search.api.actions import make_trials_dataframe

        return make_trials_dataframe(self._stored)

    @property
    def best_trial(self) -> FrozenTrial:
        """The best completed trial that satisfies the constraints, by the first metric.

        The best of many trials has a selection bias: see `train_finalists`.

        Raises:
            SearchError: there is none yet.

        Example:
            assert study.best_trial.value == max(trial.value for trial in study.trials)
        """
        if (best := self.summary().best) is None:
            raise SearchError(f"study {self.name!r} has no completed trial that satisfies its constraints")
        return best

    @property
    def best_params(self) -> dict[str, Any]:
        """The parameters of `best_trial`.

        Example:
            assert 1e-4 <= study.best_params["lr"] <= 1e-1
        """
        return self.best_trial.params

    @property
    def best_value(self) -> float:
        """The value of `best_trial`, by the first metric.

        Example:
            assert study.best_value == study.best_trial.value
        """
        return float(self.best_trial.values[0])

    @property
    def best_trials(self) -> list[FrozenTrial]:
        """The Pareto front of the trials that satisfy the constraints, the best by the first metric first.

        With one metric it is the best trial alone.

        Example:
            assert study.best_trials == [study.best_trial]
        """
        return list(self.summary().front)

    def summary(self) -> Summary:
        """Return the counts of trials, the best trials and the savings by pruning, as they are now.

        Example:
            assert study.summary().failed == 0
        """
        from hpsearch.search.study.summary import summarise

        return summarise(self._stored)

    def describe_trial(self, trial: int) -> str:
        """Return all records of a trial, in lines: parameters, attempts, epochs, and the reason of its end.

        Example:
            print(study.describe_trial(0))
        """
        import io

        from rich.console import Console

        from hpsearch.search.report.show import print_trial

        page = Console(file=io.StringIO(), force_jupyter=False, width=120, markup=False, highlight=False, emoji=False)
        with page.capture() as text:
            print_trial(page, self._stored, trial)
        return text.get()

    @property
    def optuna_study(self) -> optuna.Study:
        """Optuna's own object, for all of Optuna's functions and plots; workers ask for trials, not this object.

        Example:
            assert study.optuna_study.best_trial.number == study.best_trial.number
        """
        return self._stored.open()

    @property
    def urls(self) -> dict[str, str]:
        """The pages of the study that are known: ``dashboard`` (Optuna's) and ``mlflow`` (its run).

        Example:
            assert study.urls.keys() <= {"dashboard", "mlflow"}
        """
        from hpsearch.search.study.summary import get_study_page
        from hpsearch.storage.attributes import RUN_URL

        stored, dashboard = self._stored, self._services.dashboard_url
        found = {
            "dashboard": dashboard and get_study_page(dashboard, stored.study_id),
            "mlflow": stored.attrs.get(RUN_URL),
        }
        return {name: url for name, url in found.items() if url}

    def __repr__(self) -> str:
        return f"Study({self.name!r})"

    def _repr_html_(self) -> str:
        from hpsearch.search.report.show import format_summary

        lines = format_summary(self._stored, self.summary(), dashboard_url=self._services.dashboard_url)
        return f"<pre>{html.escape(chr(10).join(lines))}</pre>"

    # --- steer ---

    def stop(self, *, wait: bool = False) -> str | None:
        """Stop the study on all machines: its workers end their epoch, save, release their trials and exit.

        Args:
            wait: whether to return only when no trial is running any more.

        Returns:
            Who stopped it before, and when; None if it was not stopped.

        Example:
            study.stop(wait=True)
        """
        from hpsearch.search.study.steering import count_running, stop_study

        before = stop_study(self._stored)
        while wait and count_running(self._stored):
            time.sleep(0.5)  # a look; nothing wakes it
        return before

    def start(self) -> str | None:
        """Let a stopped study continue, also one that stopped early; return the reason, or None if it was not stopped.

        Example:
            study.start()
        """
        from hpsearch.search.api.opening import update_mlflow
        from hpsearch.search.study.steering import start_study
        from hpsearch.search.tracking.publish import reopen_study

        stored = self._stored
        before, why = stored.given_up, start_study(stored)
        if before is not None:
            update_mlflow(self._services, stored, lambda tracking: reopen_study(stored, tracking))
        return why

    def extend(
        self,
        n_trials: int | str | None = None,
        *,
        budget_epochs: int | str | None = None,
        budget_seconds: int | str | None = None,
        enqueue: Configurations | None = None,
    ) -> BudgetChange:
        """Change one of the budgets: ``"+50"`` adds fifty, ``50`` is the new total. Running workers follow it.

        Either the configurations of `enqueue` are added too (see `enqueue_trial`), or nothing changes.

        Example:
            assert study.extend("+1").after == 4
        """
        from hpsearch.search.spec.settings import keys_in_errors

        budgets = {"n_trials": n_trials, "budget_epochs": budget_epochs, "budget_seconds": budget_seconds}
        with keys_in_errors():
            return self._extend(budgets, enqueue)

    def _extend(self, budgets: Mapping[str, int | str | None], enqueue: Configurations | None) -> BudgetChange:
        """Change a budget; errors name the flags of the command."""
        from hpsearch.search.api.opening import update_mlflow
        from hpsearch.search.study.steering import extend_study
        from hpsearch.search.tracking.publish import reopen_study

        amounts = {setting: str(amount) for setting, amount in budgets.items() if amount is not None}
        if len(amounts) != 1:
            raise SearchError("extend one budget at a time: --trials, --budget-epochs or --budget-seconds")
        [(setting, amount)] = amounts.items()
        stored = self._stored
        rows = [] if enqueue is None else _rows(stored, enqueue)
        done = extend_study(stored, amount, rows, setting=setting)
        if done.before != done.after:
            update_mlflow(self._services, self._stored, lambda tracking: reopen_study(self._stored, tracking))
        return done

    def enqueue_trial(self, params: Configurations) -> int:
        """Enqueue configurations, which run before new ones and count in the budget.

        A configuration that was enqueued before is not enqueued again. If the study stopped early, a warning says that
        they wait until it is started.

        Args:
            params: parameters by their names, a list of these, or a .csv or .jsonl file; the sampler sets the rest.

        Returns:
            How many were enqueued now.

        Example:
            study.extend("+2")
            assert study.enqueue_trial([{"lr": 0.003, "batch_size": 16}, {"lr": 0.01}]) == 2
            assert study.enqueue_trial({"lr": 0.01}) == 0
        """
        from hpsearch.search.api.opening import warn
        from hpsearch.search.spec.settings import keys_in_errors
        from hpsearch.search.study.enqueue import enqueue, find_stopped_warning

        stored = self._stored
        with keys_in_errors():
            made = enqueue(stored, _rows(stored, params))
        if why := find_stopped_warning(stored):
            warn(why)
        return made

    def retry(self, trial: int, *, from_start: bool = False) -> int | None:
        """Run a failed or infeasible trial again: same number, same parameters, same MLflow run.

        Args:
            trial: its number.
            from_start: whether to ignore its checkpoints.

        Returns:
            The epoch, from 0, after which it resumes; None for the beginning.

        Example:
            try:
                study.retry(0)
            except SearchError as error:
                assert "only a failed or an infeasible trial is tried again" in str(error)
        """
        from hpsearch.search.api.opening import update_mlflow
        from hpsearch.search.study.steering import retry_trial
        from hpsearch.search.tracking.publish import reopen_study, reopen_trial_run

        stored = self._stored
        was, epoch = retry_trial(stored, trial, from_start=from_start)

        def tell(tracking: Any) -> None:
            reopen_trial_run(was, tracking)
            reopen_study(stored, tracking)

        update_mlflow(self._services, stored, tell)
        return epoch

    # --- confirm and promote ---

    def train_finalists(
        self,
        top: int | None = None,
        seeds: int | None = None,
        *,
        workers: int = 2,
        new_set: bool = False,
        infeasible: bool = False,
        **how: Unpack[FleetWorkerOptions],
    ) -> Finalists:
        """Train the best configurations of a finished search again, and return their table with the winner.

        All are trained on the same new seeds, each of which also draws a new train/validation split. A second call
        continues where the first stopped.

        Args:
            top: number of configurations; 5, or as the set has it. With several metrics they are of the Pareto front,
                by default all of it.
            seeds: number of seeds; 2, or as the set has it.
            workers: processes on this machine; 0 only chooses.
            new_set: choose again, with other seeds; an earlier winner stays until these have one.
            infeasible: include trials that violate a constraint.
            how: options of the workers: see `run`.

        Example:
            study.run(workers=1)
            table = study.train_finalists(top=1, seeds=1, workers=1)
            assert table.winner == study.best_trial.number
        """
        ran = self._train_finalists(top, seeds, workers=workers, new_set=new_set, infeasible=infeasible, **how)
        _raise_early_end(interrupted=ran.is_interrupted, gave_up=ran.gave_up if ran.table.pending else ())
        return ran.table

    def _train_finalists(
        self,
        top: int | None,
        seeds: int | None,
        *,
        workers: int,
        new_set: bool = False,
        infeasible: bool = False,
        **how: Unpack[FleetWorkerOptions],
    ) -> RetrainResult[Finalists]:
        """Train the finalists and return how the training ended."""
        options = self._options(self.train_finalists, workers, how)
        from hpsearch.search.console import PlainConsole
        from hpsearch.search.run.finalists import run_finalists

        return run_finalists(
            self._services, self._stored, options,
            top=top, seeds=seeds, new_set=new_set, infeasible=infeasible, workers=workers, console=PlainConsole(),
        )  # fmt: skip

    def evaluate_test(
        self, *, trial: int | None = None, unconfirmed: bool = False, refit: bool = False
    ) -> dict[str, float]:
        """Score the best weights of the finalists' winner on the test set, once in the life of a study.

        There is no confirmation prompt.

        Args:
            trial: another trial than the winner, with `unconfirmed`.
            unconfirmed: open it for a trial that did not win among finalists; the record says so.
            refit: open it for the model that `promote(refit=True)` trained.

        Example:
            scores = study.evaluate_test()
            assert 0 <= scores["accuracy"] <= 1
        """
        from hpsearch.search.api.actions import evaluate_test_set

        return evaluate_test_set(self._services, self._stored, trial=trial, unconfirmed=unconfirmed, refit=refit)

    def promote(  # noqa: PLR0913 a keyword for each option of the command
        self,
        *,
        trial: int | None = None,
        prefer: str | None = None,
        alias: str = "champion",
        model: str | None = None,
        infeasible: bool = False,
        refit: bool = False,
        seeds: int | None = None,
        workers: int = 2,
        **how: Unpack[FleetWorkerOptions],
    ) -> PromotionResult:
        """Register a trial's model in MLflow with its evidence, and set an alias to it.

        Args:
            trial: by default the finalists' winner, else the best; with several metrics the trial that dominates all
                others.
            prefer: choice of a trial of the Pareto front, such as ``accuracy >= 0.98 then latency_ms``.
            alias: alias of this version; the version that had it becomes ``previous``.
            model: name of the registered model, by default the study's.
            infeasible: promote the trial though it violates a constraint.
            refit: train the winner on train and validation, for the epochs that its fresh runs chose, and promote the
                run of the median training loss. A second call continues where the first stopped.
            seeds: number of runs of the refit, odd; 3, or as the refit has it.
            workers: processes on this machine for the refit.
            how: options of the workers: see `run`.

        Example:
            assert study.promote().alias == "champion"
            assert study.promote(alias="refitted", refit=True, seeds=1, workers=1).trial == 0
        """
        from hpsearch.search.promotion.promote import resolve_trial

        trial = resolve_trial(self._stored, trial, prefer, infeasible=infeasible)
        if refit:
            ran = self._train_refit(trial=trial, seeds=seeds, workers=workers, **how)
            _raise_early_end(interrupted=ran.is_interrupted, gave_up=ran.gave_up if ran.table.pending else ())
        return self._promote(trial=trial, alias=alias, model=model, infeasible=infeasible, refit=refit)

    def _train_refit(
        self, *, trial: int | None, seeds: int | None, workers: int, **how: Unpack[FleetWorkerOptions]
    ) -> RetrainResult[Refit]:
        """Train the finalists' winner on train and validation, and return how the training ended."""
        options = self._options(self.promote, workers, how)
        from hpsearch.search.console import PlainConsole
        from hpsearch.search.run.finalists import run_refit

        return run_refit(
            self._services, self._stored, options, trial=trial, seeds=seeds, workers=workers, console=PlainConsole()
        )

    def _promote(
        self, *, trial: int | None, alias: str, model: str | None, infeasible: bool, refit: bool
    ) -> PromotionResult:
        """Promote a trial, or a refit that was trained."""
        from hpsearch.search.promotion.promote import promote
        from hpsearch.search.study.study import open_study_tracking
        from hpsearch.search.study.summary import summarise
        from hpsearch.search.tracking.publish import write_note

        stored = self._stored
        tracking = open_study_tracking(self._services, stored)
        done = promote(stored, tracking, trial=trial, refit=refit, alias=alias, model=model, infeasible=infeasible)
        write_note(stored, summarise(stored))
        return done

    # --- report and tidy up ---

    def report(self, path: Path | str | None = None) -> Path:
        """Write the study's report, one HTML page, log it to MLflow, and return its path.

        Example:
            assert study.report("example.html").exists()
        """
        from hpsearch.search.api import actions

        report = actions.write(self._services, self._stored, None if path is None else Path(path))
        actions.log(self._services, self._stored, report)
        return report

    def sync(self) -> SyncResult:
        """Send MLflow the records that wait on this machine, and rebuild models of a lost machine; safe to repeat.

        Example:
            assert study.sync().left == 0
        """
        from hpsearch.search.console import PlainConsole
        from hpsearch.search.run.sync import sync_study

        return sync_study(self._services, self._stored, PlainConsole())

    def gc(self, keep_top: int = 5, *, dry_run: bool = True) -> list[Garbage]:
        """Return the surplus models, leftover checkpoints and old run directories of the study.

        Args:
            keep_top: number of best trials whose models stay.
            dry_run: whether to list them only; otherwise they are removed.

        Example:
            assert sum(garbage.size for garbage in study.gc()) > 0
        """
        from hpsearch.search.api.opening import warn
        from hpsearch.search.study.cleanup import remove_garbage

        found, problems = self._garbage(keep_top)
        if not dry_run:
            problems += remove_garbage(found)[1]
        for problem in problems:
            warn(problem)
        return found

    def _garbage(self, keep_top: int) -> tuple[list[Garbage], list[str]]:
        """Return what `gc` removes, and a line for each place that could not be searched."""
        from hpsearch.search.study.cleanup import find_garbage
        from hpsearch.search.study.study import open_study_tracking
        from hpsearch.storage.attributes import RUN_ID

        stored = self._stored
        tracking = open_study_tracking(self._services, stored) if RUN_ID in stored.attrs else None
        return find_garbage(stored, home=self._services.home, tracking=tracking, keep_top=keep_top)


def list_studies(**where: Unpack[Addresses]) -> list[StudyRow]:
    """Return a row per study of a database, by name: counts, best value, promotions.

    Example:
        assert "example" in [row.name for row in list_studies()]
    """
    from hpsearch.search.api import opening

    return opening.list_studies(where)


def delete_study(name: str, **where: Unpack[Addresses]) -> list[str]:
    """Delete a study with its trials, finalists, refits, checkpoints and files on this machine; return their names.

    There is no confirmation prompt. Its runs and models in MLflow stay.

    Example:
        assert delete_study("example") == ["example.finalists", "example.refit", "example"]
    """
    from hpsearch.search.api import actions, opening

    stored, services = opening.open_study(name, where)
    return actions.delete_study(services, stored)


def _rows(stored: StoredStudy, given: Configurations) -> list[FrozenTrial]:
    from hpsearch.objectives.loading import load_objective
    from hpsearch.search.study.enqueue import read_rows

    return read_rows(given, load_objective(stored.spec.objective))


def _require_known(method: Callable[..., Any], given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Reject keywords that a method does not have, such as misspelt ones."""
    for name in sorted(given.keys() - set(known)):
        own = [each.name for each in inspect.signature(method).parameters.values() if each.kind != each.VAR_KEYWORD]
        hint = suggest_names(name, [*own, *known])
        raise SearchError(f"{method.__name__}({name}={given[name]!r}): unknown argument{hint}")


def _raise_early_end(*, interrupted: bool, gave_up: Sequence[str]) -> None:
    """Raise if a run was interrupted, or its workers gave up."""
    if interrupted:
        raise KeyboardInterrupt
    if gave_up:
        raise SearchError(gave_up[0])
