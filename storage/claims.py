"""Claims: which worker runs which trial, within the budget, each trial by one worker at a time.

A claim is an orphaned trial (its worker died), else one that a worker gave back, else one that somebody enqueued,
else a new one, else nothing: the budget is spent. Every claim is made under the study's lock, and a trial is created
together with the mark that makes it ours, so that a worker killed between any two steps leaves a trial which the
next claim finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from storage.locks import AdvisoryLocks

# User attributes of a trial, readable in the Optuna dashboard.
ATTEMPT = "hpsearch:attempt"  # how often the trial was started, from 1; only trials of ours have it
CRASHES = "hpsearch:crashes"  # how many of its workers died
WORKER = "hpsearch:worker"  # who runs it, or ran it last
REASON = "hpsearch:reason"  # why it ended as it did, for a person


class ClaimLostError(Exception):
    """Another worker has taken the trial, or somebody ended it from outside: nothing of it may be written."""


@dataclass(frozen=True)
class Claim:
    """The right to run one trial."""

    trial_id: int
    number: int
    attempt: int
    params: dict[str, object]

    @property
    def resumed(self) -> bool:
        """Whether the trial has been started before."""
        return self.attempt > 1


@dataclass(frozen=True)
class Lost:
    """A trial that was settled as FAIL just now, because too many of its workers died."""

    number: int
    reason: str
    user_attrs: dict[str, object]


@dataclass(frozen=True)
class Nothing:
    """No trial to take now. With `running` trials of others, one may yet come back; with none, the study is done."""

    running: int


class Claims:
    """Claims of one worker in one study."""

    def __init__(self, storage: BaseStorage, study_id: int, locks: AdvisoryLocks, *, worker: str) -> None:
        self._storage = storage
        self._study_id = study_id
        self._locks = locks
        self._worker = worker
        self._session = 0  # the connection that holds the lock of the current claim

    def claim(self, *, n_trials: int, retries: int, open_new: bool = True) -> Claim | Lost | Nothing:
        """Take a trial.

        Args:
            n_trials: the study's budget; no trial is started beyond it.
            retries: how many workers may die on one trial before it is settled as FAIL.
            open_new: whether trials that were never started may be taken (no, when the time is up).
        """
        with self._locks.study(self._study_id):
            trials = self._storage.get_all_trials(self._study_id, deepcopy=False)
            running = 0
            for trial in trials:
                if trial.state != TrialState.RUNNING:
                    continue
                if ATTEMPT not in trial.user_attrs:
                    continue  # a notebook's own trial: not ours to take, nor to wait for
                if not self._locks.try_trial(trial._trial_id):
                    running += 1
                else:
                    return self._take_orphan(trial, retries)
            waiting = [t for t in trials if t.state == TrialState.WAITING]
            for trial in waiting:
                if ATTEMPT in trial.user_attrs and (claim := self._take_waiting(trial)):
                    return claim
            started = sum(t.state != TrialState.WAITING or ATTEMPT in t.user_attrs for t in trials)
            if open_new and started < n_trials:
                for trial in waiting:
                    if ATTEMPT not in trial.user_attrs and (claim := self._take_waiting(trial)):
                        return claim
                return self._take_new()
            return Nothing(running)

    def _take_orphan(self, trial: FrozenTrial, retries: int) -> Claim | Lost:
        crashes = trial.user_attrs.get(CRASHES, 0) + 1
        self._set(trial._trial_id, CRASHES, crashes)
        if crashes > retries:
            reason = f"lost its worker, {crashes} in all ({trial.user_attrs.get(WORKER)} was the last)"
            self._set(trial._trial_id, REASON, reason)
            self._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
            self._locks.release_trial(trial._trial_id)
            return Lost(trial.number, reason, dict(trial.user_attrs))
        return self._started(trial, trial.user_attrs[ATTEMPT] + 1)

    def _take_waiting(self, trial: FrozenTrial) -> Claim | None:
        attempt = trial.user_attrs.get(ATTEMPT, 0) + 1
        if not self._locks.try_trial(trial._trial_id):
            return None
        # The mark goes first: RUNNING without it would belong to nobody.
        self._set(trial._trial_id, ATTEMPT, attempt)
        if not self._storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING):
            self._locks.release_trial(trial._trial_id)  # a notebook was faster
            return None
        return self._started(trial, attempt)

    def _take_new(self) -> Claim:
        template = create_trial(state=TrialState.RUNNING, user_attrs={ATTEMPT: 1, WORKER: self._worker})
        trial_id = self._storage.create_new_trial(self._study_id, template)
        self._locks.try_trial(trial_id)
        self._session = self._locks.session()
        return Claim(trial_id, self._storage.get_trial_number_from_id(trial_id), 1, {})

    def _started(self, trial: FrozenTrial, attempt: int) -> Claim:
        self._set(trial._trial_id, ATTEMPT, attempt)
        self._set(trial._trial_id, WORKER, self._worker)
        self._session = self._locks.session()
        return Claim(trial._trial_id, trial.number, attempt, dict(trial.params))

    def _set(self, trial_id: int, key: str, value: object) -> None:
        self._storage.set_trial_user_attr(trial_id, key, value)

    def check(self, claim: Claim) -> None:
        """Make sure that the trial is still ours; after a lost connection, take its lock again if nobody has.

        Raises:
            ClaimLostError: somebody else has the trial, or it was ended from outside.
        """
        session = self._locks.session()
        if session != self._session:
            if not self._locks.try_trial(claim.trial_id):
                raise ClaimLostError(f"trial {claim.number} was taken over while the database was away")
            self._session = session
        trial = self._storage.get_trial(claim.trial_id)
        if trial.state != TrialState.RUNNING:
            raise ClaimLostError(f"trial {claim.number} was set to {trial.state.name} from outside")
        if trial.user_attrs.get(ATTEMPT) != claim.attempt:
            raise ClaimLostError(f"trial {claim.number} is at a later attempt")

    def give_back(self, claim: Claim) -> None:
        """Leave a trial that was not finished to whoever claims next: WAITING, with its parameters and values."""
        with self.last_word(claim):
            self._storage.set_trial_state_values(claim.trial_id, TrialState.WAITING)

    @contextmanager
    def last_word(self, claim: Claim) -> Iterator[None]:
        """Settle inside: the claim is checked before and its lock released after."""
        self.check(claim)
        try:
            yield
        finally:
            self._locks.release_trial(claim.trial_id)

    def let_go(self, claim: Claim) -> None:
        """Release what is left of a claim that was lost."""
        self._locks.release_trial(claim.trial_id)


def running_now(url: str, storage: BaseStorage, study_id: int) -> int:
    """Return how many of the study's RUNNING trials have a living worker."""
    locks = AdvisoryLocks(url, application_name="hpsearch look")
    try:
        running = storage.get_all_trials(study_id, deepcopy=False, states=(TrialState.RUNNING,))
        return sum(not locks.try_trial(trial._trial_id) for trial in running)
    finally:
        locks.close()
