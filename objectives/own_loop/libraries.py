"""What other libraries keep of a process for as long as it lives, and a trial must not inherit from the one before."""

from __future__ import annotations

import sys


def forget() -> None:
    """Lets libraries that are imported already find out anew which ranks there are.

    The ranks may have closed their connections and opened new ones since, and a trial may want another precision.
    """
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    if groups := sys.modules.get("deepspeed.utils.groups"):
        groups._release_process_group_references()
