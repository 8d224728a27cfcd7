"""Searches of misbehaving objectives, with signals at random moments: none hangs, and no trial is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil
import pytest
from optuna.trial import TrialState

from hpsearch.storage.embedded.stack import StackInfo
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from hpsearch.storage.web.token import find_token
from tests.faults.harness import Command, Zygote
from tests.hostile.objectives import SIGNALS, Misbehaviour, make_misbehaviour

pytestmark = [pytest.mark.slow, pytest.mark.soak]

TRIALS = 3
DOCUMENTED = {0, 1, 2, 3, 130, 143, -1}  # -1: a command other than `run` has no handler of SIGHUP
COMMANDS = [
    *(["studies"], ["show", "{study}"], ["report", "{study}"], ["sync", "{study}"], ["stop", "{study}"]),
    *(["export", "{study}", "--output", "{index}.csv"], ["gc", "{study}", "--yes"], ["worker", "--study", "{study}"]),
    *(["start", "{study}"], ["objective", "show", "{file}"], ["train", "{file}", "--run-dir", "{index}"], ["doctor"]),
    ["run", "{file}", "--name", "{study}-{index}", "--trials", "2", "--models", "none", "--workers", "0"],
]
USUAL_SECONDS = 6.0
LONGEST_SECONDS = 120.0  # of a search whose signal handlers wait for --grace
LEFT_SECONDS = 10.0


@dataclass
class Arena:
    """Runs searches and collects the violations of the rules."""

    zygote: Zygote
    storage: PostgresStorage
    folder: Path
    environment: dict[str, str]
    violations: list[str] = field(default_factory=list)

    def command(self, arguments: list[str]) -> Command:
        """Start a command."""
        return self.zygote.command(arguments, cwd=self.folder, **self.environment)

    def run(self, number: int, case: Misbehaviour) -> None:
        """Run a search with the signals, then the same command again."""
        name = f"hostile-{id(self)}-{number}"
        file = self.folder / f"hostile_{number}.py"
        file.write_text(case.source)
        arguments = ["run", str(file), "--name", name, "--trials", str(TRIALS), "--sampler", "random"]
        arguments += ["--pruner", "none", "--retries", "1", "--grace", "5", "--models", "none", "--workers", "2"]
        faults = []
        for signals in (case.signals, ()):
            started = time.monotonic()
            command = self.command(arguments)
            for index, signum in enumerate(signals):
                wait = case.moment * USUAL_SECONDS if index == 0 else 0.3
                _sleep_until(lambda: command.poll() is not None, wait)  # noqa: B023 called at once
                if command.poll() is None:
                    with suppress(ProcessLookupError):
                        command.send_signal(signum)
            if not _sleep_until(lambda: command.poll() is not None, LONGEST_SECONDS):  # noqa: B023 as above
                faults.append(f"runs for {time.monotonic() - started:.0f} s")
                command.kill()
            faults += self.find_faults(command, name, is_last=not signals)
            if not signals:
                break
        if faults:
            self.violations.append(f"case {number}, {case}: {'; '.join(faults)}")

    def find_faults(self, command: Command, name: str, *, is_last: bool) -> list[str]:
        code, said = command.wait(), command.log.read_text(errors="replace")
        faults = [] if code in DOCUMENTED else [f"exit code {code}"]
        if "Traceback" in said:
            faults.append(f"a traceback: {said[said.index('Traceback') :][-600:]}")
        if code == 2 and (lines := said.count("\nhpsearch: ") + said.startswith("hpsearch: ")) > 3:
            faults.append(f"{lines} lines of errors")
        home = Path(self.environment["HPSEARCH_HOME"])
        if not _sleep_until(lambda: not list_processes(home, name), LEFT_SECONDS):
            left = list_processes(home, name)
            faults.append(f"left the processes {[process.name() for process in left]}")
            for process in left:
                process.kill()
        with suppress(KeyError):
            trials = self.storage.get_all_trials(self.storage.get_study_id_from_name(name))
            numbers, states = [trial.number for trial in trials], [trial.state for trial in trials]
            if numbers != list(range(len(numbers))) or len(numbers) > TRIALS:
                faults.append(f"trials {numbers}")
            if is_last and code == 0 and (len(numbers) < TRIALS or not all(state.is_finished() for state in states)):
                faults.append(f"exit code 0 with the trials {states}")
            if is_last and code not in {0, 1, 2, 3}:
                faults.append(f"exit code {code} without a signal")
            if is_last and TrialState.RUNNING in states and not faults:
                faults.append(f"left running trials: {states}")
        return faults


def list_processes(home: Path, name: str) -> list[psutil.Process]:
    """Return the living processes that write to the logs of a study, and the programs that its objective started."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_program = process.environ().get("HPSEARCH_HOME") == str(home)
            if is_program or any(file.path.startswith(f"{home}/logs/{name}-") for file in process.open_files()):
                found.append(process)
    return found


def _sleep_until(condition: object, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (is_met := condition()) and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.02)
    return bool(is_met)


@pytest.fixture
def arena(zygote: Zygote, stack: StackInfo, open_folder: Path) -> Iterator[Arena]:
    storage = open_storage(stack.storage_url, application_name="test")
    environment = {"HPSEARCH_STORAGE_URL": stack.storage_url, "HPSEARCH_TRACKING_URI": stack.tracking_uri}
    environment["MLFLOW_TRACKING_TOKEN"] = find_token(stack.tracking_uri) or ""
    environment["HPSEARCH_HOME"] = str(open_folder / "home")
    yield Arena(zygote, storage, open_folder, environment)
    storage.engine.dispose()


@pytest.mark.parametrize(("seed", "number"), [(1, 20), (2, 20), (3, 20)])
def test_misbehaving_searches_follow_the_rules(arena: Arena, seed: int, number: int) -> None:
    random = Random(seed)
    for index in range(number):
        case = make_misbehaviour(random)
        print(f"{index} {case}", flush=True)
        arena.run(index, case)
    assert not arena.violations, "\n".join(arena.violations)


@pytest.mark.parametrize(("seed", "number"), [(1, 60), (2, 60), (3, 60)])
def test_commands_with_signals_follow_the_rules(arena: Arena, seed: int, number: int) -> None:
    """At a random moment, also while the command starts; then the same command succeeds."""
    random, study, file = Random(seed), f"signals-{id(arena)}", arena.folder / "quiet.py"
    file.write_text(Misbehaviour((), (), 0.0).source)
    create = ["run", str(file), "--name", study, "--trials", "2", "--models", "none", "--workers", "1"]
    assert arena.command(create).wait() == 0
    for index in range(number):
        arguments = [part.format(study=study, file=file, index=index) for part in random.choice(COMMANDS)]
        signals, moment = random.choice(SIGNALS), random.random() * random.choice([0.1, 1.0])
        command = arena.command(arguments)
        for wait, signum in zip((moment, 0.05), signals, strict=False):
            _sleep_until(lambda: command.poll() is not None, wait)  # noqa: B023 called at once
            if command.poll() is None:
                with suppress(ProcessLookupError):
                    command.send_signal(signum)
        faults = arena.find_faults(command, study, is_last=False)
        again = arena.command(arguments)
        if again.wait() != 0:
            faults.append(f"exit code {again.wait()} without a signal: {again.log.read_text()[-300:]}")
        if faults:
            arena.violations.append(f"{arguments} {signals} after {moment:.3f} s: {'; '.join(faults)}")
    assert not arena.violations, "\n".join(arena.violations)
