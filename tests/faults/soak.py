"""Random faults while a fleet works: `python tests/faults/soak.py --trials 200 --workers 8 --seed 1`.

It starts a stack of its own and prints what was done and what came of it; it fails when anything was lost.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.faults.breakable import Breakable
from tests.faults.harness import LEASE, Arena, Wire, Worker, Zygote, state_of, wire, zygotes
from tests.faults.invariants import assert_equals_undisturbed, read_promotions
from tests.waiting import wait_for

# Faults with their relative frequencies.
FAULTS = {"kill": 4, "freeze": 3, "terminate": 2, "cut connections": 2, "kill postgres": 1, "mlflow away": 1}

# A worker that starts during an outage of a service exits with 2, and the test starts it again.
CODES = (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM, 1, 2)


@dataclass
class Storm:
    """Inject one of `FAULTS` every `period` seconds, at most `most` times.

    It waits longer while no worker makes progress, as on a machine that is busy with something else.
    """

    arena: Arena
    server: Breakable
    line: Wire
    seed: int
    period: float
    most: int = sys.maxsize
    done: Counter[str] = field(default_factory=Counter)
    later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.next = time.monotonic() + self.period
        self.reported = 0

    def __call__(self, running: list[Worker]) -> None:
        now = time.monotonic()
        for due in [entry for entry in self.later if entry[0] <= now]:
            self.later.remove(due)
            due[1]()
        if now < self.next or self.done.total() >= self.most or (reported := self.arena.log_size()) == self.reported:
            return
        self.next, self.reported = now + self.period, reported
        fault = self.dice.choices(list(FAULTS), list(FAULTS.values()))[0]
        awake = [w for w in running if not w.ended and state_of(w.pid) not in {"T", "Z", ""}]
        if awake and self._do(fault, self.dice.choice(awake)):
            self.done[fault] += 1

    def _do(self, fault: str, worker: Worker) -> bool:
        if fault == "kill":
            worker.send(signal.SIGKILL)
        elif fault == "freeze":
            worker.send(signal.SIGSTOP)
            self._after(self.dice.uniform(0.5, 2.0) * LEASE, lambda: worker.send(signal.SIGCONT))
        elif fault == "terminate":
            worker.send(signal.SIGTERM)
        elif fault == "cut connections":
            self.server.cut()
        elif fault == "kill postgres":
            self.server.kill()
            time.sleep(self.dice.uniform(0.0, 1.0))
            self.server.start()
        elif not self.line.mended.is_set():
            return False
        else:
            self.line.cut()
            self._after(self.dice.uniform(0.2, 1.0), self.line.mend)
        return True

    def _after(self, seconds: float, what: Callable[[], None]) -> None:
        self.later.append((time.monotonic() + seconds, what))

    def calm(self) -> None:
        """Thaw the frozen workers and mend the connections."""
        for _, what in self.later:
            what()


def soak(
    arena: Arena,
    server: Breakable,
    line: Wire,
    undisturbed: list[list[float]],
    *,
    workers: int,
    seed: int,
    period: float,
    most: int = sys.maxsize,
    asha: bool = False,
) -> str:
    """Run the study under random faults, assert that nothing was lost, and return a summary.

    With `asha` trials are paused after their first and second epoch.
    """
    began = time.monotonic()
    settings = "--pruner asha --pruner-option reduction_factor=2" if asha else ""
    arena.create(len(undisturbed), [], retries=1000, settings=settings)
    storm = Storm(arena, server, line, seed, period, most)
    try:
        arena.work(workers, meanwhile=storm, codes=CODES, PACE="0.1")
    finally:
        storm.calm()
    wait_for(lambda: arena.poll_workers() or all(worker.ended for worker in arena.workers), "the last workers to leave")
    # The last worker may have exited while MLflow was unreachable. Its remaining records are on the disk.
    assert "no unsent records are left\n" in arena.run("sync", arena.name)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed, len(undisturbed))
    assert {t.state for t in trials} == ({"COMPLETE", "PRUNED"} if asha else {"COMPLETE"})
    promotions = f", {len(read_promotions(arena.storage_url, arena.name, 2))} promotions" if asha else ""
    ends = Counter(outcome for t in trials for outcome in t.outcomes)
    faults = ", ".join(f"{name} {count}" for name, count in sorted(storm.done.items()))
    return (
        f"seed {seed}: {sum(storm.done.values())} faults ({faults}) in {time.monotonic() - began:.0f} s; "
        f"{len(arena.workers) - 1} workers started; {len(trials)} trials in {sum(ends.values())} attempts "
        f"({', '.join(f'{name} {count}' for name, count in ends.most_common())}){promotions}; lost: 0, doubled: 0, "
        "every value as undisturbed"
    )


def main() -> None:
    """Run the soak test with options from the command line."""
    from hpsearch.search.services import DASHBOARD_COMMAND
    from hpsearch.storage.embedded import stack

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--asha", action="store_true", help="pause trials at rungs, and promote the best")
    parser.add_argument("--period", type=float, default=1.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hpsearch-soak-") as name, ExitStack() as shared:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        zygote = Zygote(shared.enter_context(zygotes(folder / "zygote"))(), folder)
        info = stack.up(folder / "stack", dashboard=DASHBOARD_COMMAND)
        server = Breakable.started(folder / "postgres")
        try:
            path = folder / "undisturbed.json"
            values = zygote.undisturbed(given.trials, path)
            for seed in given.seed:
                with wire(info.tracking_uri) as (line, uri):
                    (folder / str(seed)).mkdir()
                    arena = Arena(zygote, f"soak-{seed}", folder / str(seed), server.url, uri)
                    try:
                        how = {"workers": given.workers, "seed": seed, "period": given.period, "asha": given.asha}
                        print(soak(arena, server, line, values, **how))
                    finally:
                        arena.close()
        finally:
            zygote.close()
            server.server.stop()
            stack.down(folder / "stack")


if __name__ == "__main__":
    main()
