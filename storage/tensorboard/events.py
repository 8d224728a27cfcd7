"""What TensorBoard is told of a trial, as events: scalars, texts, and what fills its HParams tab."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpsearch.storage.trials.outcome import Outcome


def tag_of(metric: str) -> str:
    """Return a metric's tag: train and val of the same one share a plot, as those of `hpsearch train` do."""
    kind, _, name = metric.partition("_")
    return f"{name}/{kind}" if kind in {"train", "val"} and name else metric


def scalars(values: Mapping[str, float], *, step: int, at: float) -> Any:
    """Return the event of metrics by their tags, at unix seconds `at`."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="scalars"))
    return _event([Summary.Value(tag=t, simple_value=v, metadata=metadata) for t, v in values.items()], step, at)


def text(tag: str, words: str, *, step: int, at: float) -> Any:
    """Return the event of a text, in Markdown."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[words.encode()], tensor_shape=shape)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return _event([Summary.Value(tag=tag, tensor=tensor, metadata=metadata)], step, at)


def table(values: Mapping[str, str]) -> str:
    """Return tags as a table in Markdown."""
    rows = [f"| {name} | {value.replace('|', '&#124;')} |" for name, value in values.items()]
    return "\n".join(["| tag | value |", "|---|---|", *rows])


def session_start(params: Mapping[str, Any], *, trial: str, at: float) -> Any:
    """Return the event by which a trial is a row of the HParams tab.

    Args:
        params: a column each; what is neither number nor truth value is shown as text.
        trial: what the row is called.
        at: when it began, in unix seconds.
    """
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

    info = SessionStartInfo(group_name=trial, start_time_secs=at)
    for name, value in params.items():
        if isinstance(value, bool):
            info.hparams[name].bool_value = value
        elif isinstance(value, int | float):
            info.hparams[name].number_value = value
        else:
            info.hparams[name].string_value = str(value)
    return _hparams(metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=info), at)


def session_end(outcome: Outcome, *, at: float) -> Any:
    """Return the event that ends a trial's row, at unix seconds `at`."""
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    status = STATUS_SUCCESS if outcome in {Outcome.COMPLETE, Outcome.PRUNED} else STATUS_FAILURE
    info = SessionEndInfo(status=status, end_time_secs=at)
    return _hparams(metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=info), at)


def start_tag() -> str:
    """Return the tag of `session_start`."""
    from tensorboard.plugins.hparams import metadata

    return str(metadata.SESSION_START_INFO_TAG)


def _hparams(tag: str, data: Any, at: float) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata

    made = metadata.create_summary_metadata(data)
    return _event([Summary.Value(tag=tag, metadata=made, tensor=metadata.NULL_TENSOR)], 0, at)


def _event(values: list[Any], step: int, at: float) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Event(wall_time=at, step=step, summary=Summary(value=values))
