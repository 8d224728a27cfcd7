"""Which release a study was made by: workers of one release train the same numbers, those of another may not."""

from __future__ import annotations

from importlib.metadata import version

from hpsearch.search.errors import SearchError
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import RELEASE


def note_release(study: StoredStudy) -> None:
    """Note at a study that is new which release made it."""
    study.set_attr(RELEASE, version("hpsearch"))


def check_release(study: StoredStudy) -> None:
    """Refuse to train trials of a study that a release of another series made.

    Raises:
        SearchError: it names both.
    """
    made, own = study.attrs.get(RELEASE), version("hpsearch")
    if made is not None and _series(made) != _series(own):
        raise SearchError(
            f"study {study.spec.name!r} was made by hpsearch {made}, whose trials may come to other numbers than those "
            f"of {own} here: install hpsearch {made} on this machine"
        )


def _series(release: str) -> list[str]:
    """What changes when numbers may: the first part, and before 1.0 the second one as well."""
    parts = release.split(".")
    return parts[:2] if parts[0] == "0" else parts[:1]
