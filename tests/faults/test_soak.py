"""A small soak test for CI. Run larger ones manually with soak.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.breakable import Breakable
from tests.faults.harness import Arena, wire
from tests.faults.soak import soak

pytestmark = [pytest.mark.soak, pytest.mark.faults, pytest.mark.xdist_group("trainings")]


@pytest.mark.parametrize("asha", [False, True], ids=["to the end", "paused at rungs"])
def test_a_fleet_under_random_faults_loses_nothing(
    broken_arena: Arena, breakable: Breakable, undisturbed: Callable[[int], list[list[float]]], asha: bool
) -> None:
    with wire(broken_arena.tracking_uri) as (line, broken_arena.tracking_uri):
        print(soak(broken_arena, breakable, line, undisturbed(12), workers=3, seed=1, period=0.3, most=25, asha=asha))
