"""The place of the checkpoints: whether files can be written there and removed."""

from __future__ import annotations

from functools import partial

from hpsearch.search.doctor.check import Check, Found, ok
from hpsearch.storage.checkpoints.store import Checkpoints


def checkpoint_check(url: str, setting: str, *, needs: tuple[str, ...]) -> Check:
    """Return the check of a URL, which was given by `setting`."""
    return Check("checkpoints", partial(_writable, url, setting), needs)


def _writable(url: str, setting: str) -> Found:
    checkpoints = Checkpoints(url, setting=setting)
    checkpoints.check()
    return ok(f"written and removed in {checkpoints.url}")
