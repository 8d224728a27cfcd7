"""`Study`: the Python interface to a search, from its creation to the promotion of its winner."""

from __future__ import annotations

import html
import inspect
import multiprocessing
import sys
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

    from hpsearch.objectives.base_objective import BaseObjective
    from hpsearch.search.finalists import Finalists
    from hpsearch.search.finalists.refit import Refit
    from hpsearch.search.promotion.promote import PromotionResult
    from hpsearch.search.run.finalists import RetrainResult
    from hpsearch.search.run.sync import SyncResult
    from hpsearch.search.services import Services
    from hpsearch.search.spec.spec import Settings, StudySpec
    from hpsearch.search.study.cleanup import Garbage
    from hpsearch.search.study.control import BudgetChange
    from hpsearch.search.study.enqueue import Configurations
    from hpsearch.search.study.study import StoredStudy
    from hpsearch.search.study.summary import Summary
    from hpsearch.search.worker.options import FleetWorkerOptions, WorkerOptions


class Study:
    """A search that is stored in a database. `create` creates or joins a study; `open` opens an existing study.

    Errors that a user can correct are SearchError, StorageError or ObjectiveError, with a message of one line. The
    keywords `storage_url`, `tracking_uri`, `checkpoint_url` and `home` are the addresses of the services. Their
    defaults are the environment variables (HPSEARCH_STORAGE_URL and so on). If neither is set, the embedded services
    start.

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
        self._loaded: BaseObjective | None = None

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
        """Create a study, or join the stored study of the same name if its settings agree with the given settings.

        Args:
            objective: a built-in objective such as digits, package.module:Class, my_file.py, or a class in a file.
            spec: a dictionary of settings, or a .toml or .yaml file with settings; keyword arguments override `spec`.
            enqueue: configurations to run first, as in `enqueue_trial`.
            settings: addresses of the services, and settings of the study. A dictionary for `sampler` or `pruner` has
                the key `name` and the options.

        Example:
            study = Study.create("wine.py", name="example", n_trials=2, epochs=2)
            assert Study.create(spec={"objective": "wine.py", "name": "example"}).name == study.name
        """
        from hpsearch.objectives.loading import require_no_import
        from hpsearch.search.spec import spec as specs
        from hpsearch.search.spec.resolve import check_settings, convert_names_to_tables, replace_flags_in_errors
        from hpsearch.search.spec.spec_file import read_spec_file

        require_no_import("Study.create")
        _require_known(cls.create, settings, specs.Settings.__annotations__)
        given: dict[str, Any] = {key: value for key, value in settings.items() if value is not None}
        where: Any = {key: given.pop(key) for key in Addresses.__annotations__ if key in given}
        with replace_flags_in_errors():
            if spec is not None:
                if not isinstance(spec, Mapping | Path | str):
                    raise SearchError(f"spec={spec!r} is invalid; give a dictionary of settings, or a file")
                given = {**(read_spec_file(Path(spec)) if isinstance(spec, str | Path) else spec), **given}
            if objective is not None:
                from hpsearch.search.api.actions import find_objective_reference

                given["objective"] = find_objective_reference(objective)
            given = convert_names_to_tables(given)
            check_settings(given)

            from hpsearch.search.console import PlainConsole
            from hpsearch.search.services import resolve_addresses
            from hpsearch.search.study.create import begin_search
            from hpsearch.search.tracking.tracker import check_trackers

            addresses = resolve_addresses(where)
            begun = begin_search(given, addresses, PlainConsole(outlives_pipe=True), enqueue, check=check_trackers)
        study = cls(begun.study, begun.services)
        study._is_new, study._loaded = begun.is_new, begun.objective
        return study

    @classmethod
    def open(cls, name: str, *, progress: Callable[[str], None] | None = None, **where: Unpack[Addresses]) -> Study:
        """Open a stored study.

        Args:
            name: name of the study.
            progress: function that is called with a text for each step of starting the services. None prints steps of
                more than two seconds on stderr.
            where: addresses of the services.

        Example:
            study = Study.open("example")
        """
        from hpsearch.search.api.opening import open_study

        return cls(*open_study(name, where, progress))

    @classmethod
    def _unsent(cls, name: str | None = None, **where: Unpack[Addresses]) -> list[Study]:
        """Return the study `name`; if None, return all studies with unsent records on this machine."""
        from hpsearch.search.api.opening import open_services
        from hpsearch.search.run.sync import find_studies_to_sync
        from hpsearch.search.study.study import load_study

        services, storage = open_services(where)
        found = find_studies_to_sync(storage, services.home) if name is None else [load_study(storage, name)]
        return [cls(stored, services) for stored in found]

    # --- run ---

    def run(self, workers: int = 2, **how: Unpack[FleetWorkerOptions]) -> Summary:
        """Run the study with worker processes on this machine until its budget is spent, and show its progress.

        The method also returns when another process stops the study. After an interrupt (Ctrl-C, or the stop button of
        a notebook), the workers finish their epoch and save a checkpoint, and the method raises KeyboardInterrupt. Call
        `run` again to resume the study.

        Args:
            workers: number of processes; 0 only prepares the study.
            how: options of the workers.

        Raises:
            SearchError: the study was already stopped, or its workers gave up before the budget was spent.

        Example:
            summary = study.run(workers=1)
            assert summary.finished == 2
        """
        options = self._options(self.run, workers, how)
        from hpsearch.search.console import PlainConsole
        from hpsearch.search.run.search import run_search

        is_new, self._is_new = self._is_new, False
        loaded, self._loaded = self._loaded, None  # it keeps the prepared data in memory
        ran = run_search(
            self._services,
            self._stored,
            options,
            workers=workers,
            created=is_new,
            console=PlainConsole(outlives_pipe=True),
            loaded=loaded,
        )
        _raise_early_end(interrupted=ran.is_interrupted, gave_up=() if ran.is_finished or ran.stopped else ran.gave_up)
        return ran.summary

    def _options(self, method: Callable[..., Any], workers: int, how: FleetWorkerOptions) -> WorkerOptions:
        """Return the options of a fleet's workers; start the fork server, which imports modules in the background."""
        from hpsearch.search.worker.options import MAX_LOCAL_WORKERS

        if isinstance(workers, bool) or not isinstance(workers, int) or not 0 <= workers <= MAX_LOCAL_WORKERS:
            raise SearchError(
                f"{method.__name__}(workers={workers!r}) is invalid; give a number from 0 to {MAX_LOCAL_WORKERS}"
            )
        from hpsearch.search.fleet.fork_server import can_fork, start_fork_server

        if workers and can_fork() and multiprocessing.current_process().daemon:
            raise SearchError(
                f"Study.{method.__name__} cannot start workers, because this process is daemonic; start the process "
                "with daemon=False, or call Study.run_worker"
            )
        if workers and not sys.executable:  # an embedded interpreter
            raise SearchError(
                f"Study.{method.__name__} cannot start workers, because sys.executable is {sys.executable!r}; set it "
                "to the path of Python, or call Study.run_worker"
            )
        start_fork_server(workers)
        return self._parse(method, how)

    def _parse(self, method: Callable[..., Any], how: FleetWorkerOptions, device: str | None = None) -> WorkerOptions:
        from hpsearch.objectives.loading import require_no_import
        from hpsearch.search.spec.resolve import replace_flags_in_errors
        from hpsearch.search.worker import options

        require_no_import(f"Study.{method.__name__}")
        _require_known(method, how, options.FleetWorkerOptions.__annotations__)
        with replace_flags_in_errors():
            return options.WorkerOptions(**self._services.addresses, device=device, **how)

    def run_worker(self, *, device: str | None = None, **how: Unpack[FleetWorkerOptions]) -> Summary:
        """Run a worker of the study in this process until the budget is spent or the study is stopped.

        The worker logs at level INFO. After an interrupt, the worker finishes its epoch, saves a checkpoint, releases
        the trial and raises KeyboardInterrupt. Outside the main thread, signals have no effect, and only `stop` ends
        the worker.

        Args:
            device: device to train on; None selects a GPU if there is one, else the CPU.
            how: options of the worker, as in `run`.

        Raises:
            SearchError: every trial failed, or the database does not answer.

        Example:
            study.extend("+1")
            assert study.run_worker().finished == 3
        """
        from hpsearch.search.process.children import shield_children
        from hpsearch.search.process.exits import EXIT_DONE, EXIT_DRAINED
        from hpsearch.search.process.signals import raise_interrupt, restore_handlers, stop_on_signals
        from hpsearch.search.worker.lifecycle import run_worker

        if (devices := how.get("devices", 1)) != 1:
            raise SearchError(f"run_worker(devices={devices}) is not available; call run(devices={devices}) instead")
        options = self._parse(self.run_worker, how, device)
        with restore_handlers():
            stop = stop_on_signals(kill=raise_interrupt)
            shield_children()
            code = run_worker(self.name, options, stop)
        reason = f"the worker gave up (exit code {code}); see its log, and call describe_trial(N) for failed trials"
        _raise_early_end(interrupted=stop.is_set(), gave_up=() if code in {EXIT_DONE, EXIT_DRAINED} else (reason,))
        return self.summary()

    # --- inspect ---

    @property
    def _stored(self) -> StoredStudy:
        """The stored study, read from the database at each access, because `extend` changes the spec."""
        from hpsearch.search.study.study import load_study

        return load_study(self._storage, self.name)

    @property
    def spec(self) -> StudySpec:
        """The settings of the study.

        Example:
            assert study.spec.epochs == 2
        """
        return self._stored.spec

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials as Optuna's FrozenTrial, in the order of their numbers.

        Example:
            assert [trial.number for trial in study.trials] == [0, 1, 2]
        """
        return self._storage.get_all_trials(self._stored.study_id, deepcopy=True)

    def trials_dataframe(self) -> pd.DataFrame:
        """Return a DataFrame with a row per trial: number, state, value, parameters, epochs, duration, worker, reason.

        In a multi-objective study, the column `value` has the first metric, and each metric has its own column, such as
        ``values_accuracy``. In a study with constraints, the last column lists the violated constraints.

        Example:
            frame = study.trials_dataframe()
            assert frame["params_lr"].between(1e-4, 1e-1).all()
        """
        from hpsearch.search.report.dataframes import make_trials_dataframe

        return make_trials_dataframe(self._stored)

    @property
    def best_trial(self) -> FrozenTrial:
        """The best feasible COMPLETE trial by the first metric.

        The value of the best of many trials has selection bias; `train_finalists` measures this bias.

        Raises:
            SearchError: no trial is feasible and COMPLETE yet.

        Example:
            assert study.best_trial.value == max(trial.value for trial in study.trials)
        """
        if (best := self.summary().best) is None:
            raise SearchError(f"study {self.name!r} has no complete feasible trial yet; run more trials")
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
        """The Pareto front, best value of the first metric first; in a single-objective study, only the best trial.

        Example:
            assert study.best_trials == [study.best_trial]
        """
        return list(self.summary().front)

    def summary(self) -> Summary:
        """Return the current counts of trials, the best trials, and the epochs that pruning saved.

        Example:
            assert study.summary().failed == 0
        """
        from hpsearch.search.study.summary import summarise

        return summarise(self._stored)

    def describe_trial(self, trial: int) -> str:
        """Return all records of a trial as text: parameters, attempts, epochs, and the reason why the trial ended.

        Example:
            print(study.describe_trial(0))
        """
        import io

        from hpsearch.search.console import PlainConsole
        from hpsearch.search.report.show_trial import print_trial

        page = PlainConsole(file=io.StringIO(), force_jupyter=False, width=120, soft_wrap=False)
        with page.capture() as text:
            print_trial(page, self._stored, trial)
        return text.get()

    @property
    def optuna_study(self) -> optuna.Study:
        """Optuna's study object, for Optuna's functions and plots. Only workers run trials; do not call its `optimize`.

        Example:
            assert study.optuna_study.best_trial.number == study.best_trial.number
        """
        return self._stored.open()

    @property
    def urls(self) -> dict[str, str]:
        """The known URLs of the study's pages: ``dashboard`` (Optuna dashboard) and ``mlflow`` (MLflow run).

        Example:
            assert study.urls.keys() <= {"dashboard", "mlflow"}
        """
        from hpsearch.search.study.summary import get_study_page
        from hpsearch.storage.attributes import RUN_URL
        from hpsearch.storage.display import find_link

        stored, dashboard = self._stored, self._services.dashboard_url
        page = dashboard and get_study_page(dashboard, stored.study_id)
        found = {"dashboard": page, "mlflow": find_link(stored.attrs.get(RUN_URL))}
        return {name: url for name, url in found.items() if url}

    def __repr__(self) -> str:
        return f"Study({self.name!r})"

    def _repr_html_(self) -> str:
        from hpsearch.search.report.show import format_summary
        from hpsearch.storage.display import escape_controls

        lines = format_summary(self._stored, self.summary(), dashboard_url=self._services.dashboard_url)
        return f"<pre>{html.escape(escape_controls(chr(10).join(lines)))}</pre>"

    # --- steer ---

    def stop(self, *, wait: bool = False) -> str | None:
        """Stop the study on all machines. Workers finish their epoch, save checkpoints, release their trials and exit.

        Args:
            wait: whether to wait until no trial is running.

        Returns:
            User and time of an earlier stop; None if the study was not stopped before.

        Example:
            study.stop(wait=True)
        """
        from hpsearch.search.study.control import count_running, stop_study

        before = stop_study(self._stored)
        while wait and count_running(self._stored):
            time.sleep(0.5)
        return before

    def start(self) -> str | None:
        """Start a study that was stopped or terminated early.

        Returns:
            User and time of the stop, the reason of the early termination, or both; None if the study was not stopped.

        Example:
            study.start()
        """
        from hpsearch.search.api.opening import publish_change
        from hpsearch.search.study.control import start_study
        from hpsearch.search.tracking.study_run import reopen_study

        stored = self._stored
        early_stop, reason = stored.early_stop, start_study(stored)
        if early_stop is not None:
            publish_change(self._services, stored, lambda tracking: reopen_study(stored, tracking))
        return reason

    def extend(
        self,
        n_trials: int | str | None = None,
        *,
        budget_epochs: int | str | None = None,
        budget_seconds: int | str | None = None,
        enqueue: Configurations | None = None,
    ) -> BudgetChange:
        """Change one of the budgets. ``"+50"`` adds fifty; ``50`` is the new total. Running workers use the new budget.

        The configurations of `enqueue` (see `enqueue_trial`) are added in the same transaction.

        Example:
            assert study.extend("+1").new_budget == 4
        """
        from hpsearch.search.spec.resolve import replace_flags_in_errors

        budgets = {"n_trials": n_trials, "budget_epochs": budget_epochs, "budget_seconds": budget_seconds}
        with replace_flags_in_errors():
            return self._extend(budgets, enqueue)

    def _extend(self, budgets: Mapping[str, int | str | None], enqueue: Configurations | None) -> BudgetChange:
        """Change a budget. Error messages name the flags of the `extend` command."""
        from hpsearch.search.api.opening import publish_change
        from hpsearch.search.study.control import extend_study
        from hpsearch.search.tracking.study_run import reopen_study

        amounts = {setting: str(amount) for setting, amount in budgets.items() if amount is not None}
        if len(amounts) != 1:
            raise SearchError("give exactly one budget: --trials, --budget-epochs or --budget-seconds")
        [(setting, amount)] = amounts.items()
        stored = self._stored
        rows = [] if enqueue is None else _rows(stored, enqueue)
        done = extend_study(stored, amount, rows, setting=setting)
        if done.old_budget != done.new_budget or done.enqueued_trials:
            publish_change(self._services, self._stored, lambda tracking: reopen_study(self._stored, tracking))
        return done

    def enqueue_trial(self, params: Configurations) -> int:
        """Enqueue configurations. They run before sampled configurations and count toward the budget.

        A configuration that was enqueued before is not enqueued again. If the study terminated early, a warning is
        printed, because the configurations wait until `start` is called.

        Args:
            params: a dictionary of parameters, a list of dictionaries, or a .csv or .jsonl file. The sampler suggests
                the missing parameters.

        Returns:
            The number of newly enqueued configurations.

        Example:
            study.extend("+2")
            assert study.enqueue_trial([{"lr": 0.003, "batch_size": 16}, {"lr": 0.01}]) == 2
            assert study.enqueue_trial({"lr": 0.01}) == 0
        """
        from hpsearch.search.api.opening import print_warning
        from hpsearch.search.spec.resolve import replace_flags_in_errors
        from hpsearch.search.study.enqueue import enqueue, find_stopped_warning

        stored = self._stored
        with replace_flags_in_errors():
            made = enqueue(stored, _rows(stored, params))
        if warning := find_stopped_warning(stored):
            print_warning(warning)
        return made

    def retry(self, trial: int, *, from_start: bool = False) -> int | None:
        """Run a failed or infeasible trial again, with the same number, parameters and MLflow run.

        Args:
            trial: number of the trial.
            from_start: whether to discard the trial's checkpoints.

        Returns:
            The epoch, counted from 0, after which the trial resumes; None if the trial starts from scratch.

        Example:
            try:
                study.retry(0)
            except SearchError as error:
                assert "only failed and infeasible trials can be retried" in str(error)
        """
        from hpsearch.search.api.opening import publish_change
        from hpsearch.search.study.control import retry_trial
        from hpsearch.search.tracking.study_run import reopen_study, reopen_trial_run

        stored = self._stored
        before, epoch = retry_trial(stored, trial, from_start=from_start)

        def reopen_runs(tracking: Any) -> None:
            reopen_trial_run(before, tracking)
            reopen_study(stored, tracking)

        publish_change(self._services, stored, reopen_runs)
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
        """Retrain the best configurations of a finished search, and return the table of results with the winner.

        All configurations are trained on the same new seeds, and each seed has a new train/validation split. A second
        call continues the existing set of finalists.

        Args:
            top: number of configurations. None uses the number of the existing set; for a new set, None selects 5
                configurations, or in a multi-objective study all configurations of the Pareto front.
            seeds: number of seeds. None uses the number of the existing set, or 2 for a new set.
            workers: number of processes on this machine; 0 only chooses the finalists.
            new_set: whether to choose a new set of finalists on other seeds. The earlier winner remains the winner
                until the new set has one.
            infeasible: whether to include trials that violate a constraint.
            how: options of the workers, as in `run`.

        Example:
            study.run(workers=1)
            table = study.train_finalists(top=1, seeds=1, workers=1)
            assert table.winner == study.best_trial.number
        """
        ran = self._train_finalists(top, seeds, workers=workers, new_set=new_set, infeasible=infeasible, **how)
        _raise_early_end(interrupted=ran.is_interrupted, gave_up=ran.gave_up if ran.result.pending else ())
        return ran.result

    def _train_finalists(
        self,
        top: int | None,
        seeds: int | None,
        *,
        workers: int,
        new_set: bool,
        infeasible: bool,
        **how: Unpack[FleetWorkerOptions],
    ) -> RetrainResult[Finalists]:
        """Train the finalists; return their table, and whether the training was interrupted or workers gave up."""
        options = self._options(self.train_finalists, workers, how)
        from hpsearch.search.run.finalists import run_finalists

        return run_finalists(
            self._services, self._stored, options,
            top=top, seeds=seeds, new_set=new_set, infeasible=infeasible, workers=workers,
        )  # fmt: skip

    def evaluate_test(
        self, *, trial: int | None = None, unconfirmed: bool = False, refit: bool = False
    ) -> dict[str, float]:
        """Score the best weights of the finalists' winner on the test set, once per study, with no confirmation prompt.

        Args:
            trial: number of the trial; None selects the winner, or the best trial if `unconfirmed`.
            unconfirmed: whether to accept a trial that did not win among finalists; the result is marked as
                unconfirmed.
            refit: whether to evaluate the model that `promote(refit=True)` trained.

        Returns:
            The loss and metrics on the test set.

        Example:
            scores = study.evaluate_test()
            assert 0 <= scores["accuracy"] <= 1
        """
        from hpsearch.search.api.evaluation import evaluate_test_set

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
        """Register a trial's model in MLflow with the evidence for its score, and set the alias of the model version.

        Args:
            trial: number of the trial. None selects the winner of the finalists; without finalists, None selects the
                best trial, or in a multi-objective study the trial that dominates all other trials.
            prefer: preference that selects a trial of the Pareto front, such as
                ``accuracy >= 0.98 then latency_ms``.
            alias: alias of the new version; the version that had this alias gets the alias ``previous``.
            model: name of the registered model; None uses the study's name.
            infeasible: whether to accept a trial that violates a constraint.
            refit: whether to train the winner's configuration on training and validation data together, and to promote
                the run with the median training loss. The number of epochs is the median of the best epochs of the
                winner's runs on new seeds. A second call continues the existing refit.
            seeds: odd number of refit runs. None uses the number of the existing refit, or 3 for a new refit.
            workers: number of processes on this machine for the refit.
            how: options of the workers, as in `run`.

        Example:
            assert study.promote().alias == "champion"
            assert study.promote(alias="refitted", refit=True, seeds=1, workers=1).trial == 0
        """
        from hpsearch.search.promotion.promote import resolve_trial
        from hpsearch.search.worker.options import FleetWorkerOptions

        _require_known(self.promote, how, FleetWorkerOptions.__annotations__)
        trial = resolve_trial(self._stored, trial, prefer, infeasible=infeasible)
        if refit:
            ran = self._train_refit(trial=trial, seeds=seeds, workers=workers, **how)
            _raise_early_end(interrupted=ran.is_interrupted, gave_up=ran.gave_up if ran.result.pending else ())
        return self._promote(trial=trial, alias=alias, model=model, infeasible=infeasible, refit=refit)

    def _train_refit(
        self, *, trial: int | None, seeds: int | None, workers: int, **how: Unpack[FleetWorkerOptions]
    ) -> RetrainResult[Refit]:
        """Train the refit of the winner; return the refit, and whether training was interrupted or workers gave up."""
        options = self._options(self.promote, workers, how)
        from hpsearch.search.run.finalists import run_refit

        return run_refit(self._services, self._stored, options, trial=trial, seeds=seeds, workers=workers)

    def _promote(
        self, *, trial: int | None, alias: str, model: str | None, infeasible: bool, refit: bool
    ) -> PromotionResult:
        """Promote a trial; with `refit`, promote the selected run of the existing refit."""
        from hpsearch.search.api.opening import publish_change
        from hpsearch.search.promotion.promote import promote
        from hpsearch.search.study.study_tracking import open_study_tracking
        from hpsearch.search.study.summary import summarise
        from hpsearch.search.tracking.study_run import write_note

        stored = self._stored
        tracking = open_study_tracking(self._services, stored)
        done = promote(stored, tracking, trial=trial, refit=refit, alias=alias, model=model, infeasible=infeasible)
        publish_change(self._services, stored, lambda _: write_note(stored, summarise(stored)))
        return done

    # --- report and tidy up ---

    def report(self, path: Path | str | None = None) -> Path:
        """Write the study's report as an HTML page, log it to MLflow, and return its path.

        Example:
            assert study.report("example.html").exists()
        """
        from hpsearch.search.api import actions

        report = actions.write_study_report(self._services, self._stored, None if path is None else Path(path))
        actions.log_study_report(self._services, self._stored, report)
        return report

    def sync(self) -> SyncResult:
        """Send the records in this machine's outbox, and rebuild missing models of lost machines' trials. Idempotent.

        Example:
            assert study.sync().unsent == 0
        """
        from hpsearch.search.console import PlainConsole
        from hpsearch.search.run.sync import sync_study

        return sync_study(self._services, self._stored, PlainConsole())

    def gc(self, keep_top: int = 5, *, dry_run: bool = True) -> list[Garbage]:
        """List or remove the study's surplus models, leftover checkpoints and old run directories, and return the list.

        Args:
            keep_top: number of best trials that keep their models, at least 1.
            dry_run: True only lists the files; False removes them.

        Raises:
            SearchError: `keep_top` is no positive integer.

        Example:
            assert sum(garbage.size for garbage in study.gc()) > 0
        """
        from hpsearch.search.api.opening import print_warning
        from hpsearch.search.study.cleanup import remove_garbage

        if not isinstance(keep_top, int) or keep_top < 1:
            raise SearchError(f"gc(keep_top={keep_top!r}) is invalid; give a number such as keep_top=5")
        found, problems = self._garbage(keep_top)
        if not dry_run:
            problems += remove_garbage(found)[1]
        for problem in problems:
            print_warning(f"study {problem}")
        return found

    def _garbage(self, keep_top: int) -> tuple[list[Garbage], list[str]]:
        """Return the removable files for `gc`, and an error text for each place that could not be searched."""
        from hpsearch.search.study.cleanup import find_garbage
        from hpsearch.search.study.study_tracking import open_study_tracking
        from hpsearch.storage.attributes import RUN_ID

        stored = self._stored
        tracking = open_study_tracking(self._services, stored) if RUN_ID in stored.attrs else None
        return find_garbage(
            stored,
            home=self._services.home,
            tracking=tracking,
            keep_top=keep_top,
            checkpoint_url=self._services.checkpoint_url,
        )


def _rows(stored: StoredStudy, given: Configurations) -> list[FrozenTrial]:
    from hpsearch.search.study.enqueue import read_rows

    return read_rows(given, stored.objective())


def _require_known(method: Callable[..., Any], given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Reject keyword arguments that `method` does not have."""
    for name in sorted(given.keys() - set(known)):
        parameters = inspect.signature(method).parameters.values()
        hint = suggest_names(name, [*(each.name for each in parameters if each.kind != each.VAR_KEYWORD), *known])
        raise SearchError(f"{method.__name__}({name}={given[name]!r}): unknown argument{hint}")


def _raise_early_end(*, interrupted: bool, gave_up: Sequence[str]) -> None:
    """Raise an error if a run was interrupted, or if its workers gave up."""
    if interrupted:
        raise KeyboardInterrupt
    if gave_up:
        raise SearchError(gave_up[0])
