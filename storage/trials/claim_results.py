"""Results of claims and reports: a trial to run, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from hpsearch.storage.rungs.rungs import PrunedTrial


@dataclass(frozen=True)
class Claim:
    """The right of an attempt to run one trial.

    Attributes:
        trial_id, number: id and number of the trial.
        attempt: number of the attempt, from 1; it is the fencing token of writes.
    """

    trial_id: int
    number: int
    attempt: int

    @property
    def is_resumed(self) -> bool:
        """Whether the trial had an earlier attempt, so that the trial is resumed."""
        return self.attempt > 1


@dataclass(frozen=True)
class RetriesExhausted:
    """A trial that a claim set to FAIL, because the trial lost its worker more often than `retries` allows."""

    trial_id: int
    number: int
    attempt: int
    reason: str


@dataclass(frozen=True)
class NoTrialAvailable:
    """The result of a claim when no trial is available.

    Attributes:
        running_trials: number of running trials, which may be released later; if it is 0, the study is finished.
    """

    running_trials: int


@dataclass(frozen=True)
class StudyStopped:
    """The result of a claim in a stopped study, in which no trial is available until the study is started again."""

    reason: str


@dataclass(frozen=True)
class ReportResult:
    """Result of the report of an epoch.

    Attributes:
        is_stopped: whether the study was stopped, so that the worker must release the trial.
        is_counted: whether the epoch was written; False if the budget in epochs was already spent.
        has_budget: whether the budgets in epochs and seconds allow the trial's next epoch.
    """

    is_stopped: bool
    is_counted: bool = True
    has_budget: bool = True


ClaimResult = Claim | RetriesExhausted | PrunedTrial | NoTrialAvailable | StudyStopped
