"""Custom loops on two ranks: both report, reports count once, and no rank waits forever for the other."""

import multiprocessing
import os
import signal

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn

from hpsearch import LocalSession, LoopObjective, ObjectiveError, Verdict
from hpsearch.objectives.fit import fit
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.rank_errors import RankError
from hpsearch.objectives.training.ranks import SINGLE_PROCESS
from hpsearch.objectives.training.reproducibility import checkpoint
from tests.objectives.custom_loop.support import EPOCHS, trained, whole_and_resumed
from tests.objectives.training.ranks.support import on_ranks
from tests.objectives.training.support import Memory


class Drawn(LoopObjective):
    """Its metric is a random number per epoch; the first weight is random too."""

    metric, direction = "drawn", "minimize"

    def __init__(self):
        self.seen = []

    def suggest(self, trial):
        return {"lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True)}

    def run(self, trial):
        net, draws = nn.Linear(1, 1), []
        if trial.state:
            draws = list(trial.state["draws"])
        for epoch in trial.epochs():
            draws.append(float(torch.rand(1)))
            self.seen.append((trial.rank, trial.world, epoch, trial.resumed, list(draws), str(trial.folder)))
            if trial.folder is None:
                trial.log_artifact(f"of rank {trial.rank}")
            own = {"drawn": draws[-1], "weight": float(net.weight.detach())}
            trial.report(own, state={"draws": draws, "rank": trial.rank}, best={"rank": trial.rank})


def parts(**attributes):
    return type("Wrong", (Drawn,), attributes)()


def _seen(ranks, folder, after=None):
    objective = Drawn()
    return trained(ranks, objective, folder, after), objective.seen


@pytest.mark.slow
def test_the_report_of_rank_0_counts_and_equals_that_of_one_process(tmp_path):
    alone = trained(SINGLE_PROCESS, Drawn(), tmp_path / "alone")
    (first, seen), (second, others) = on_ranks(2, _seen, tmp_path / "ranks")
    assert first == second == alone
    assert [what[:4] for what in seen] == [(0, 2, epoch, False) for epoch in range(EPOCHS)]
    assert [what[:4] for what in others] == [(1, 2, epoch, False) for epoch in range(EPOCHS)]
    assert seen[-1][4] != others[-1][4], "within an epoch ranks draw apart"
    assert seen[-1][5] == others[-1][5] == str(tmp_path / "ranks"), "the folder is the same"
    kept = checkpoint.read(tmp_path / "ranks" / "last.pt")
    assert (kept["state"]["rank"], kept["best"]["model"]) == (0, {"rank": 0})
    assert kept["environment"]["world"] == 2


class Timed(Drawn):
    """Records the timeout of the process group in each epoch."""

    def run(self, trial):
        self.timeouts = []
        for _ in trial.epochs():
            backend = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
            self.timeouts.append(backend.options._timeout.total_seconds())
            trial.report({"drawn": 1.0})


def _timeouts(ranks, folder):
    objective = Timed()
    found = []
    for name in ("first", "second"):
        trained(ranks, objective, folder / name)
        found.append(objective.timeouts)
    return found


@pytest.mark.slow
def test_the_timeout_of_steps_begins_after_the_first_report(tmp_path):
    expected = [300.0, *[7.0] * (EPOCHS - 1)]
    assert on_ranks(2, _timeouts, tmp_path, timeout=7.0) == [[expected, expected]] * 2


@pytest.mark.slow
def test_all_ranks_receive_the_state_of_rank_0(tmp_path):
    on_ranks(2, _seen, tmp_path, 0)
    (first, seen), (second, others) = on_ranks(2, _seen, tmp_path)
    assert first == second
    assert [what[2:4] for what in others] == [(1, True), (2, True)]
    assert others[0][4][0] == seen[0][4][0] == first[1][0][1]["val_drawn"]


def _pruned(ranks):
    session = Memory({1: Verdict.PRUNE})
    result = fit(Drawn(), {"lr": 0.1}, RunPlan(EPOCHS, 7, 7), session=session, device="cpu")
    return result.status, len(result.history), result.best_epoch, [str(path) for path in session.logged]


@pytest.mark.slow
def test_the_verdict_on_a_report_ends_all_ranks():
    first, second = on_ranks(2, _pruned)
    assert first[:3] == second[:3] == ("pruned", 2, first[2])
    assert (first[3], second[3]) == (["of rank 0"] * 2, []), "files of rank 0 alone"


def _told_to_go(ranks):
    ranks.should_stop = lambda: ranks.rank == 1
    notified = []
    ranks.on_stop_request = lambda: notified.append(ranks.rank)
    fit(Drawn(), {"lr": 0.1}, RunPlan(EPOCHS, 7, 7), device="cpu")
    return notified


@pytest.mark.slow
def test_rank_0_stops_at_a_report_if_another_rank_got_a_signal():
    notified, others = on_ranks(2, _told_to_go)
    assert (set(notified), others) == ({0}, [])


def only_rank_0(_, trial):
    for _ in trial.epochs():
        if trial.rank == 0:
            trial.report({"drawn": 1.0})


def leaves_early(_, trial):
    for epoch in trial.epochs():
        trial.report({"drawn": 1.0})
        if trial.rank == 1 and epoch == 1:
            break


def fails_on_1(_, trial):
    for _ in trial.epochs():
        trial.report({"drawn": 1.0 if trial.rank == 0 else 1 / 0})


def wrong_metric(_, trial):
    for _ in trial.epochs():
        trial.report({"drown": 1.0} if trial.rank == 0 else {"drawn": 1.0})


def caught(_, trial):
    for _ in trial.epochs():
        try:
            trial.report({"drown": 1.0})
        except Exception:  # as in some users' code
            return


def apart(_, trial):
    for _ in trial.epochs():
        folder = trial.checkpoint / str(trial.rank)
        folder.mkdir()
        (folder / "weights").write_text("." * trial.rank)
        trial.report({"drawn": 1.0}, folder=folder)


def only_one_with_a_folder(_, trial):
    for _ in trial.epochs():
        trial.report({"drawn": 1.0}, folder=trial.checkpoint if trial.rank else None)


def nothing_in_it(_, trial):
    for _ in trial.epochs():
        trial.report({"drawn": 1.0}, folder=trial.checkpoint)


ALIKE = "; call trial.report once per epoch on every rank"
MISTAKES = {
    only_rank_0: "epoch 1 was not reported; call trial.report once in each epoch",
    leaves_early: "the loops of the ranks differ: rank 0 reports epoch 3, rank 1 ends after epoch 2" + ALIKE,
    fails_on_1: "ZeroDivisionError",
    wrong_metric: "metric 'drawn' is not reported; did you mean 'drown'?",
    caught: "metric 'drawn' is not reported; did you mean 'drown'?",
    apart: "trial.report: rank 1 sees other files in folder ",
    only_one_with_a_folder: "rank 0 reports epoch 1, rank 1 reports epoch 1 with a folder" + ALIKE,
    nothing_in_it: "trial.report: folder ",
}


def _mistaken(ranks, folder):
    """Return the message of each mistake, made one after the other in the same processes, then run a trial in them."""
    messages = {}
    for run in MISTAKES:
        try:
            trained(ranks, parts(run=run), folder / run.__name__)
        except (ObjectiveError, RankError) as error:
            messages[run.__name__] = f"{type(error).__name__}: {error}"
    return messages, trained(ranks, Drawn(), folder / "after")[0]


@pytest.mark.slow
def test_mistakes_end_all_ranks_with_clear_errors(tmp_path):
    for messages, after in on_ranks(2, _mistaken, tmp_path):
        assert messages.keys() == {run.__name__ for run in MISTAKES}
        assert [
            name for name, message in messages.items() if not message.startswith(("ObjectiveError", "MetricError"))
        ] == []
        wrong = [
            name for name, message in zip(messages, MISTAKES.values(), strict=True) if message not in messages[name]
        ]
        assert wrong == [], messages
        assert "\n" not in "".join(messages.values())
        assert after == "completed"


class Folders(Drawn):
    """Each rank writes a separate file of the state; one file is empty."""

    def run(self, trial):
        file, total = trial.checkpoint / "parts" / str(trial.rank), 0.0
        assert trial.resumed == file.exists()
        if trial.resumed:
            total = float(file.read_text())
        for epoch in trial.epochs():
            assert file.exists() == (trial.resumed and epoch == 1), "a report empties it"
            total += float(torch.rand(1))
            file.parent.mkdir(exist_ok=True, parents=True)
            file.write_text(repr(total))
            (trial.checkpoint / "empty").touch()
            sums = [torch.zeros(1, dtype=torch.double) for _ in range(trial.world)]
            torch.distributed.all_gather(sums, torch.tensor([total], dtype=torch.double))
            trial.report({"drawn": sum(sums)}, folder=trial.checkpoint)


@pytest.mark.slow
def test_files_of_all_ranks_are_there_when_the_trial_resumes(tmp_path):
    whole, resumed = whole_and_resumed(Folders(), tmp_path)
    assert whole == resumed
    assert not list(tmp_path.glob("*/checkpoint")), "it is in the trial's"


def _saves(folder, killed):
    class Saving(Drawn):
        def run(self, trial):
            file = trial.checkpoint / "total"
            total = float(file.read_text()) if trial.resumed else 0.0
            for epoch in trial.epochs():
                total += float(torch.rand(1))
                file.parent.mkdir(exist_ok=True)
                file.write_text(repr(total))
                assert not (trial.checkpoint / "stray").exists()
                if killed and epoch == 1:
                    (trial.checkpoint / "stray").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                trial.report({"drawn": total}, folder=trial.checkpoint)

    return trained(SINGLE_PROCESS, Saving(), folder)


def test_the_folder_of_a_killed_process_is_restored(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_saves, args=(tmp_path / "killed", True))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert (tmp_path / "killed" / "checkpoint" / "total").exists(), "of the epoch that was not reported"
    assert _saves(tmp_path / "killed", False) == _saves(tmp_path / "whole", False)


def test_a_path_in_the_checkpoint_folder_is_valid_in_every_epoch(tmp_path):
    class Stored(Drawn):
        def run(self, trial):
            file = trial.checkpoint / "total"
            for _ in trial.epochs():
                assert not file.exists()
                file.write_text("1.0")
                trial.report({"drawn": 1.0}, folder=trial.checkpoint)

    assert trained(SINGLE_PROCESS, Stored(), tmp_path)[0] == "completed"


def test_other_users_cannot_read_the_checkpoint_folder():
    class Stored(Drawn):
        def run(self, trial):
            for _ in trial.epochs():
                assert trial.checkpoint.stat().st_mode & 0o777 == 0o700
                (trial.checkpoint / "total").write_text("1.0")
                trial.report({"drawn": 1.0}, folder=trial.checkpoint)

    assert fit(Stored(), {"lr": 0.1}, RunPlan(1, 7, 7), device="cpu").status == "completed"


def test_a_folder_of_the_user_is_saved_and_not_removed(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "weights").write_text("1.0")

    class Own(Drawn):
        def run(self, trial):
            assert not trial.resumed or (trial.checkpoint / "weights").read_text() == "1.0"
            for _ in trial.epochs():
                trial.report({"drawn": 1.0}, folder=mine)

    trained(SINGLE_PROCESS, Own(), tmp_path / "run")
    assert (mine / "weights").exists()
    assert checkpoint.read(tmp_path / "run" / "last.pt")["folder"].keys() == {"weights"}


def test_a_state_with_a_file_outside_its_folder_is_rejected(tmp_path):
    _saves(tmp_path, False)
    last = checkpoint.read(tmp_path / "last.pt")
    last["folder"] = {"../elsewhere": torch.zeros(1, dtype=torch.uint8)}
    checkpoint.write(tmp_path / "last.pt", last)
    with pytest.raises(ObjectiveError, match=r"the checkpoint contains the path '../elsewhere', which is outside"):
        _saves(tmp_path, False)


def _accelerated(ranks):
    """Run two trials in one process: the first one sets another precision and fails on one rank."""
    from accelerate import Accelerator

    def run(_, trial):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16" if trial.config["lr"] == 1 else "no")
        model = accelerator.prepare(nn.Linear(1, 1))
        for _ in trial.epochs():
            accelerator.backward(model(torch.ones(1, 1)).mean())
            trial.report(
                {"drawn": model.module.weight.grad.item() if trial.rank == 0 or trial.config["lr"] < 1 else 1 / 0}
            )

    statuses = []
    for rate in (1.0, 0.1):
        try:
            with ranks.fail_together():
                statuses.append(fit(parts(run=run), {"lr": rate}, RunPlan(2, 7, 7), device="cpu").status)
        except ObjectiveError as error:
            statuses.append(str(error))
    return statuses


@pytest.mark.slow
def test_a_trial_does_not_inherit_the_library_state_of_the_previous_trial():
    for first, second in on_ranks(2, _accelerated):
        assert "ZeroDivisionError" in first
        assert second == "completed"


def test_a_single_process_trains_with_a_local_session(tmp_path):
    result = fit(Drawn(), {"lr": 0.1}, RunPlan(2, 7, 7), session=LocalSession(tmp_path), device="cpu")
    assert (result.status, result.best) == ("completed", {"rank": 0})


def test_a_single_process_has_a_process_group(tmp_path):
    def run(_, trial):
        for _ in trial.epochs():
            total = torch.ones(1)
            torch.distributed.all_reduce(total)
            torch.distributed.checkpoint.save({"total": total}, checkpoint_id=str(trial.checkpoint))
            trial.report({"drawn": total}, folder=trial.checkpoint)

    for number in range(2):
        assert trained(SINGLE_PROCESS, parts(run=run), tmp_path / str(number))[0] == "completed"
    assert not torch.distributed.is_initialized()
