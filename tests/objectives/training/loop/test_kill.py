"""A chain of processes, each killed after one epoch and resumed by the next, gives the result of one process."""

import json
import signal

import pytest

from hpsearch import LocalSession, TrainConfig, Trainer
from hpsearch.objectives.training.config import OPTIMIZERS, SCHEDULES
from tests.objectives.training.loop.killed_runs import CONFIGS, EPOCHS
from tests.objectives.training.support import same_result


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_run_killed_at_every_epoch_resumes_exactly(zygote, tmp_path, name):
    run = "import sys; from pathlib import Path; from tests.objectives.training.loop.killed_runs import main; "
    said, _ = (done := zygote.python(run + "main(sys.argv[1], Path(sys.argv[2]))", name, tmp_path)).communicate()
    assert done.returncode == 0, said
    found = json.loads(said.splitlines()[-1])
    assert found == {"ends": [-signal.SIGKILL] * EPOCHS, "same": True, "epochs": EPOCHS}


class DiedError(Exception):
    pass


class Dying(LocalSession):
    def report(self, record):
        verdict = super().report(record)
        if record.epoch == 1:
            raise DiedError
        return verdict


# Each optimizer and each schedule at least once.
PAIRS = [(name, SCHEDULES[i % len(SCHEDULES)]) for i, name in enumerate(sorted(OPTIMIZERS))]


@pytest.mark.parametrize(("optimizer", "schedule"), PAIRS)
@pytest.mark.usefixtures("no_plots")
def test_every_optimizer_and_schedule_resumes_exactly(wine, tmp_path, optimizer, schedule):
    config = TrainConfig(optimizer=optimizer, schedule=schedule, lr=0.01, batch_size=16, plateau_patience=0)

    def trainer(session):
        return Trainer(wine, config, epochs=3, seed=2, session=session)

    with pytest.raises(DiedError):
        trainer(Dying(tmp_path)).fit()
    same_result(trainer(LocalSession(tmp_path)).fit(), trainer(None).fit())


def test_the_pairs_cover_all_optimizers_and_schedules():
    assert {schedule for _, schedule in PAIRS} == set(SCHEDULES)
