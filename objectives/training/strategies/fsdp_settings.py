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
    @property
    def sync_each_micro_batch(self) -> bool: ...


def check_fsdp_settings(config: _Settings) -> None:
    """Reject settings that the strategy ``fsdp`` does not support, and settings that need it with another strategy.

    Raises:
        ObjectiveError: the settings cannot be combined; the message has the alternatives.
    """
    if config.strategy != "fsdp":
        for name, value in (
            ("cpu_offload", config.cpu_offload),
            ("sync_each_micro_batch", config.sync_each_micro_batch),
        ):
            if value:
                raise ObjectiveError(f"{name}=True needs strategy='fsdp', not {config.strategy!r}")
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
