"""Settings that FSDP does not support, and settings that need FSDP."""

from __future__ import annotations

from typing import Protocol

from hpsearch.objectives.errors import ObjectiveError

_UNSHARDABLE_OPTIMIZERS = ("lamb", "lars", "ranger", "lookahead", "sam")  # their kernels need unsharded weights


class _Settings(Protocol):
    """The fields of a `TrainConfig` that are checked here; the module of `TrainConfig` imports this one."""

    @property
    def strategy(self) -> str: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def channels_last(self) -> bool: ...
    @property
    def cpu_offload(self) -> bool: ...


def check_fsdp_settings(config: _Settings) -> None:
    """Reject settings that the strategy ``fsdp`` does not support, and ``cpu_offload`` with another strategy.

    Raises:
        ObjectiveError: the settings cannot be combined; the message has the alternatives.
    """
    if config.cpu_offload and config.strategy != "fsdp":
        raise ObjectiveError(f"cpu_offload=True needs strategy='fsdp', not {config.strategy!r}")
    if config.strategy != "fsdp":
        return
    if config.optimizer in _UNSHARDABLE_OPTIMIZERS:
        raise ObjectiveError(
            f"optimizer={config.optimizer!r} needs unsharded weights, but strategy='fsdp' shards them; use 'adamw', "
            "'muon' or another optimizer, or strategy='ddp'"
        )
    if config.channels_last:
        raise ObjectiveError("channels_last=True is not available with strategy='fsdp'; set channels_last=False")
    if config.precision == "fp16":
        raise ObjectiveError("precision='fp16' is not available with strategy='fsdp'; use 'bf16' or strategy='ddp'")
