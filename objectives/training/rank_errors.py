"""Errors of ranks: their transport to the other ranks, and which of them only follow from the failure of another."""

from __future__ import annotations

import gc
import importlib
import json
import re
import traceback

import torch.distributed as dist

from hpsearch.causes import iterate_causes
from hpsearch.objectives.errors import get_message

_TRACEBACK_CHARACTERS = 20_000  # maximum length of a traceback that is sent to the other ranks


class RankLostError(RuntimeError):
    """Error for a rank that exited or does not answer. The other ranks cannot continue; their processes must end."""


class RankError(RuntimeError):
    """Error for the failure of another rank; the message contains the error of that rank."""


class RankZeroError(RuntimeError):
    """Error on the other ranks if rank 0 raised an error in `run_on_rank_zero`."""


def is_consequence(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, only follows from the failure of another rank."""
    return any(
        isinstance(each, (RankZeroError, dist.DistError)) or (isinstance(each, RuntimeError) and "gloo" in str(each))
        for each in iterate_causes(error)
    )


def to_json(error: BaseException, rank: int) -> str:
    """Return an error as JSON, so that other ranks can raise it."""
    kind = type(error)
    attributes = {k: v for k, v in vars(error).items() if isinstance(v, (str, int, float, bool, type(None)))}
    where = {"rank": rank, "module": kind.__module__, "name": kind.__qualname__}
    trace = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS:]
    return json.dumps({**where, "text": get_message(error), "attributes": attributes, "traceback": trace})


def from_json(described: str, own: BaseException) -> BaseException:
    """Return the error of another rank, with its traceback as a note; or the error `own` if both are equal."""
    other = json.loads(described)
    if other["name"] == type(own).__qualname__ and other["text"] == str(own):
        return own
    text = f"{other['text']} (on rank {other['rank']})"
    error: BaseException = RankError(f"{other['name']}: {text}")
    if other["module"].startswith("hpsearch.objectives."):
        kind = getattr(importlib.import_module(other["module"]), other["name"], RankError)
        error = kind.__new__(kind)
        error.args = (text,)
        vars(error).update(other["attributes"])
    error.add_note(f"Traceback on rank {other['rank']}:\n{other['traceback']}")
    return error


def format_one_line(error: BaseException) -> str:
    """Return an error as one line, without the position in gloo's source."""
    text = re.sub(r"\[/\S*gloo/\S+\] ", "", str(error))
    return " ".join(f"{type(error).__name__}: {text}".split())[:500]


def release_references(error: BaseException) -> None:
    """Release the objects that the stack frames of an error reference.

    Gloo closes a connection only when its last reference is released, and the other ranks wait until it is closed.
    """
    for each in iterate_causes(error):
        traceback.clear_frames(each.__traceback__)
    gc.collect()
