"""Trials of two processes each: one process is killed, frozen, stopped or fails, and the results do not change."""

from __future__ import annotations

import re
import shutil
import signal
import tempfile
import time
from pathlib import Path

import optuna
import psutil
import pytest
import sqlalchemy as sa

from tests.deployment.machine import free_port
from tests.docs.devices import EXAMPLES
from tests.faults.harness import OBJECTIVE, Arena
from tests.faults.invariants import assert_equals_undisturbed, read_trials
from tests.faults.orders import Order
from tests.waiting import wait_for

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("devices")]

AWAY = 1  # the exit code of a worker that lost one of its processes
HANGING = str(Path(__file__).with_name("hanging.py"))
# Seconds of the timeouts in the tests of hangs: heartbeats detect a frozen rank, and only a collective one that waits.
TIMEOUTS = {
    "freeze": (10.0, {"HPSEARCH_COLLECTIVE_TIMEOUT": "10"}),
    "hang": (20.0, {"HPSEARCH_COLLECTIVE_TIMEOUT": "20", "HPSEARCH_BARRIER_TIMEOUT": "20"}),
}
BUSY_SECONDS = 20.0  # for a machine with other work, on top of the 10 s in which the launcher ends the ranks

Values = list[list[float]]


@pytest.fixture(scope="module")
def together() -> dict[int, Values]:
    """Return a cache for the values of trials that two processes trained without faults."""
    return {}


@pytest.fixture(scope="module")
def together_in_parts() -> dict[int, Values]:
    """Return such a cache for trials with sharded checkpoints."""
    return {}


def work(arena: Arena, slots: int = 1, *, codes: tuple[int, ...] = (AWAY, -signal.SIGKILL), **more: str) -> None:
    arena.work(slots, codes=codes, HPSEARCH_DEVICES="2", **more)
    assert_no_process_left(arena)


def assert_no_process_left(arena: Arena) -> None:
    """Assert that no process of a worker outlives it."""
    seen = {event["pid"] for event in arena.events("training")} | {worker.pid for worker in arena.workers}
    wait_for(lambda: not [pid for pid in seen if psutil.pid_exists(pid)], "the processes of the workers to be gone")


def leader(arena: Arena) -> int:
    """Return the process id of rank 0 of a worker."""
    engine = sa.create_engine(arena.storage_url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        return int(
            connection.execute(sa.text("SELECT pid FROM hpsearch_workers WHERE left_at IS NULL")).scalars().first() or 0
        )


def undisturbed(arena: Arena, together: dict[int, Values], n_trials: int, **more: str) -> Values:
    """Return the results of two processes without faults."""
    if n_trials not in together:
        quiet = arena.make_quiet_arena()
        quiet.create(n_trials, [])
        work(quiet, **more)
        found = read_trials(arena.storage_url, quiet.name)
        assert [t.outcomes for t in found] == [["complete"]] * n_trials
        together[n_trials] = [list(t.values.values()) for t in found]
    return together[n_trials]


KILLS = [
    Order("training", "kill", trial=0, epoch=1, nth=2, rank=1),
    Order("training", "kill", trial=1, epoch=2, nth=2),
    Order("train epoch", "kill", trial=2, nth=1, rank=1),
    Order("train epoch", "kill", trial=3, nth=3, when="after", rank=1),
    Order("save checkpoint", "kill", trial=4, nth=2),
    Order("report", "kill", trial=5, nth=2, when="after"),
]


@pytest.mark.soak
def test_a_kill_of_any_rank_at_any_point_changes_no_result(arena: Arena, together: dict[int, Values]) -> None:
    arena.create(len(KILLS), KILLS)
    work(arena)
    assert all(arena.has_obeyed(number) for number in range(len(KILLS)))
    dead = "rank 1 of 2 was ended by SIGKILL (see the lines that begin with [rank1], if any); all ranks were terminated"
    assert any(dead in worker.log.read_text() for worker in arena.workers)
    expected = undisturbed(arena, together, len(KILLS))
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, expected, len(KILLS))
    assert [t.outcomes for t in trials] == [["lost", "complete"]] * len(KILLS)


IN_PARTS = {"STRATEGY": "fsdp"}
KILLS_IN_PARTS = [
    Order("write shards", "kill", trial=0, nth=2, rank=1),
    Order("write shards", "kill", trial=1, nth=2, when="after"),
    # Two of the three shards of the second epoch are uploaded, but not the checkpoint file.
    Order("upload checkpoint", "kill", trial=2, nth=7),
]


@pytest.mark.soak
def test_a_kill_of_any_rank_during_a_sharded_checkpoint_changes_no_result(
    arena: Arena, together_in_parts: dict[int, Values]
) -> None:
    arena.create(len(KILLS_IN_PARTS), KILLS_IN_PARTS)
    work(arena, **IN_PARTS)
    assert all(arena.has_obeyed(number) for number in range(len(KILLS_IN_PARTS)))
    expected = undisturbed(arena, together_in_parts, len(KILLS_IN_PARTS), **IN_PARTS)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, expected, len(KILLS_IN_PARTS))
    assert [t.outcomes for t in trials] == [["lost", "complete"]] * len(KILLS_IN_PARTS)


@pytest.mark.soak
def test_a_torn_shard_invalidates_only_its_checkpoint(arena: Arena, together_in_parts: dict[int, Values]) -> None:
    arena.create(1, [Order("training", "kill", trial=0, epoch=2)])
    first = arena.start(HPSEARCH_DEVICES="2", **IN_PARTS)
    wait_for(lambda: arena.poll_workers() or first.ended, "the worker to be killed")
    files = sorted(path.name for path in (arena.home / "checkpoints").glob("*/0000/*"))
    parts = (".pt", ".pt.0_0.distcp", ".pt.1_0.distcp", ".pt.metadata")
    assert files == [f"{epoch:04d}-1{part}" for epoch in (0, 1) for part in parts]
    (part,) = (arena.home / "checkpoints").glob("*/0000/0001-1.pt.1_0.distcp")
    part.write_bytes(part.read_bytes()[:-1])
    work(arena, **IN_PARTS)
    assert "cannot resume after epoch 2" in arena.describe_failure("")
    assert "resuming after epoch 1" in arena.describe_failure("")
    expected = undisturbed(arena, together_in_parts, len(KILLS_IN_PARTS), **IN_PARTS)
    (trial,) = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, expected, 1)
    assert trial.outcomes == ["lost", "complete"]


@pytest.mark.soak
def test_a_rank_dies_before_rank_0_broadcasts_the_trial(arena: Arena, together: dict[int, Values]) -> None:
    arena.create(1, [Order("suggest", "hang", trial=0)])
    worker = arena.start(HPSEARCH_DEVICES="2")
    wait_for(lambda: arena.has_obeyed(0), "rank 0 to suggest")
    (other,) = [p for p in psutil.Process(leader(arena)).parent().children() if p.pid != leader(arena)][-1:]
    other.kill()
    wait_for(lambda: not other.is_running() or other.status() == psutil.STATUS_ZOMBIE, "rank 1 to be gone")
    (arena.orders / "open").touch()
    wait_for(lambda: arena.poll_workers() or worker.ended, "the worker to leave")
    work(arena)
    expected = undisturbed(arena, together, 6)
    (trial,) = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, expected, 1)
    assert (trial.state, trial.outcomes) == ("COMPLETE", ["lost", "complete"]), arena.describe_failure("")


@pytest.mark.soak
def test_an_exception_on_one_rank_ends_the_trial_on_all_with_its_reason(
    arena: Arena, together: dict[int, Values]
) -> None:
    """And the worker continues, with the same processes."""
    orders = [
        Order("training", "raise", trial=0, epoch=1, rank=1),
        Order("training", "allocate", trial=1, epoch=1, rank=1),
        Order("training", "exit", trial=2, epoch=1, rank=1),
        Order("training", "raise", trial=3, epoch=2),
    ]
    arena.create(6, orders)
    work(arena, codes=())
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(arena, together, 6), 6)
    assert [t.state for t in trials] == ["FAIL", "PRUNED", "FAIL", "FAIL", "COMPLETE", "COMPLETE"]
    assert [len(t.attempts) for t in trials] == [1] * 6
    assert len({event["pid"] for event in arena.events("training")}) == 2
    log = arena.workers[1].log.read_text()
    assert "no such layer" in next(line for line in log.splitlines() if "trial 0: FAIL" in line)
    assert "(on rank 1)" in next(line for line in log.splitlines() if "trial 1: PRUNED" in line)
    assert "Traceback on rank 1:" in log
    assert re.search(r"^\[rank1\]: .* INFO reaching for a layer$", log, re.M)
    assert log.count(", in _raise\n") == 2, "the tracebacks of trial 0 and trial 3"


FREEZES = {
    1: [
        Order("training", "freeze", trial=0, epoch=1, nth=2, rank=1),
        Order("receive job", "freeze", trial=1, rank=1, when="after"),
    ],
    0: [
        Order("training", "freeze", trial=0, epoch=1, nth=2),
        Order("restore checkpoint", "freeze", trial=1),
        Order("save checkpoint", "freeze", trial=2, nth=2),
        Order("report", "freeze", trial=3, nth=2),
        Order("publish run", "freeze", trial=4),
    ],
}


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.soak), 1])
@pytest.mark.soak
def test_a_frozen_rank_is_killed_with_the_others(arena: Arena, together: dict[int, Values], rank: int) -> None:
    """Also where the others wait for it without a collective of the training."""
    arena.create(count := len(FREEZES[rank]), FREEZES[rank])
    work(arena, HPSEARCH_COLLECTIVE_TIMEOUT="8")
    expected = undisturbed(arena, together, 6)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, expected, count)
    assert [t.outcomes for t in trials] == [["lost", "complete"]] * count


# Points of a trial, in its order, that each rank reaches. `data` runs once per process, so it is the first.
HANGS = {
    0: [
        {"point": "data"},
        {"point": "model"},
        {"point": "before the first step"},
        {"point": "training", "epoch": 1, "nth": 2},
        {"point": "evaluation", "epoch": 1},
        {"point": "save checkpoint", "nth": 2},
        {"point": "report", "nth": 2},
        {"point": "publish run"},
        {"point": "finish run"},
    ],
    1: [
        {"point": "data"},
        {"point": "model"},
        {"point": "before the first step"},
        {"point": "training", "epoch": 1, "nth": 2},
        {"point": "evaluation", "epoch": 1},
        {"point": "train epoch", "nth": 2, "when": "after"},
        {"point": "receive job", "when": "after"},
    ],
}


def hang(arena: Arena, objective: str, orders: list[Order], **more: str) -> None:
    """Run a worker per order until it ends, and assert that it ends in time after the order."""
    arena.create(1 + max(order.trial for order in orders), orders, objective=f"{HANGING}:{objective}")
    shutil.rmtree(arena.home / "prepared", ignore_errors=True)  # the check before the study has made it
    for trial in sorted({order.trial for order in orders}):
        of_trial = [index for index, order in enumerate(orders) if order.trial == trial]
        at = orders[of_trial[0]]
        timeout, timeouts = TIMEOUTS[at.action]
        worker = arena.start(HPSEARCH_DEVICES="2", **timeouts, **more)
        wait_for(
            lambda: arena.poll_workers() or worker.ended or any(map(arena.has_obeyed, of_trial)),  # noqa: B023 at once
            f"a rank to obey {at}",
        )
        began = time.monotonic()
        assert any(map(arena.has_obeyed, of_trial)), arena.describe_failure(str(at))
        wait_for(lambda: arena.poll_workers() or worker.ended, f"the worker to end after {at}")  # noqa: B023 as above
        print(f"rank {at.rank}, {at.action} at {at.point}: ended after {time.monotonic() - began:.1f} s")
        assert time.monotonic() - began < timeout + 10 + BUSY_SECONDS, at
        assert worker.exit_code == AWAY, arena.describe_failure(str(at))


@pytest.mark.long
@pytest.mark.timeout(3600)  # each of the points takes a start, a timeout and the end of the launcher
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("action", ["freeze", "hang"])
def test_a_hang_of_any_rank_at_any_point_ends_the_attempt_in_time(
    arena: Arena, together: dict[int, Values], action: str, rank: int
) -> None:
    """A frozen rank is suspended; a hanging one waits forever, while its threads continue."""
    orders = [Order(action=action, trial=trial, rank=rank, **at) for trial, at in enumerate(HANGS[rank])]
    hang(arena, "Hanging", orders)
    work(arena)
    expected = undisturbed(arena, together, len(orders))
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, expected, len(orders))
    ended = [at["point"] == "finish run" for at in HANGS[rank]]  # the trial has ended in the database before
    assert [t.outcomes for t in trials] == [["complete"] if has_ended else ["lost", "complete"] for has_ended in ended]


@pytest.mark.long
def test_a_hang_while_a_rank_writes_its_shards_ends_the_attempt_in_time(
    arena: Arena, together_in_parts: dict[int, Values]
) -> None:
    orders = [Order("write shards", action, trial=n, nth=2, rank=1) for n, action in enumerate(["freeze", "hang"])]
    hang(arena, "Hanging", orders, **IN_PARTS)
    work(arena, **IN_PARTS)
    expected = undisturbed(arena, together_in_parts, 2, **IN_PARTS)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, expected, 2)
    assert [t.outcomes for t in trials] == [["lost", "complete"]] * 2


@pytest.mark.long
def test_a_rank_that_is_frozen_in_prepare_is_killed_with_the_others(arena: Arena, together: dict[int, Values]) -> None:
    """One rank prepares, whichever comes first, and the other waits for its lock."""
    hang(arena, "Preparing", [Order("prepare", "freeze", trial=0, rank=rank) for rank in range(2)])
    work(arena)
    (trial,) = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(arena, together, 1), 1)
    assert trial.outcomes == ["lost", "complete"]


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_custom_loop_that_hangs_before_its_report_ends_in_time(arena: Arena, rank: int) -> None:
    actions = ["freeze", "hang"]
    orders = [Order("before report", action, trial=n, nth=2, rank=rank) for n, action in enumerate(actions)]
    hang(arena, "OwnLoop", orders)
    work(arena)
    trials = read_trials(arena.storage_url, arena.name)
    assert [t.outcomes for t in trials] == [["lost", "complete"]] * 2
    assert [t.values for t in trials] == [{epoch: float(epoch) for epoch in range(4)}] * 2


@pytest.mark.soak
def test_a_worker_that_lost_its_trial_abandons_it_on_all_ranks(arena: Arena, together: dict[int, Values]) -> None:
    """Its rank 0 is frozen beyond its lease while the other waits for it."""
    arena.create(1, [Order("report", "freeze", trial=0, nth=2)])
    first = arena.start(HPSEARCH_DEVICES="2", HPSEARCH_COLLECTIVE_TIMEOUT="600")  # otherwise the other rank exits
    wait_for(lambda: arena.has_obeyed(0), "rank 0 to be frozen")
    frozen = int((arena.orders / "obeyed-0").read_text())
    second = arena.start(HPSEARCH_DEVICES="2")
    wait_for(lambda: "resuming after epoch" in second.log.read_text(), "another worker to take the trial")
    psutil.Process(frozen).send_signal(signal.SIGCONT)
    wait_for(lambda: arena.poll_workers() or (first.ended and second.ended), "both to end")
    assert (first.exit_code, second.exit_code) == (0, 0), arena.describe_failure("")
    (trial,) = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(arena, together, 6), 1)
    assert trial.outcomes == ["lost", "complete"]
    assert_no_process_left(arena)


@pytest.mark.soak
@pytest.mark.parametrize(
    "target", [pytest.param("worker", marks=pytest.mark.soak), pytest.param("rank 0", marks=pytest.mark.soak), "rank 1"]
)
def test_all_ranks_stop_after_the_same_epoch_if_one_gets_a_signal(
    arena: Arena, together: dict[int, Values], target: str
) -> None:
    arena.create(1, [Order("training", "hang", trial=0, epoch=1, rank=rank) for rank in range(2)])
    worker = arena.start(HPSEARCH_DEVICES="2")
    wait_for(lambda: arena.has_obeyed(0) and arena.has_obeyed(1), "both to be in mid-epoch")
    pids = [int((arena.orders / f"obeyed-{rank}").read_text()) for rank in range(2)]
    pid = worker.pid if target == "worker" else pids[int(target[-1])]
    psutil.Process(pid).send_signal(signal.SIGTERM)
    wait_for(lambda: "finishing the epoch" in worker.log.read_text(), "the worker to handle the signal")
    (arena.orders / "open").touch()
    wait_for(lambda: arena.poll_workers() or worker.ended, "the worker to leave")
    assert worker.exit_code == 128 + 15, arena.describe_failure("")
    (given_back,) = read_trials(arena.storage_url, arena.name)
    assert given_back.state == "WAITING"
    epochs = {rank: [e["epoch"] for e in arena.events("training") if e["rank"] == rank] for rank in range(2)}
    assert epochs[0] == epochs[1] == sorted(given_back.values)
    work(arena)
    (trial,) = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(arena, together, 6), 1)
    assert trial.outcomes == ["released", "complete"]


@pytest.mark.soak
def test_a_verdict_reaches_all_ranks_after_the_same_epoch(arena: Arena) -> None:
    arena.create(3, [], settings="--pruner threshold --pruner-option upper=0.0 --pruner-option n_warmup_steps=1")
    work(arena)
    trials = read_trials(arena.storage_url, arena.name)
    assert [(t.state, sorted(t.values)) for t in trials] == [("PRUNED", [0, 1])] * 3
    for rank in range(2):
        assert [e["epoch"] for e in arena.events("training") if e["rank"] == rank] == [0, 1] * 3


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.soak)])
@pytest.mark.soak
def test_a_trial_resumes_on_another_number_of_devices(arena: Arena, strategy: str) -> None:
    """Released in mid-epoch by two devices, killed on one, completed on four: equal to one device up to rounding."""
    more = {"DROPOUT": "0", "STRATEGY": strategy}  # dropout draws different random numbers on each device
    arena.create(1, [Order("training", "kill", trial=0, attempt=2, epoch=2)])
    two = arena.start(HPSEARCH_DEVICES="2", STEP_PACE="0.5", HPSEARCH_GRACE="2", **more)
    wait_for(lambda: any(e["step"] == 4 for e in arena.events("step")), "a step of the second epoch")
    two.send(signal.SIGTERM)
    wait_for(lambda: arena.poll_workers() or two.ended, "two devices to leave")
    assert "released after epoch 1 and " in two.log.read_text(), arena.describe_failure("")
    one = arena.start(**more)
    wait_for(lambda: arena.poll_workers() or one.ended, "one device to be killed")
    assert "resuming after epoch 1 and " in one.log.read_text()
    four = arena.start(HPSEARCH_DEVICES="4", **more)
    wait_for(lambda: arena.poll_workers() or four.ended, "four devices to end the trial")
    quiet = arena.make_quiet_arena()
    quiet.create(1, [])
    quiet.work(1, **more)
    (trial,), (expected,) = (read_trials(a.storage_url, a.name) for a in (arena, quiet))
    assert trial.outcomes == ["released", "lost", "complete"]
    assert list(trial.values) == list(expected.values)
    assert list(trial.values.values()) == pytest.approx(list(expected.values.values()), abs=1e-5)
    assert_no_process_left(arena)
    shown = arena.run("show", arena.name, "--trial", "0")
    assert [kind for kind in ("2 x cpu", " cpu ", "4 x cpu") if kind in shown] == ["2 x cpu", " cpu ", "4 x cpu"]
    shown = arena.run("show", arena.name)
    assert re.search(r"^devices: 4 x cpu; [\d.]+ samples per second per device; ", shown, re.MULTILINE), shown
    assert "trial 0 was resumed on other devices (2 x cpu, then cpu, then 4 x cpu)" in shown


@pytest.mark.soak
def test_a_search_and_its_finalists_on_two_devices_each(arena: Arena, together: dict[int, Values]) -> None:
    """With the command line: two workers, one of which loses a process."""
    arena.create(8, [])
    how = ("--workers", "2", "--devices", "2")
    search = arena.start("run", OBJECTIVE, "--name", arena.name, "--trials", "8", "--retries", "2",
                         "--sampler", "random", "--pruner", "none", *how)  # fmt: skip
    wait_for(lambda: [t for t in read_trials(arena.storage_url, arena.name) if t.state == "RUNNING"], "a trial to run")
    (first, *_) = psutil.Process(leader(arena)).parent().children()[1:]
    first.kill()
    wait_for(lambda: arena.poll_workers() or search.ended, "the search to end")
    assert search.exit_code == 0, search.log.read_text()
    expected = undisturbed(arena, together, 8)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, expected, 8)
    assert {t.state for t in trials} == {"COMPLETE"}
    assert sorted(outcome for t in trials for outcome in t.outcomes) in (["complete"] * 8, ["complete"] * 8 + ["lost"])
    arena.run("finalists", arena.name, "--top", "2", "--seeds", "2", *how)
    held = read_trials(arena.storage_url, f"{arena.name}.finalists")
    assert [t.state for t in held] == ["COMPLETE"] * 4
    assert_no_process_left(arena)


@pytest.mark.soak
def test_a_trial_over_two_machines(arena: Arena, together: dict[int, Values]) -> None:
    """Each machine has a worker with one device. One of them is killed, and both are restarted."""
    arena.create(2, [Order("training", "kill", trial=1, epoch=1, nth=2, rank=1)])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    both = ("worker", "--study", arena.name, "--nodes", "2")
    for codes in ([AWAY, AWAY], [0, 0]):
        nodes = [arena.start(*both, **where) for _ in range(2)]
        wait_for(lambda: arena.poll_workers() or all(node.ended for node in nodes), "both to end")  # noqa: B023 at once
        assert [node.exit_code for node in nodes] == codes, arena.describe_failure("")
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(arena, together, 6), 2)
    assert [t.outcomes for t in trials] == [["complete"], ["lost", "complete"]]
    assert_no_process_left(arena)


@pytest.mark.parametrize("how", ["failed in the dashboard", pytest.param("study stopped", marks=pytest.mark.soak)])
def test_all_ranks_leave_a_trial_that_is_ended_externally(arena: Arena, how: str) -> None:
    arena.create(2, [Order("training", "hang", trial=0, epoch=1, rank=rank) for rank in range(2)])
    worker = arena.start(HPSEARCH_DEVICES="2")
    wait_for(lambda: arena.has_obeyed(0) and arena.has_obeyed(1), "both to be in mid-epoch")
    if how == "study stopped":
        arena.run("stop", arena.name)
    else:  # as the dashboard does
        storage = optuna.storages.RDBStorage(arena.storage_url)
        study = optuna.load_study(study_name=arena.name, storage=storage)
        storage.set_trial_state_values(study.trials[0]._trial_id, optuna.trial.TrialState.FAIL)
        storage.engine.dispose()
    (arena.orders / "open").touch()
    wait_for(lambda: arena.poll_workers() or worker.ended, "the worker to leave")
    assert worker.exit_code == 0, arena.describe_failure("")
    trials = read_trials(arena.storage_url, arena.name)
    epochs = [[e["epoch"] for e in arena.events("training") if (e["rank"], e["trial"]) == (n, 0)] for n in range(2)]
    assert epochs == [[0, 1]] * 2
    if how == "study stopped":
        assert [(t.state, t.outcomes) for t in trials] == [("WAITING", ["released"])]
    else:
        assert [(t.state, t.outcomes) for t in trials] == [("FAIL", ["cancelled"]), ("COMPLETE", ["complete"])]
    assert_no_process_left(arena)


@pytest.mark.parametrize(
    "title", [title if title == "Accelerate" else pytest.param(title, marks=pytest.mark.soak) for title in EXAMPLES]
)
@pytest.mark.soak
def test_a_killed_custom_loop_on_two_devices_resumes(arena: Arena, title: str) -> None:
    """It resumes from the state that its library saved. A search of two trials gives the results without faults."""
    if title == "DeepSpeed":
        pytest.importorskip("deepspeed", reason="deepspeed is not installed: the extra of this name has it")
    path = arena.folder / "loop.py"
    path.write_text(EXAMPLES[title])
    quiet = arena.make_quiet_arena()
    for one, orders in ((arena, [Order("report", "kill", trial=1, nth=2)]), (quiet, [])):
        one.create(2, orders, settings="--epochs 3", objective=f"{path}:main")
        one.work(1, codes=(AWAY,), HPSEARCH_DEVICES="2")
    found, expected = (read_trials(a.storage_url, a.name) for a in (arena, quiet))
    assert [t.outcomes for t in found] == [["complete"], ["lost", "complete"]], arena.describe_failure("")
    assert [t.state for t in expected] == ["COMPLETE"] * 2
    for trial, undisturbed_one in zip(found, expected, strict=True):
        assert list(trial.values) == [0, 1, 2]
        assert trial.values == pytest.approx(undisturbed_one.values, abs=1e-6)
    assert_no_process_left(arena)


_AUDITED = """
import sys
from pathlib import Path
known = Path(sys.argv[1])
def note(event, arguments):
    if event == "tempfile.mkstemp" and "errorfile" in str(arguments[0]):
        with known.open("a") as file:
            print(arguments[0], file=file)
sys.addaudithook(note)
from hpsearch.__main__ import main
del sys.argv[1]
main()
"""


def test_the_launcher_of_ranks_unpickles_only_files_in_a_private_folder(arena: Arena) -> None:
    """Torch deletes the files at the start and reads them if a rank fails: another user could create them."""
    arena.create(1, [])
    known = arena.folder / "error-files"
    arguments = ("worker", "--study", arena.name, "--devices", "2")
    worker = arena.zygote.python(_AUDITED, known, *arguments, **arena.environment())
    said, _ = worker.communicate()
    assert worker.returncode == 0, said
    folders = {Path(line).parent for line in known.read_text().splitlines()}
    assert len(folders) == 1
    assert folders != {Path(tempfile.gettempdir())}
