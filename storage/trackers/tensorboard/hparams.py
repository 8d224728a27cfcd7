"""TensorBoard's HParams tab: the parameters and the outcome of each trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpsearch.storage.trials.finishing import Outcome


def make_session_start(params: Mapping[str, Any], *, trial: str, at: float) -> Any:
    """Return the summary that adds a trial to the table of the HParams tab.

    Args:
        params: the parameters of the trial; values other than numbers and booleans are converted to text.
        trial: the name of the trial's row in the table.
        at: the start of the trial as unix time in seconds.
    """
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    values = {name: value if isinstance(value, int | float) else str(value) for name, value in params.items()}
    return hparams_pb(values, trial_id=trial, start_time_secs=at)


def make_session_end(outcome: Outcome, at: float) -> Any:
    """Return the summary value that sets the outcome of a trial in the HParams tab, at unix time `at` in seconds."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    status = STATUS_SUCCESS if outcome in {Outcome.COMPLETE, Outcome.PRUNED} else STATUS_FAILURE
    data = HParamsPluginData(session_end_info=SessionEndInfo(status=status, end_time_secs=at))
    summary_metadata = metadata.create_summary_metadata(data)
    tag, tensor = metadata.SESSION_END_INFO_TAG, metadata.NULL_TENSOR
    return Summary.Value(tag=tag, metadata=summary_metadata, tensor=tensor)
