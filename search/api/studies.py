"""Functions of the Python interface over the studies of a database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from hpsearch.storage.urls import Addresses

if TYPE_CHECKING:
    from hpsearch.search.api.opening import StudyRow


def list_studies(**where: Unpack[Addresses]) -> list[StudyRow]:
    """Return one row per study of a database, sorted by study name: counts, best value, promotions.

    Example:
        assert "example" in [row.name for row in list_studies()]
    """
    from hpsearch.search.api import opening

    return opening.list_studies(where)


def delete_study(name: str, **where: Unpack[Addresses]) -> list[str]:
    """Delete a study with its finalists, refits, checkpoints and files on this machine; return the deleted names.

    There is no confirmation prompt. Runs and models in MLflow are kept. If the study's settings in the database are
    damaged, only its database rows are deleted: its files, and its finalist and refit studies, are kept too.

    Example:
        assert delete_study("example") == ["example.finalists", "example.refit", "example"]
    """
    from hpsearch.search.api import opening
    from hpsearch.search.study import cleanup
    from hpsearch.storage.errors import DamagedStudyError

    try:
        stored, services = opening.open_study(name, where)
    except DamagedStudyError:
        cleanup.delete_damaged_study(opening.open_services(where)[1], name)
        return [name]
    return cleanup.delete_study(services, stored)
