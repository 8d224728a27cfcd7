"""A study: whether a worker here can join it, and whether there is anything to do."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from importlib.metadata import version

from hpsearch.objectives.base import BaseObjective
from hpsearch.objectives.loading import load_objective
from hpsearch.search.console import command
from hpsearch.search.doctor.check import Check, Found, ok, warning
from hpsearch.search.study.release import check_release
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import RELEASE, STOPPED
from hpsearch.storage.trials.progress import read_progress


def study_checks(study: StoredStudy | None) -> list[Check]:
    """Return the checks of a study; None where the database does not give it, so that they are skipped."""
    looks = _Looks(study)
    return [
        Check("study", looks.stands, ("rights",)),
        Check("release", looks.release, ("study",)),
        Check("objective", looks.objective, ("study",)),
        Check("source", looks.source, ("objective",)),
    ]


class _Looks:
    """The looks at one study; the objective is loaded once."""

    def __init__(self, study: StoredStudy | None) -> None:
        self._study = study
        self._loaded: BaseObjective | None = None

    @property
    def study(self) -> StoredStudy:
        assert self._study is not None
        return self._study

    def stands(self) -> Found:
        name = self.study.spec.name
        at = read_progress(self.study.engine, self.study.study_id, self.study.spec.direction)
        said = f"{name}: {at.done} have ended{at.early}, {len(at.running)} running"
        if why := self.study.attrs.get(STOPPED):
            return warning(f"{said}; it was stopped {why}", f"run '{command('start', name)}' to let it go on")
        if self.study.out_of_time:
            return ok(f"{said}; its time is up")
        return ok(f"{said}; nothing is left to do" if at.share >= 1 else said)

    def release(self) -> Found:
        check_release(self.study)
        made = self.study.attrs.get(RELEASE)
        return ok(f"made by hpsearch {made or 'of an early release'}, this is {version('hpsearch')}")

    def objective(self) -> Found:
        spec = self.study.spec
        with redirect_stdout(sys.stderr):  # what its code prints is none of our lines
            self._loaded = load_objective(spec.objective)
        self._loaded.judge_by(spec.metric, spec.direction)
        self._loaded.also_report(spec.also_reported)
        return ok(f"{spec.objective} can be loaded, judged by {spec.metric}")

    def source(self) -> Found:
        assert self._loaded is not None
        if changed := self.study.source_warning(self._loaded):
            return warning(changed, "")
        return ok("the objective's code is what the study was created with")
