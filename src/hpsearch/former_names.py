"""Former names of settings, with their current names.

Former names in stored specs and configurations are translated. Former names in new input are rejected with an error
that contains the current name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SETTINGS = {"stop_when": "min_expected_gain"}
_SAMPLERS = {"curves": "freeze_thaw"}
_TRAINING = {"accumulate": "gradient_accumulation_steps", "shard_above": "shard_checkpoint_above_gib"}
RENAMED_VARIABLES = {"HPSEARCH_STALL": "HPSEARCH_STALL_FACTOR"}

# Current name by former name, for error messages.
CURRENT_NAMES = {
    **_SETTINGS,
    **_SAMPLERS,
    **_TRAINING,
    "open-test": "evaluate-test",
    "--stop-when": "--min-expected-gain",
    "--stall": "--stall-factor",
    "--leave-when-idle": "--idle-timeout",
    "stall": "stall_factor",
    "ByLength": "LengthGroupedSampler",
    "padded": "pad_collate",
}


def translate_spec(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored study spec, with each former name replaced by the current one.

    An option that the sampler of an earlier version did not have gets the value with which the sampler does not change.
    """
    spec = _with_current_keys(stored, _SETTINGS)
    if isinstance(sampler := spec.get("sampler"), Mapping):
        name = _SAMPLERS.get(sampler["name"], sampler["name"])
        later = {"near_default_fraction": 0.0} if name == "freeze_thaw" else {}
        spec["sampler"] = {**later, **sampler, "name": name}
    return spec


def translate_training_config(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored training configuration, with each former name replaced by the current one."""
    return _with_current_keys(stored, _TRAINING)


def _with_current_keys(stored: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    return {key if (now := renamed.get(key, key)) in stored else now: value for key, value in stored.items()}
