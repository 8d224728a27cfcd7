"""Settings that FSDP does not support, and settings that need one of the strategies."""

from __future__ import annotations

from typing import Protocol

from hpsearch.objectives.errors import ObjectiveError

_UNSHARDABLE_OPTIMIZERS = ("lamb", "lars", "ranger", "lookahead", "sam")  # their kernels need unsharded weights

_STRATEGY_AND_DEFAULT: dict[str, tuple[str, bool | None]] = {
    "static_graph": ("ddp", False),
    "bucket_cap_mb": ("ddp", None),
    "cpu_offload": ("fsdp", False),
    "reshard_after_forward": ("fsdp", True),
    "shard_mesh_size": ("fsdp", None),
    "sync_each_micro_batch": ("fsdp", False),
}


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
    def find_unused_parameters(self) -> bool | None: ...
    @property
    def static_graph(self) -> bool: ...
    @property
    def compile(self) -> bool: ...
    @property
    def gradient_accumulation_steps(self) -> int: ...


def check_strategy_settings(config: _Settings) -> None:
    """Reject settings that the strategy ``fsdp`` does not support, and settings that need another strategy.

    Raises:
        ObjectiveError: the settings cannot be combined; the message has the alternatives.
    """
    for name, (strategy, default) in _STRATEGY_AND_DEFAULT.items():
        if (value := getattr(config, name)) != default and config.strategy != strategy:
            raise ObjectiveError(f"{name}={value!r} needs strategy={strategy!r}, not {config.strategy!r}")
    if config.static_graph and config.find_unused_parameters:
        raise ObjectiveError(
            "static_graph=True finds unused parameters in the first step, and cannot be combined with "
            "find_unused_parameters=True; remove find_unused_parameters"
        )
    # DDP records the graph while it reduces the gradients of the first backward pass.
    if config.static_graph and config.compile:
        raise ObjectiveError("static_graph=True is not available with compile=True; remove one of them")
    if config.static_graph and config.gradient_accumulation_steps > 1:
        raise ObjectiveError(
            "static_graph=True is not available with gradient_accumulation_steps > 1, because a resume would not be "
            "exact; remove one of them"
        )
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
