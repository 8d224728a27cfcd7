"""Mixed precision: autocast, and loss scaling where the type needs it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_TYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Runs forward passes in the configured type. Only fp16 scales the loss: bf16 has the range of fp32."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._device = device.type
        self._dtype = _TYPES[name]
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    @property
    def scaled(self) -> bool:
        """Whether losses are scaled, and steps with an infinite gradient skipped."""
        return self.scaler.is_enabled()

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device, dtype=self._dtype)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of `loss`, scaled, to the parameters' gradients."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's

    def unscale(self, optimizer: Optimizer) -> None:
        """Makes the gradients the true ones, for whoever looks at them or clips them."""
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Steps the optimizer; False when loss scaling skipped the step."""
        if not self.scaled:
            optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return bool(self.scaler.get_scale() >= before)

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state; empty when it is off."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        if state:
            self.scaler.load_state_dict(state)
