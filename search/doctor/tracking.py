"""MLflow: whether it answers, and takes artifacts."""

from __future__ import annotations

import time
from functools import partial
from importlib.metadata import version

from hpsearch.search.doctor.check import Check, Found, failed, ok, warning
from hpsearch.storage.errors import StorageError
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.health import check_server, one_line, server_version
from hpsearch.storage.mlflow.probe import remove_probe, write_probe


def tracking_checks(uri: str | None, setting: str, *, needs: tuple[str, ...], otherwise: Found) -> list[Check]:
    """Return the checks of a tracking server.

    Args:
        uri: its address.
        setting: where that was given, for messages.
        needs: what the first check needs.
        otherwise: what to say where there is no address.
    """
    return [
        Check("mlflow", lambda: otherwise if uri is None else _answers(uri, setting), needs),
        Check("artifacts", partial(_artifacts, uri or ""), ("mlflow",)),
    ]


def _answers(uri: str, setting: str) -> Found:
    began = time.perf_counter()
    check_server(uri, setting=setting)
    took = 1000 * (time.perf_counter() - began)
    there, here = server_version(uri), version("mlflow")
    said = f"MLflow {there or 'of an unknown version'} at {uri}: answers in {took:.0f} ms"
    if there is None or there.split(".")[0] == here.split(".")[0]:
        return ok(said)
    return warning(f"{said}; MLflow is {here} here", "install the same series on both sides")


def _artifacts(uri: str) -> Found:
    tracking = Tracking(uri)
    try:
        place = write_probe(tracking)
    except StorageError:
        raise
    except Exception as error:  # a store of artifacts has errors of its own
        remedy = "look into the server's log, and whether it may write to its --artifacts-destination"
        return failed(f"cannot be written: {one_line(error)}", remedy)
    try:
        remove_probe(tracking, place)
    except Exception as error:  # as above
        return warning(f"can be written, not removed: {one_line(error)}", f"remove {place} by hand")
    return ok("written and removed")
