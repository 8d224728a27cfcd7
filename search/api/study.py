"""A study as an object: created or opened, run, steered, looked at, confirmed, promoted."""

from __future__ import annotations

import builtins
import html
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from hpsearch.search.errors import SearchError

if TYPE_CHECKING:
    import optuna
    import pandas as pd
    from optuna.trial import FrozenTrial

    from hpsearch.objectives.objective import BaseObjective
    from hpsearch.search.api.opening import StudyRow
    from hpsearch.search.finalists import Finalists
    from hpsearch.search.promotion.promote import Promoted
    from hpsearch.search.run.finalists import FinalistsRan, RefitRan
    from hpsearch.search.run.search import Ran
    from hpsearch.search.run.sync import Synced
    from hpsearch.search.services import Services
    from hpsearch.search.spec.spec import StudySpec
    from hpsearch.search.study.cleanup import Garbage
    from hpsearch.search.study.steering import Extended
    from hpsearch.search.study.study import StoredStudy
    from hpsearch.search.study.summary import Summary
    from hpsearch.search.worker.options import Addresses, Working


class Study:
    """A search in its database. Make one with `create`, or find one with `open`.

    What a user can mend is raised as SearchError, StorageError or ObjectiveError, in one line; all three are in
    `search`. Where studies are kept is said by `storage_url`, `tracking_uri`, `checkpoint_url` and `home`, else by the
    environment (HPSEARCH_STORAGE_URL and so on), else it is the embedded stack, which is started.

    Attributes:
        name: of the study.
        services: where it is kept.
    """

    def __init__(self, stored: StoredStudy, services: Services, *, checkpoint_url: str | None = None) -> None:
        self.name = stored.spec.name
        self.services = services
        self._storage = stored.storage
        self._checkpoint_url = checkpoint_url
        self._created = False

    # --- made and found ---

    @classmethod
    def create(  # noqa: PLR0913 a keyword for each setting
        cls,
        objective: str | type[BaseObjective],
        *,
        name: str | None = None,
        trials: int | None = None,
        epochs: int | None = None,
        metric: str | None = None,
        direction: str | None = None,
        directions: Mapping[str, str] | None = None,
        constraints: Mapping[str, str] | None = None,
        sampler: str | dict[str, Any] | None = None,
        warm_start: str | builtins.list[str] | None = None,
        pruner: str | dict[str, Any] | None = None,
        seed: int | None = None,
        retries: int | None = None,
        retry_on: builtins.list[str] | None = None,
        timeout: float | None = None,
        budget_epochs: int | None = None,
        budget_seconds: float | None = None,
        stop_when: float | None = None,
        models: str | None = None,
        top_models: int | None = None,
        default_first: bool | None = None,
        tensorboard: Path | str | None = None,
        wandb: str | None = None,
        enqueue: Path | str | None = None,
        **where: Unpack[Addresses],
    ) -> Study:  # a keyword for each setting that `hpsearch run` has as a flag
        """Create a study, or join the one of that name when what is given agrees with it.

        Args:
            objective: digits or another built-in, package.module:Class, my_file.py; or a class that such a file has.
            name, trials, epochs, metric, direction: by default the objective's; trials without a bound where another
                budget is given.
            directions: in place of one metric several, as in ``{"accuracy": "maximize", "latency_ms": "minimize"}``.
            constraints: bounds that a trial's metrics are to keep, as in ``{"model_mb": "<= 10"}``.
            sampler, pruner: a name, or its options too, as in ``{"name": "tpe", "n_startup_trials": 5}``.
            warm_start: names of earlier studies, whose trials inform the sampler curves.
            seed, retries, retry_on, timeout, budget_epochs, budget_seconds, stop_when, models, top_models,
                default_first: as docs/reference/settings.md says.
            tensorboard, wandb: a folder of event files, and a project of Weights & Biases, which are told too.
            enqueue: a .csv or .jsonl file of configurations that are run first.
            where: storage_url, tracking_uri, checkpoint_url, home.

        Example:
            study = Study.create("wine.py", name="example", trials=2, epochs=2)
        """
        from hpsearch.search.api.actions import reference_of

        given = {
            "name": name, "n_trials": trials, "epochs": epochs, "metric": metric, "direction": direction,
            "directions": directions, "constraints": constraints,
            "sampler": sampler, "warm_start": warm_start, "pruner": pruner, "seed": seed, "retries": retries,
            "retry_on": retry_on, "timeout": timeout, "budget_epochs": budget_epochs, "budget_seconds": budget_seconds,
            "stop_when": stop_when, "models": models, "top_models": top_models, "default_first": default_first,
            "tensorboard": None if tensorboard is None else str(tensorboard), "wandb": wandb,
        }  # fmt: skip
        settings = {key: value for key, value in given.items() if value is not None}
        return cls.from_spec({"objective": reference_of(objective), **settings}, enqueue=enqueue, **where)

    @classmethod
    def from_spec(
        cls,
        spec: Mapping[str, Any] | Path | str,
        *,
        tracking_required: bool = False,
        enqueue: Path | str | None = None,
        **where: Unpack[Addresses],
    ) -> Study:
        """Create or join a study by its spec: settings by their keys, or a .toml or .yaml file of them.

        The configurations of the .csv or .jsonl file `enqueue` are run first.

        Example:
            study = Study.from_spec({"objective": "wine.py", "name": "example"})
        """
        from hpsearch.search.spec.settings import check_settings, named, read_spec_file

        settings = read_spec_file(Path(spec)) if isinstance(spec, str | Path) else named(dict(spec))
        check_settings(settings)
        from hpsearch.search.api.opening import Where
        from hpsearch.search.console import PlainConsole
        from hpsearch.search.run.search import begin_search
        from hpsearch.search.worker.options import WorkerOptions

        there = Where.given(where)
        options = WorkerOptions(
            storage_url=there.storage_url,
            tracking_uri=there.tracking_uri,
            checkpoint_url=there.checkpoint_url,
            home=there.home,
            tracking_required=tracking_required,
        )
        services, stored, created = begin_search(
            settings, options, PlainConsole(), None if enqueue is None else Path(enqueue)
        )
        study = cls(stored, services, checkpoint_url=there.checkpoint_url)
        study._created = created
        return study

    @classmethod
    def open(cls, name: str, *, progress: Callable[[str], None] | None = None, **where: Unpack[Addresses]) -> Study:
        """Open a study by its name; `progress` is told what is done where services have to be started.

        Example:
            study = Study.open("example")
        """
        from hpsearch.search.api.opening import Where, open_study

        there = Where.given(where)
        return cls(*open_study(name, there, progress), checkpoint_url=there.checkpoint_url)

    @staticmethod
    def list(**where: Unpack[Addresses]) -> builtins.list[StudyRow]:
        """Return a row for each study of a database, by name: counts, best value, what was promoted.

        Example:
            assert "example" in [row.name for row in Study.list()]
        """
        from hpsearch.search.api.opening import Where, list_studies

        return list_studies(Where.given(where))

    @classmethod
    def waiting(cls, name: str | None = None, **where: Unpack[Addresses]) -> builtins.list[Study]:
        """Return the studies that have something on this machine which MLflow was not told, or the one of that name.

        Example:
            for each in Study.waiting():
                each.sync()
        """
        from hpsearch.search.api.opening import Where, open_services
        from hpsearch.search.run.sync import waiting_studies
        from hpsearch.search.study.study import load_study

        there = Where.given(where)
        services, storage = open_services(there)
        found = waiting_studies(storage, services.home) if name is None else [load_study(storage, name)]
        return [cls(stored, services, checkpoint_url=there.checkpoint_url) for stored in found]

    # --- run ---

    def run(self, workers: int = 2, **how: Unpack[Working]) -> Summary:
        """Run the study with worker processes on this machine until its budget is spent, and show how it goes.

        Stopped from elsewhere it returns as well; an interrupt (Ctrl-C, a notebook's square) ends the running epochs,
        saves, and is raised as KeyboardInterrupt: call it again to go on.

        Args:
            workers: how many processes.
            how: they run: `lease`, `grace`, `save_every`, `stall`, `system_metrics`, as the command's options;
                `devices` that train each trial together, and their `collective_timeout`.

        Raises:
            SearchError: the study is stopped, or its workers gave up before the budget was spent.

        Example:
            summary = study.run(workers=1)
            assert summary.finished == 2
        """
        ran = self.run_fleet(workers, **how)
        _tell_end(interrupted=ran.interrupted, gave_up=() if ran.over or ran.stopped else ran.gave_up)
        return ran.summary

    def run_fleet(self, workers: int, *, tracking_required: bool = False, **how: Unpack[Working]) -> Ran:
        """Do as `run` does, and return how it ended rather than raise it; without workers only make all ready.

        Example:
            assert not study.run_fleet(workers=0).interrupted
        """
        from hpsearch.search.fleet.fork import load_ahead

        load_ahead(workers)  # while this process loads what it needs itself
        from hpsearch.search.console import PlainConsole
        from hpsearch.search.run.search import run_search
        from hpsearch.search.worker.options import WorkerOptions

        options = WorkerOptions(checkpoint_url=self._checkpoint_url, tracking_required=tracking_required, **how)
        created, self._created = self._created, False
        return run_search(self.services, self.stored, options, workers=workers, created=created, console=PlainConsole())

    def work(self, *, device: str | None = None, **how: Unpack[Working]) -> Summary:
        """Be a worker of the study, in this process, until its budget is spent or it is stopped.

        What it does is logged at level INFO. An interrupt ends the epoch, saves, gives the trial back, and is raised;
        in another thread than the main one there is none, and `stop` ends it.

        Args:
            device: to train on; a GPU where there is one, unless given.
            how: it runs: see `run`.

        Raises:
            SearchError: the objective fails every trial, or the database does not answer.

        Example:
            study.extend("+1")
            assert study.work().finished == 3
        """
        from hpsearch.search import process
        from hpsearch.search.worker.join import work_on
        from hpsearch.search.worker.options import WorkerOptions

        if (devices := how.get("devices", 1)) != 1:
            raise SearchError(f"work(devices={devices}): this process is one device: use run(devices={devices})")
        options = WorkerOptions(
            storage_url=self.services.storage_url, tracking_uri=self.services.tracking_uri,
            checkpoint_url=self._checkpoint_url, home=str(self.services.home), device=device, **how,
        )  # fmt: skip
        with process.restore_handlers():
            stop = process.stop_on_signals(kill=process.raise_interrupt)
            process.shield_children()
            code = work_on(self.name, options, stop)
        why = f"the worker gave up (exit code {code}): see its log, and `why` of the trials"
        _tell_end(interrupted=stop.is_set(), gave_up=() if code in {0, process.EXIT_DRAINED} else (why,))
        return self.summary()

    # --- looked at ---

    @property
    def stored(self) -> StoredStudy:
        """The study as it is in its database now: `extend` changes its spec."""
        from hpsearch.search.study.study import load_study

        return load_study(self._storage, self.name)

    @property
    def spec(self) -> StudySpec:
        """Every setting of the study.

        Example:
            assert study.spec.epochs == 2
        """
        return self.stored.spec

    def trials(self) -> builtins.list[FrozenTrial]:
        """Return all trials, by number, as Optuna has them.

        Example:
            assert [trial.number for trial in study.trials()] == [0, 1, 2]
        """
        return self._storage.get_all_trials(self.stored.study_id, deepcopy=True)

    def trials_dataframe(self) -> pd.DataFrame:
        """Return a row for each trial: number, state, value, parameters, epochs, duration, worker, reason.

        Of several metrics `value` is that of the first, and each has a column of its own, such as ``values_accuracy``.
        Where there are constraints, the last column says which a trial breaks.

        Example:
            frame = study.trials_dataframe()
            assert frame["params_lr"].between(1e-4, 1e-1).all()
        """
        from hpsearch.search.api.actions import trials_frame

        return trials_frame(self.stored)

    @property
    def best(self) -> FrozenTrial | None:
        """The best trial that has run to its end within all bounds; None without any. Of several metrics it is the
        best by the first: see `front`. Of many it over-states itself: see `finalists`.

        Example:
            assert study.best.value == max(trial.value for trial in study.trials())
        """
        return self.summary().best

    @property
    def front(self) -> builtins.list[FrozenTrial]:
        """The trials within all bounds that no other dominates, the best by the first metric first.

        Of one metric it is the best trial alone.

        Example:
            assert study.front[0].number == study.best.number
        """
        return list(self.summary().front)

    def summary(self) -> Summary:
        """Return what the study came to so far: counts, the best trial, what pruning saved.

        Example:
            assert study.summary().failed == 0
        """
        from hpsearch.search.study.summary import summarise

        return summarise(self.stored)

    def why(self, trial: int) -> str:
        """Return all there is to know of a trial, in lines: parameters, attempts, epochs, and why it ended as it did.

        Example:
            print(study.why(0))
        """
        import io

        from rich.console import Console

        from hpsearch.search.report.show import print_trial

        page = Console(file=io.StringIO(), force_jupyter=False, width=120, markup=False, highlight=False, emoji=False)
        with page.capture() as text:
            print_trial(page, self.stored, trial)
        return text.get()

    @property
    def optuna_study(self) -> optuna.Study:
        """Optuna's own object, for all that Optuna and its plots can do; trials are handed out by workers, not by it.

        Example:
            assert study.optuna_study.best_trial.number == study.best.number
        """
        return self.stored.open()

    @property
    def dashboard_url(self) -> str | None:
        """The study's page in the Optuna dashboard; None where nobody said where that is."""
        from hpsearch.search.study.summary import study_page

        url = self.services.dashboard_url
        return study_page(url, self.stored.study_id) if url else None

    @property
    def mlflow_url(self) -> str | None:
        """The page of the study's run in MLflow; None before it has one."""
        from hpsearch.storage.attributes import RUN_URL

        return self.stored.attrs.get(RUN_URL)

    def __repr__(self) -> str:
        return f"Study({self.name!r})"

    def _repr_html_(self) -> str:
        from hpsearch.search.report.show import summary_lines

        lines = summary_lines(self.stored, self.summary(), dashboard_url=self.services.dashboard_url)
        return f"<pre>{html.escape(chr(10).join(lines))}</pre>"

    # --- steered ---

    def stop(self, *, wait: bool = False) -> str | None:
        """Stop the study from anywhere: its workers end their epoch, save, give their trials back and leave.

        Args:
            wait: whether to return when no trial is running any more.

        Returns:
            Who had stopped it before, and when; None if it was not stopped.

        Example:
            study.stop(wait=True)
        """
        from hpsearch.search.study.steering import stop_study

        before = stop_study(self.stored)
        while wait and self.running:
            time.sleep(0.5)  # a look; nothing wakes it
        return before

    @property
    def running(self) -> int:
        """How many trials are run by a worker that seems alive."""
        from hpsearch.search.study.steering import running_trials

        return running_trials(self.stored)

    def start(self) -> str | None:
        """Let a study go on that was stopped, or stopped early by itself; return why it was, or None if it was not.

        Example:
            study.start()
        """
        from hpsearch.search.api.opening import tell_mlflow
        from hpsearch.search.study.steering import start_study
        from hpsearch.search.tracking.publish import reopen_study

        before = self.stored.given_up
        why = start_study(self.stored)
        if before is not None:
            tell_mlflow(self.services, self.stored, lambda tracking: reopen_study(self.stored, tracking))
        return why

    def extend(
        self,
        trials: int | str | None = None,
        *,
        budget_epochs: int | str | None = None,
        budget_seconds: int | str | None = None,
        enqueue: Path | str | None = None,
    ) -> Extended:
        """Change one of the budgets: ``"+50"`` is fifty more, ``50`` fifty in all. Workers that run take it up.

        The configurations of the file `enqueue` are enqueued with it, or nothing is changed.

        Example:
            assert study.extend("+1").after == 4
        """
        from hpsearch.search.api.opening import tell_mlflow
        from hpsearch.search.study.steering import extend_study
        from hpsearch.search.tracking.publish import reopen_study

        given = {"n_trials": trials, "budget_epochs": budget_epochs, "budget_seconds": budget_seconds}
        amounts = {setting: str(amount) for setting, amount in given.items() if amount is not None}
        if len(amounts) != 1:
            raise SearchError("extend one budget at a time: --trials, --budget-epochs or --budget-seconds")
        [(setting, amount)] = amounts.items()
        stored = self.stored
        rows = [] if enqueue is None else self._rows(stored, enqueue)
        done = extend_study(stored, amount, rows, setting=setting)
        if done.before != done.after:
            tell_mlflow(self.services, self.stored, lambda tracking: reopen_study(self.stored, tracking))
        return done

    def enqueue(self, path: Path | str) -> int:
        """Enqueue the configurations of a .csv or .jsonl file, which are run before new ones and count in the budget.

        A configuration that was enqueued before is not enqueued again. Where the study stopped early, a warning says
        that they wait until it is started.

        Returns:
            How many were enqueued now.

        Example:
            from pathlib import Path

            Path("more.csv").write_text("lr,batch_size\\n0.003,16\\n0.01,\\n")
            study.extend("+2")
            assert study.enqueue("more.csv") == 2
        """
        from hpsearch.search.api.opening import warn
        from hpsearch.search.study.enqueue import enqueue, waits_in_vain

        stored = self.stored
        made = enqueue(stored, self._rows(stored, path))
        if why := waits_in_vain(stored):
            warn(why)
        return made

    @staticmethod
    def _rows(stored: StoredStudy, path: Path | str) -> builtins.list[FrozenTrial]:
        from hpsearch.objectives.loading import load_objective
        from hpsearch.search.study.enqueue import read_rows

        return read_rows(Path(path), load_objective(stored.spec.objective))

    def retry(self, trial: int, *, from_start: bool = False) -> int | None:
        """Run a failed or infeasible trial again: same number, same parameters, same MLflow run.

        Args:
            trial: its number.
            from_start: whether to forget its checkpoints.

        Returns:
            The epoch, from 0, that it goes on after; None to start anew.

        Example:
            try:
                study.retry(0)
            except SearchError as error:
                assert "only a failed or an infeasible trial is tried again" in str(error)
        """
        from hpsearch.search.api.opening import tell_mlflow
        from hpsearch.search.study.steering import retry_trial
        from hpsearch.search.tracking.publish import reopen_study, reopen_trial_run

        stored = self.stored
        was, epoch = retry_trial(stored, trial, from_start=from_start)

        def tell(tracking: Any) -> None:
            reopen_trial_run(was, tracking)
            reopen_study(stored, tracking)

        tell_mlflow(self.services, stored, tell)
        return epoch

    # --- confirmed and promoted ---

    def finalists(
        self,
        top: int | None = None,
        seeds: int | None = None,
        *,
        workers: int = 2,
        new_set: bool = False,
        infeasible: bool = False,
        **how: Unpack[Working],
    ) -> Finalists:
        """Train the best configurations of a finished search again; one of them wins.

        Each is trained on the same fresh seeds, each of which divides train and validation anew.

        Called again it goes on where it stopped, and returns the table when all is done.

        Args:
            top: how many configurations; 5, or as the set has it. Of several metrics they are of the front, all of it
                unless given.
            seeds: how many seeds; 2, or as the set has it.
            workers: processes on this machine; none only chooses.
            new_set: choose anew, on other seeds; an earlier winner stands until these have one.
            infeasible: take trials too that break a constraint.
            how: the workers run: see `run`.

        Example:
            study.run(workers=1)
            table = study.finalists(top=1, seeds=1, workers=1)
            assert table.winner == study.best.number
        """
        ran = self.train_finalists(top, seeds, workers=workers, new_set=new_set, infeasible=infeasible, **how)
        _tell_end(interrupted=ran.interrupted, gave_up=ran.gave_up if ran.table.pending else ())
        return ran.table

    def train_finalists(
        self,
        top: int | None,
        seeds: int | None,
        *,
        workers: int,
        new_set: bool = False,
        infeasible: bool = False,
        **how: Unpack[Working],
    ) -> FinalistsRan:
        """Do as `finalists` does, and return how it ended rather than raise it.

        Example:
            assert study.train_finalists(1, 1, workers=0).table.pending == 0
        """
        from hpsearch.search.fleet.fork import load_ahead

        load_ahead(workers)
        from hpsearch.search.console import PlainConsole
        from hpsearch.search.run.finalists import run_finalists
        from hpsearch.search.worker.options import WorkerOptions

        options = WorkerOptions(checkpoint_url=self._checkpoint_url, **how)
        return run_finalists(
            self.services, self.stored, options,
            top=top, seeds=seeds, new_set=new_set, infeasible=infeasible, workers=workers, console=PlainConsole(),
        )  # fmt: skip

    def open_test(
        self, *, trial: int | None = None, unconfirmed: bool = False, refit: bool = False
    ) -> dict[str, float]:
        """Score the best weights of the finalists' winner on the test set, which opens once in the life of a study.

        Nobody is asked: the call is the consent.

        Args:
            trial: another one than the winner, with `unconfirmed`.
            unconfirmed: open it for a trial that did not win among finalists; it is marked so.
            refit: open it for what `train_refit` has trained, in place of the winner's own model.

        Example:
            scores = study.open_test()
            assert 0 <= scores["accuracy"] <= 1
        """
        from hpsearch.search.api.actions import open_test_set

        return open_test_set(self.services, self.stored, trial=trial, unconfirmed=unconfirmed, refit=refit)

    def train_refit(
        self, *, trial: int | None = None, seeds: int | None = None, workers: int = 2, **how: Unpack[Working]
    ) -> RefitRan:
        """Train the finalists' winner on train and validation, for the epochs that its fresh runs chose.

        Called again it goes on where it stopped. Of its runs that of the median training loss is taken.

        Args:
            trial: the winner's number, where it is to be made sure of.
            seeds: how many, an odd number; 3, or as the refit has it.
            workers: processes on this machine; none only makes it.
            how: the workers run: see `run`.

        Example:
            assert study.train_refit(seeds=1, workers=1).refit.taken == 0
        """
        from hpsearch.search.fleet.fork import load_ahead

        load_ahead(workers)
        from hpsearch.search.console import PlainConsole
        from hpsearch.search.run.finalists import run_refit
        from hpsearch.search.worker.options import WorkerOptions

        options = WorkerOptions(checkpoint_url=self._checkpoint_url, **how)
        return run_refit(
            self.services, self.stored, options, trial=trial, seeds=seeds, workers=workers, console=PlainConsole()
        )

    def preferred(self, preference: str, *, infeasible: bool = False) -> int:
        """Return the trial of the front that keeps to conditions and is best by a metric, of several metrics.

        It is of the finalists that are still on the front, by their means, where there are any.

        Args:
            preference: such as ``accuracy >= 0.98 then latency_ms``.
            infeasible: whether trials count that break a constraint.

        Example:
            from hpsearch import SearchError

            try:
                study.preferred("accuracy >= 0.5")
            except SearchError as error:  # this study has one metric
                assert "--prefer" in str(error)
        """
        from hpsearch.search.promotion.promote import preferred

        return preferred(self.stored, preference, infeasible=infeasible)

    def promote(
        self,
        *,
        trial: int | None = None,
        alias: str = "champion",
        model: str | None = None,
        refit: bool = False,
        infeasible: bool = False,
    ) -> Promoted:
        """Register a trial's model in MLflow with its evidence, and let an alias name it.

        Args:
            trial: by default the finalists' winner, else the best; of several metrics that which dominates all others.
            alias: of this version; the one that had it becomes previous.
            model: name of the registered model, by default the study's.
            refit: promote what `train_refit` has trained, in place of the winner's own model.
            infeasible: promote the trial though it breaks a constraint.

        Example:
            assert study.promote().alias == "champion"
            assert study.promote(alias="refitted", refit=True).trial == 0
        """
        from hpsearch.search.promotion.promote import promote, promote_refit
        from hpsearch.search.study.study import tracking_of
        from hpsearch.search.study.summary import summarise
        from hpsearch.search.tracking.publish import write_note

        stored = self.stored
        tracking = tracking_of(self.services, stored)
        if refit:
            done = promote_refit(stored, tracking, trial=trial, alias=alias, model=model)
        else:
            done = promote(stored, tracking, trial=trial, alias=alias, model=model, infeasible=infeasible)
        write_note(stored, summarise(stored))
        return done

    # --- reported and tidied ---

    def report(self, path: Path | str | None = None) -> Path:
        """Write the study's report, one HTML page, log it to MLflow, and return where it is.

        Example:
            assert study.report("example.html").exists()
        """
        from hpsearch.search.api import actions

        report = actions.write(self.services, self.stored, None if path is None else Path(path))
        actions.log(self.services, self.stored, report)
        return report

    def sync(self) -> Synced:
        """Send MLflow what was logged while it was away, and models that a lost machine still had; safe to repeat.

        Example:
            assert study.sync().left == 0
        """
        from hpsearch.search.console import PlainConsole
        from hpsearch.search.run.sync import sync_study

        return sync_study(self.services, self.stored, self._checkpoint_url, PlainConsole())

    def gc(self, keep_top: int = 5, *, dry_run: bool = True) -> builtins.list[Garbage]:
        """Return what of the study can go: surplus models, leftover checkpoints, old run directories.

        Args:
            keep_top: how many of the best trials keep their models.
            dry_run: only look; else it is removed, and what is returned has gone.

        Example:
            assert sum(garbage.size for garbage in study.gc()) > 0
        """
        from hpsearch.search.api.opening import warn
        from hpsearch.search.study.cleanup import remove_garbage

        found, problems = self.garbage(keep_top)
        if not dry_run:
            problems += remove_garbage(found)[1]
        for problem in problems:
            warn(problem)
        return found

    def garbage(self, keep_top: int = 5) -> tuple[builtins.list[Garbage], builtins.list[str]]:
        """Return what of the study can go, and a line for each place that could not be looked at.

        Example:
            found, problems = study.garbage()
        """
        from hpsearch.search.study.cleanup import find_garbage
        from hpsearch.search.study.study import tracking_of
        from hpsearch.storage.attributes import RUN_ID

        stored = self.stored
        tracking = tracking_of(self.services, stored) if RUN_ID in stored.attrs else None
        return find_garbage(stored, home=self.services.home, tracking=tracking, keep_top=keep_top)

    def delete(self) -> builtins.list[str]:
        """Delete the study with its trials, finalists, refits, checkpoints and files here; return their names.

        Nobody is asked. What is in MLflow stays.

        Example:
            assert study.delete() == ["example.finalists", "example.refit", "example"]
        """
        from hpsearch.search.api.actions import delete_study

        return delete_study(self.services, self.stored, self._checkpoint_url)


def _tell_end(*, interrupted: bool, gave_up: tuple[str, ...]) -> None:
    """Raise where what was run did not come to its end."""
    if interrupted:
        raise KeyboardInterrupt
    if gave_up:
        raise SearchError(gave_up[0])
