"""The model card, which shows the evidence for a promoted model as the description of its model version."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from hpsearch.search.console import pluralize
from hpsearch.search.finalists.winner import COVERAGE
from hpsearch.search.promotion.evidence import Evidence
from hpsearch.search.study.summary import format_value
from hpsearch.storage.display import escape_markdown, format_markdown_code, format_markdown_link
from hpsearch.storage.mlflow.model import CHECKPOINT_FILE
from hpsearch.storage.mlflow.registry import DESCRIPTION_LIMIT

LINEAGE_HEADING = "## Lineage"  # the text above it is the user's


def describe_evidence(evidence: Evidence, *, address: str, written: str = "") -> str:
    """Return the description of a model version: its model card, in Markdown.

    Args:
        evidence: evidence for the trial of the version.
        address: URI of the version, such as ``models:/digits/3``.
        written: current description of the version; the result keeps the text above `LINEAGE_HEADING`.
    """
    kept = written.partition(LINEAGE_HEADING)[0].rstrip()
    room = DESCRIPTION_LIMIT - len(kept) - 2
    card = "\n".join(_format_card(evidence, address))
    if len(card) > room:  # the parameters at the end are in the tags too
        card = card[: max(room - 4, 0)].rpartition("\n")[0] + "\n..."
    return f"{kept}\n\n{card}".lstrip()[:DESCRIPTION_LIMIT]


def _format_card(evidence: Evidence, address: str) -> list[str]:
    trial = f"trial {evidence.trial}"
    lines = [
        LINEAGE_HEADING,
        "",
        f"{format_markdown_link(trial, evidence.run_url)} of study **{escape_markdown(evidence.study)}**",
        "",
        *(_format_refit(evidence.refit) if evidence.refit is not None else ()),
        *_format_confirmation(evidence),
        "",
        *_make_table(("", ""), _escape_rows(_list_facts(evidence))),
    ]
    if evidence.finalists is not None:
        lines += ["", *_format_finalists(evidence.finalists, evidence.metric)]
    lines += ["", _format_loading(evidence, address), ""]
    params = [(key, format_value(value)) for key, value in evidence.params.items()]
    if evidence.config_schedule is not None:
        lines += [*_format_schedule(evidence.config_schedule), ""]
    lines += _make_table(("parameter", "value"), _escape_rows(params))
    return lines


def _format_loading(evidence: Evidence, address: str) -> str:
    if not evidence.weights_only:
        # Quoted, because other tools register models of any name.
        verified = f"hpsearch.load_model({json.dumps(address.removeprefix('models:/'))})"
        call = f"mlflow.pytorch.load_model({json.dumps(address)})"
        source = evidence.export_source
        served = (
            f"It is the module that {format_markdown_code(source)} returned, not the trained model. " if source else ""
        )
        return (
            f"{served}Load it with {format_markdown_code(verified)}, which verifies its files, or, without hpsearch, "
            f"with {format_markdown_code(call)}."
        )
    return (
        f"The model could not be exported ({escape_markdown(evidence.weights_only)}). Load its checkpoint "
        f"`{CHECKPOINT_FILE}` with the objective's code: "
        "`hpsearch.objectives.fit.restore_model(objective, torch.load(path, weights_only=True))`."
    )


def _format_refit(refit: dict[str, Any]) -> list[str]:
    """Return the lines of the model card about a refit, with the training loss of each run."""
    runs = [
        (f"**{number}**" if number == refit["taken"] else str(number), str(seed), _format_number(loss))
        for number, (seed, loss) in enumerate(zip(refit["seeds"], refit["losses"], strict=True))
    ]
    return [
        f"A refit: the configuration of trial {refit['of']} of study **{escape_markdown(refit['search'])}**, trained "
        f"on training and validation data together for {pluralize(refit['epochs'], 'epoch')}, the median of the best "
        "epochs on new seeds. The run with the median training loss was selected.",
        "",
        *_make_table(("run", "seed", "training loss"), runs),
        "",
    ]


def _format_confirmation(evidence: Evidence) -> list[str]:
    why = escape_markdown(evidence.unconfirmed)
    if evidence.refit is not None:
        if why:
            return [f"**Not evaluated on the test set**: {why}."]
        return ["Confirmed: its configuration won on new seeds, and it was evaluated once on the test set."]
    if why:
        return [f"**Unconfirmed**: {why}. Its value is the best of many and has selection bias."]
    return ["Confirmed: it won on new seeds, and it was evaluated once on the test set."]


def _list_facts(evidence: Evidence) -> list[tuple[str, str]]:
    measured = "in the search" if evidence.refit is None else "on samples that it was trained on"
    facts: list[tuple[str, object]] = [(f"val {evidence.metric}, {measured}", _format_number(evidence.value))]
    expected = (evidence.finalists or {}).get("expected")
    chosen = evidence.trial if evidence.refit is None else evidence.refit["of"]
    if expected is not None and chosen == (evidence.finalists or {}).get("winner"):
        interval = f"{_format_number(expected['low'])} to {_format_number(expected['high'])}"
        facts.append((f"expected {evidence.metric} on new data ({COVERAGE:.0%})", interval))
    if evidence.test is not None and evidence.test["scores"]:
        facts += [(f"test {name}", _format_number(value)) for name, value in evidence.test["scores"].items()]
        facts.append(("test set evaluated", f"{evidence.test['opened_at'][:16]} by {evidence.test['opened_by']}"))
    changed = ", with uncommitted changes" if evidence.git_dirty else ""
    facts += [
        ("attempts", evidence.attempts),
        ("seed", evidence.seed),
        ("code", evidence.git_sha and f"git {evidence.git_sha}{changed}"),
        ("data", evidence.data_sha256 and f"sha256 {evidence.data_sha256}"),
        ("files of the model", evidence.model_sha256 and f"sha256 {evidence.model_sha256}"),
    ]
    return [(name, str(value)) for name, value in facts if value is not None]


def _format_schedule(schedule: list[dict[str, Any]]) -> list[str]:
    lines = ["The configuration changed during the training (population-based training):", ""]
    rows = []
    for part in schedule:
        settings = ", ".join(f"{name} = {format_value(value)}" for name, value in part["params"].items())
        rows.append((str(part["epoch"] + 1), str(part["trial"]), settings))
    return [*lines, *_make_table(("from epoch", "trained by trial", "configuration"), _escape_rows(rows))]


def _format_finalists(finalists: dict[str, Any], metric: str) -> list[str]:
    seeds = finalists["seeds"]
    rows = [
        (
            f"**{row['trial']}**" if row["trial"] == finalists["winner"] else str(row["trial"]),
            _format_number(row["search_value"]),
            *map(_format_number, row["values"]),
            _format_number(row["mean"]),
            _format_number(row["spread"]),
        )
        for row in finalists["rows"]
    ]
    columns = ("finalist", "search", *(f"seed {seed}" for seed in seeds), "mean", "std")
    tied = finalists["tie"]
    tie = f", tied with {'trial' if len(tied) == 1 else 'trials'} {', '.join(map(str, tied))}" if tied else ""
    winner = "no winner yet" if finalists["winner"] is None else f"winner trial {finalists['winner']}{tie}"
    is_resplit = any(run and run["divided"] for row in finalists["rows"] for run in row.get("scored", ()))
    varied = "seeds and splits" if is_resplit else "seeds"
    return [
        f"Finalists by val {escape_markdown(metric)}, retrained on new {varied}: {winner}.",
        "",
        *_make_table(columns, rows),
    ]


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _make_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(columns)
    return [_format_row(head), _format_row(["---"] * len(head)), *map(_format_row, rows)]


def _format_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escape_rows(rows: Iterable[Iterable[str]]) -> list[list[str]]:
    return [[escape_markdown(cell) for cell in row] for row in rows]
