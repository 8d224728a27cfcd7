"""The evidence of a promotion, and the model card that shows it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import yaml
from optuna.trial import FrozenTrial

from hpsearch.search.console import counted
from hpsearch.search.finalists import Finalists, read_finalists
from hpsearch.search.finalists.refit import Refit, tabulate_refit
from hpsearch.search.finalists.winner import LEVEL
from hpsearch.search.study.ranking import first_value
from hpsearch.search.study.study import StoredStudy, parent_of
from hpsearch.search.study.summary import format_value
from hpsearch.storage.attributes import ATTEMPT, REASON, RUN_ID, RUN_URL
from hpsearch.storage.mlflow import tag_names
from hpsearch.storage.mlflow.artifacts import read_artifact
from hpsearch.storage.mlflow.health import describe_error
from hpsearch.storage.mlflow.model import CHECKPOINT, why_weights_only
from hpsearch.storage.mlflow.registry import DESCRIPTION_LIMIT, Registry
from hpsearch.storage.records.test_openings import Opening, read_opening

if TYPE_CHECKING:
    from mlflow import MlflowClient


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evidence:
    """The lineage of a trial's model; plain values, kept with the promotion.

    Attributes:
        study: name of the study.
        study_id: its number in the database.
        trial: number of the trial.
        run_id: its MLflow run.
        run_url: the page of that run.
        attempts: how often the trial was started.
        metric: the validation metric that was optimised.
        value: what the trial scored by it, chosen as one of many: too good by that choice.
        reason: why the trial ended.
        params: what the sampler suggested.
        config: the resolved training configuration; None where the run has none.
        seed: of the training.
        git_sha: commit of the objective's source; None where there was none.
        git_dirty: whether the source differed from it.
        data_sha256: of the data as it was split.
        finalists: the finalists' table; None without any.
        test: the opening of the test set for this trial, with its scores; None while it is sealed.
        unconfirmed: why the choice of this trial is not confirmed; empty when it is.
        refit: of a refit the search and its trial, the epochs, the seeds and training losses of its runs, and the one
            that was taken; `value` is then of samples that it was trained on. None of a trial of a search.
        weights_only: why the model is but a checkpoint, which takes the objective's code; empty when it is exported.
    """

    study: str
    study_id: int
    trial: int
    run_id: str
    run_url: str
    attempts: int
    metric: str
    value: float | None
    reason: str
    params: dict[str, Any]
    config: dict[str, Any] | None
    seed: int | None
    git_sha: str | None
    git_dirty: bool | None
    data_sha256: str | None
    finalists: dict[str, Any] | None
    test: dict[str, Any] | None
    unconfirmed: str
    weights_only: str = ""
    refit: dict[str, Any] | None = None

    def as_record(self) -> dict[str, Any]:
        """Return it as plain values for the database."""
        return {**asdict(self), "confirmed": not self.unconfirmed}


@dataclass(frozen=True)
class Confirmation:
    """What confirms the choice of a study's trial, read once: finalists, the opening of the test set, the refit.

    Attributes:
        study: the study of the trial: a search, its finalists or a refit.
        search: the search.
        finalists: of the search; None without any.
        opening: of its test set; None while it is sealed.
        refit: the refit that `study` holds; None of any other study.
    """

    study: StoredStudy
    search: StoredStudy
    finalists: Finalists | None
    opening: Opening | None
    refit: Refit | None

    @classmethod
    def read(cls, study: StoredStudy) -> Confirmation:
        """Read it from the database."""
        refit = None if study.spec.refit is None else tabulate_refit(study)
        search = study if refit is None else parent_of(study)
        return cls(study, search, read_finalists(search), read_opening(search.engine, search.study_id), refit)

    def is_opened_for(self, trial: int) -> bool:
        """Whether the test set was opened for the model of this trial; of a refit only that of one run counts."""
        if self.opening is None:
            return False
        if self.refit is not None:
            return self.opening.refit == self.study.spec.name and self.refit.taken == trial
        return self.opening.refit is None and self.opening.trial_number == trial

    def why_unconfirmed(self, trial: int) -> str:
        """Return what is missing before the choice of a trial counts as confirmed; nothing when it does.

        Finalists must have chosen it, on seeds that the search has not seen, and the test set must have been opened
        for it: the best of many trials over-states itself. Of a refit the test set is the only judge.
        """
        if why := self._why_not_chosen(trial) if self.refit is None else self._why_not_taken(self.refit, trial):
            return why
        if self.opening is None:
            return "the test set was not opened for it" + ("" if self.refit is None else " yet")
        if self.refit is None:
            if not self.is_opened_for(trial):
                return f"the test set was opened for {self.opening.subject}"
            if self.opening.finalists is None:
                return "the test set was opened for it without finalists"
        elif not self.is_opened_for(trial):
            return f"the test set was opened for the model of {self.opening.subject}; this refit was not scored on it"
        return "" if self.opening.scores is not None else "the test set was opened and has no scores"

    def _why_not_chosen(self, trial: int) -> str:
        found = self.finalists
        if (of := self.study.spec.finalists_of) is not None:
            return f"it is a finalist of study {of.study}, trained again on another seed to confirm a choice"
        if found is None:
            return "no finalists were trained"
        if not found.decided:
            waiting = f"{found.pending} of their trials have not ended" if found.pending else "none has all seeds"
            return f"the finalists have no winner: {waiting}"
        chose = found.winner if found.winner is not None else " or ".join(map(str, found.front))
        return "" if found.stands(trial) else f"the finalists chose trial {chose}"

    def _why_not_taken(self, refit: Refit, trial: int) -> str:
        if trial != refit.taken:
            return "it is not the run of the median training loss"
        if self.finalists is None or (self.finalists.winner != refit.of and refit.of not in self.finalists.front):
            return f"it is a refit of trial {refit.of}, which is not the winner among the finalists"
        return ""


def gather_evidence(found: Confirmation, trial: FrozenTrial, client: MlflowClient) -> Evidence:
    """Return what is known of a trial and its model now; what MLflow does not give is left out."""
    study, refit = found.study, found.refit
    run_id = str(trial.user_attrs[RUN_ID])
    ran = _resolved_config(client, run_id)
    environment = ran.get("environment") or {}
    return Evidence(
        study=study.spec.name,
        study_id=study.study_id,
        trial=trial.number,
        run_id=run_id,
        run_url=str(trial.user_attrs.get(RUN_URL, "")),
        attempts=int(trial.user_attrs.get(ATTEMPT, 1)),
        metric=study.spec.metric,
        value=first_value(trial),
        reason=str(trial.user_attrs.get(REASON, "")),
        params=dict(trial.params),
        config=ran.get("config"),
        seed=ran.get("seed"),
        git_sha=environment.get("git_sha"),
        git_dirty=environment.get("git_dirty"),
        data_sha256=ran.get("split_hash"),
        finalists=None if found.finalists is None else asdict(found.finalists),
        test=_opening(found.opening) if found.opening and found.is_opened_for(trial.number) else None,
        unconfirmed=found.why_unconfirmed(trial.number),
        weights_only=why_weights_only(client, Registry(client).model_of(run_id)),
        refit=None if refit is None else {"search": found.search.spec.name, **asdict(refit)},
    )


def _opening(opening: Opening) -> dict[str, Any]:
    return {"scores": opening.scores, "opened_at": opening.opened_at.isoformat(), "opened_by": opening.opened_by}


def _resolved_config(client: MlflowClient, run_id: str) -> dict[str, Any]:
    """Return the run's `config.yaml`: configuration, seeds, data and environment of the training."""
    try:
        with read_artifact(client, run_id, "config.yaml") as file:
            found = yaml.safe_load(file)
    except Exception as error:  # no such file, the server is away: the study's own record is the better part
        log.warning("run %s gives no config.yaml: %s", run_id, describe_error(error))
        return {}
    return found if isinstance(found, dict) else {}


_NO_TAGS = ("run_url", "reason", "git_dirty", "weights_only")  # of the evidence


def version_tags(evidence: Evidence) -> dict[str, str]:
    """Return the tags of a model version, by which programs read its evidence."""
    tags = {key: value for key, value in vars(evidence).items() if key not in _NO_TAGS}
    tags |= {"metric": f"val_{evidence.metric}", "confirmed": str(not evidence.unconfirmed).lower()}
    if evidence.git_sha and evidence.git_dirty:
        tags["git_sha"] += " (with changes)"
    # An empty reason is written too: it replaces that of a version which was confirmed since.
    return {
        tag_names.PREFIX + key: json.dumps(value) if isinstance(value, dict) else str(value)
        for key, value in tags.items()
        if value is not None
    }


HEADING = "## Lineage"  # what follows it is ours, what stands before it is the user's


def describe(evidence: Evidence, *, address: str, written: str = "") -> str:
    """Return the description of a version.

    Args:
        evidence: of its trial.
        address: of the version: ``models:/digits/3``.
        written: the description as it is; what a person wrote above our heading stays.
    """
    own = written.partition(HEADING)[0].rstrip()
    room = DESCRIPTION_LIMIT - len(own) - 2
    card = "\n".join(_card(evidence, address))
    if len(card) > room:  # what comes last, the parameters, is in the tags as well
        card = card[: max(room - 4, 0)].rpartition("\n")[0] + "\n..."
    return f"{own}\n\n{card}".lstrip()[:DESCRIPTION_LIMIT]


def _card(evidence: Evidence, address: str) -> list[str]:
    trial = f"trial {evidence.trial}"
    lines = [
        HEADING,
        "",
        f"{f'[{trial}]({evidence.run_url})' if evidence.run_url else trial} of study **{evidence.study}**",
        "",
        *(_refit(evidence.refit) if evidence.refit is not None else ()),
        *_confirmation(evidence),
        "",
        *_table(("", ""), _facts(evidence)),
    ]
    if evidence.finalists is not None:
        lines += ["", *_finalists(evidence.finalists, evidence.metric)]
    lines += ["", _loading(evidence, address), ""]
    lines += _table(("parameter", "value"), [(key, format_value(value)) for key, value in evidence.params.items()])
    return lines


def _loading(evidence: Evidence, address: str) -> str:
    if not evidence.weights_only:
        return f'Load it with `mlflow.pytorch.load_model("{address}")`.'
    return (
        f"It cannot be exported ({evidence.weights_only}): it is its checkpoint, `{CHECKPOINT}`, which takes the code "
        "of the objective: `hpsearch.objectives.fit.restore(objective, torch.load(path, weights_only=True))`."
    )


def _refit(refit: dict[str, Any]) -> list[str]:
    """Return what a refit is, and the training loss of each of its runs."""
    runs = [
        (f"**{number}**" if number == refit["taken"] else str(number), str(seed), _number(loss))
        for number, (seed, loss) in enumerate(zip(refit["seeds"], refit["losses"], strict=True))
    ]
    return [
        f"A refit: the configuration of trial {refit['of']} of study **{refit['search']}**, trained on train and "
        f"validation for {counted(refit['epochs'], 'epoch')}, as its fresh runs chose. Of its runs that of the median "
        "training loss was taken.",
        "",
        *_table(("run", "seed", "training loss"), runs),
        "",
    ]


def _confirmation(evidence: Evidence) -> list[str]:
    if evidence.refit is not None:
        if evidence.unconfirmed:
            return [f"**Not seen by the test set**: {evidence.unconfirmed}."]
        return ["Confirmed: its configuration was chosen on fresh seeds, and the test set was opened for it, once."]
    if evidence.unconfirmed:
        return [f"**Unconfirmed**: {evidence.unconfirmed}. Its value is that of the best of many, and too good by it."]
    return ["Confirmed: it was chosen on fresh seeds, and the test set was opened for it, once."]


def _facts(evidence: Evidence) -> list[tuple[str, str]]:
    measured = "in the search" if evidence.refit is None else "on samples that it was trained on"
    facts: list[tuple[str, object]] = [(f"val {evidence.metric}, {measured}", _number(evidence.value))]
    expected = (evidence.finalists or {}).get("expected")
    chosen = evidence.trial if evidence.refit is None else evidence.refit["of"]
    if expected is not None and chosen == (evidence.finalists or {}).get("winner"):
        between = f"{_number(expected['low'])} to {_number(expected['high'])}"
        facts.append((f"{evidence.metric} to expect on new data ({LEVEL:.0%})", between))
    if evidence.test is not None and evidence.test["scores"]:
        facts += [(f"test {name}", _number(value)) for name, value in evidence.test["scores"].items()]
        facts.append(("test set opened", f"{evidence.test['opened_at'][:16]} by {evidence.test['opened_by']}"))
    changed = ", with uncommitted changes" if evidence.git_dirty else ""
    facts += [
        ("attempts", evidence.attempts),
        ("seed", evidence.seed),
        ("code", evidence.git_sha and f"git {evidence.git_sha}{changed}"),
        ("data", evidence.data_sha256 and f"sha256 {evidence.data_sha256}"),
    ]
    return [(name, str(value)) for name, value in facts if value is not None]


def _finalists(finalists: dict[str, Any], metric: str) -> list[str]:
    seeds = finalists["seeds"]
    rows = [
        (
            f"**{row['trial']}**" if row["trial"] == finalists["winner"] else str(row["trial"]),
            _number(row["search_value"]),
            *map(_number, row["values"]),
            _number(row["mean"]),
            _number(row["spread"]),
        )
        for row in finalists["rows"]
    ]
    columns = ("finalist", "search", *(f"seed {seed}" for seed in seeds), "mean", "spread")
    tie = f"; trials {', '.join(map(str, finalists['tie']))} tie with it" if finalists["tie"] else ""
    chosen = "not chosen yet" if finalists["winner"] is None else f"trial {finalists['winner']}{tie}"
    anew = "seeds and divisions" if finalists.get("expected") else "seeds"
    return [f"Finalists by val {metric}, trained again on fresh {anew}: {chosen}.", "", *_table(columns, rows)]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(columns)
    return [_row(head), _row(["---"] * len(head)), *map(_row, rows)]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
