"""The description of a promoted model version, in Markdown: where it comes from and how far to trust it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hpsearch.search.console import counted
from hpsearch.search.finalists.expected import LEVEL
from hpsearch.search.promotion.evidence import Evidence
from hpsearch.search.study.summary import format_value
from hpsearch.storage.mlflow.registry import DESCRIPTION_LIMIT
from hpsearch.storage.mlflow.weights_model import CHECKPOINT

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
