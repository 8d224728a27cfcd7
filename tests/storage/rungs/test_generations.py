"""Generations of population-based training: all members pause, and one claim decides once for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import sqlalchemy as sa
from optuna.distributions import FloatDistribution
from optuna.storages import BaseStorage

from hpsearch.storage.attributes import CONFIG_SCHEDULE
from hpsearch.storage.checkpoints.pointers import find_referenced_paths, read_pointers
from hpsearch.storage.checkpoints.store import StoredFile
from hpsearch.storage.rungs.generations import Copy, Generation, Member, read_generations
from hpsearch.storage.rungs.rungs import Rungs
from hpsearch.storage.trials.claim_results import Claim, NoTrialAvailable
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from hpsearch.storage.trials.reopening import reopen_trial
from tests.storage.trials.support import budget, outcomes, take

LR = FloatDistribution(0.0, 1.0)


def copy_best(generation: int, members: Sequence[Member]) -> list[Copy]:
    """Let the worst member copy the best one."""
    ranked = sorted(members, key=lambda member: member.loss)
    return [Copy(ranked[-1].number, ranked[0].number, {**ranked[0].params, "lr": ranked[0].params["lr"] / 2})]


@pytest.fixture
def claims(engine: sa.Engine, storage: BaseStorage, study_id: int) -> Claims:
    budget(storage, study_id, n_trials=3)
    rungs = Rungs("pbt", (1, 2), 3, 1, maximize=True, min_complete=0, decide=copy_best)
    return Claims(engine, study_id, worker="w", retry_seconds=10.0, rungs=rungs)


def start(claims: Claims, storage: BaseStorage) -> list[Claim]:
    members = [take(claims) for _ in range(3)]
    for claim in members:
        storage.set_trial_param(claim.trial_id, "lr", 0.1 * (claim.number + 1), LR)
    return members


def train(claims: Claims, claim: Claim, value: float, epoch: int = 0) -> bool:
    """Train an epoch; return whether the member continues without a pause."""
    file = StoredFile(f"s/{claim.number:04d}/{epoch:04d}-{claim.attempt}.pt", "0" * 64, 1)
    claims.report(claim, epoch, value, file)
    return claims.report_rung(claim, epoch, value).is_promoted


def test_the_claim_after_the_last_member_decides_once_for_all(
    claims: Claims, engine: sa.Engine, storage: BaseStorage, study_id: int
) -> None:
    first, second, third = start(claims, storage)
    assert not train(claims, second, 0.9)
    assert not train(claims, first, 0.1)
    assert claims.claim() == NoTrialAvailable(running_trials=1)
    assert read_generations(engine, study_id) == []
    assert not train(claims, third, 0.5)
    again = [take(claims) for _ in range(3)]
    assert [claim.number for claim in again] == [0, 1, 2]
    copied = Generation(0, 0, 1, {"lr": 0.1}, {"lr": 0.1})
    kept = [Generation(number, 0, None, None, None) for number in (1, 2)]
    assert read_generations(engine, study_id) == [copied, *kept]
    schedule = [{"epoch": 0, "trial": 1, "params": {"lr": 0.2}}, {"epoch": 1, "trial": 0, "params": {"lr": 0.1}}]
    assert [storage.get_trial(claim.trial_id).user_attrs.get(CONFIG_SCHEDULE) for claim in again] == [
        schedule,
        None,
        None,
    ]
    pointers = [read_pointers(engine, claim.trial_id) for claim in again]
    assert pointers[0] == pointers[1] == {0: StoredFile("s/0001/0000-1.pt", "0" * 64, 1)}
    assert storage.get_trial(first.trial_id).params == {"lr": 0.1}
    assert train(claims, again[0], 0.1), "a member that has continued does not pause again at the same generation"
    assert find_referenced_paths(engine, study_id) >= {"s/0001/0000-1.pt", "s/0002/0000-1.pt"}


def test_a_schedule_contains_the_lineage(claims: Claims, storage: BaseStorage, engine: sa.Engine) -> None:
    for claim, value in zip(start(claims, storage), (0.1, 0.9, 0.5), strict=True):
        train(claims, claim, value)
    for claim, value in zip([take(claims) for _ in range(3)], (0.95, 0.9, 0.5), strict=True):
        train(claims, claim, value, epoch=1)
    last = [take(claims) for _ in range(3)][2]  # it copies trial 0, which has copied trial 1
    schedule = storage.get_trial(last.trial_id).user_attrs[CONFIG_SCHEDULE]
    assert [(part["epoch"], part["trial"]) for part in schedule] == [(0, 1), (1, 0), (2, 2)]


def test_a_member_keeps_conditional_parameters_of_a_trial_that_has_left(
    claims: Claims, storage: BaseStorage, engine: sa.Engine, study_id: int
) -> None:
    members = start(claims, storage)
    storage.set_trial_param(members[1].trial_id, "momentum", 0.9, LR)
    for claim, value in zip(members, (0.1, 0.9, 0.5), strict=True):
        train(claims, claim, value)
    first, second, third = (take(claims) for _ in range(3))
    claims.finish_attempt(second, Outcome.FAILED)
    train(claims, first, 0.2, epoch=1)
    train(claims, third, 0.5, epoch=1)
    take(claims)
    decided = [each for each in read_generations(engine, study_id) if each.generation == 1]
    assert [(each.parent, each.before) for each in decided] == [(2, {"lr": 0.1, "momentum": 0.9}), (None, None)]


def test_members_that_end_leave_the_population_and_late_ones_continue_unchanged(
    claims: Claims, storage: BaseStorage, engine: sa.Engine, study_id: int
) -> None:
    first, second, third = start(claims, storage)
    train(claims, first, 0.1)
    train(claims, second, 0.9)
    claims.finish_attempt(third, Outcome.FAILED)
    running = [take(claims), take(claims)]
    assert [each.number for each in read_generations(engine, study_id)] == [0, 1]
    assert reopen_trial(engine, study_id, third.trial_id, from_start=True) == (True, None)
    late = take(claims)
    assert late.number == 2
    assert not train(claims, late, 0.99)
    for claim in running:
        train(claims, claim, 0.5, epoch=1)
    late = take(claims)
    assert (late.number, late.attempt) == (2, 3)
    assert [each.number for each in read_generations(engine, study_id)] == [0, 1, 2], "the others wait for it"
    assert read_generations(engine, study_id)[2].parent is None
    assert claims.claim() == NoTrialAvailable(running_trials=1)
    assert claims.has_trials_left()
    assert outcomes(engine)[-1] == (3, None)
