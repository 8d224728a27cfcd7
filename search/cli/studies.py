"""``hpsearch studies``: a line per study."""

from __future__ import annotations

import typer

from search.cli import options as o


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(studies)


def studies(storage_url: o.StorageUrl = None, home: o.Home = None) -> None:
    """List the studies and where they stand."""
    from rich.table import Table

    from search.cli.open_study import notice_promotions, open_for_reading
    from search.console import PlainConsole, command
    from search.spec.spec import parse_spec
    from storage.attributes import SPEC, STOPPED
    from storage.records.promotions import promotions_of
    from storage.study_storage.opening import engine_of
    from storage.trials.progress import read_progress

    services, storage = open_for_reading(storage_url, None, home)
    notice_promotions(services, storage)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("study", "objective", "trials", "complete", "pruned", "failed", "running", "best", "promoted"):
        table.add_column(column, justify="left" if column in {"study", "objective", "best", "promoted"} else "right")
    for frozen in sorted(storage.get_all_studies(), key=lambda s: s.study_name):
        stored = frozen.user_attrs.get(SPEC)
        if stored is None:
            table.add_row(frozen.study_name, "(not made by hpsearch)")
            continue
        spec = parse_spec(stored)
        at = read_progress(engine_of(storage), frozen._study_id, spec.direction)
        best = "" if at.best_value is None else f"{spec.metric} {at.best_value:.4f} (trial {at.best_number})"
        counts = (f"{at.finished}/{spec.n_trials}", at.complete, at.pruned, at.fail, len(at.running))
        name = f"{spec.name} (finalists)" if spec.finalists_of else spec.name
        name += " (stopped)" if frozen.user_attrs.get(STOPPED) else ""
        held = promotions_of(engine_of(storage), frozen._study_id)
        promoted = ", ".join(f"{p.model_name}@{p.alias} (trial {p.trial_number})" for p in held if p.ended_at is None)
        table.add_row(name, spec.objective, *map(str, counts), best, promoted)
    if table.row_count:
        PlainConsole().print(table)
    else:
        typer.echo(f"no studies yet; start one with: {command('run', 'digits')}")
