"""The rest of a study's budget: whether it is worth it, judged now and then by what its trials show."""

from __future__ import annotations

import optuna

from hpsearch.search.curves.gain import Left, expected_gain
from hpsearch.search.sampling.seeds import derive_seed
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import FORESEEN
from hpsearch.storage.trials.giving_up import GivenUp, give_up

FIRST = 20  # trials that have ended, before which nothing is judged; as many as Optuna's terminator waits for
AGAIN = 1.1  # times as many as when it was judged last, from which on it is judged again


class Rest:
    """What a worker knows of the rest of its study's budget.

    Args:
        study: has a `stop_when`.
        sampled: the same as its sampler sees it.
    """

    def __init__(self, study: StoredStudy, sampled: optuna.Study) -> None:
        self._study, self._sampled = study, sampled

    def given_up(self) -> GivenUp | None:
        """Give the rest up where it is expected to gain too little; return what was written, if it was now.

        It is judged by one worker or by another, and by two at once at worst: the first to write has it.
        """
        threshold = self._study.spec.stop_when
        attrs = self._study.attrs
        if threshold is None or GivenUp.of(attrs) is not None:
            return None
        trials = self._study.trials()
        ended = sum(trial.state.is_finished() for trial in trials)
        judged = (attrs.get(FORESEEN) or {}).get("ended", 0)
        if ended < max(FIRST, AGAIN * judged) or (left := self._left(len(trials))) < 1:
            return None
        seed = derive_seed(self._study.spec.seed, "rest", ended)
        self._sampled._thread_local.cached_all_trials = None  # else those of the last suggestion
        spec = self._study.spec
        gain = expected_gain(self._sampled, Left(left, spec.epochs), seed=seed, metric=spec.metric)
        judged_now = {"gain": gain, "ended": ended}
        if gain is not None and gain < threshold:
            engine, study_id = self._study.engine, self._study.study_id
            if given_up := give_up(engine, study_id, gain=gain, threshold=threshold, foreseen=judged_now):
                return given_up
        self._study.set_attr(FORESEEN, judged_now)
        return None

    def _left(self, begun: int) -> float:
        """How many trials are yet to be begun, by the budget that is over first at the pace so far."""
        left = float(self._study.budget - begun)
        if (spending := self._study.spending) is not None and spending.share > 0:
            left = min(left, begun * (1 - spending.share) / spending.share)
        return left
