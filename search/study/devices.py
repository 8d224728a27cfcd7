"""What the trials of a study were trained on, where that is more than one device each, and how fast."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from itertools import groupby

from hpsearch.search.console import pluralize
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import DEVICE_SPEED
from hpsearch.storage.trials.history import DEVICE_COUNT_SEPARATOR, read_devices

_NAMED = 3  # trials that changed devices, of many
_RATE, _EFFICIENCY = "samples_per_second_per_device", "scaling_efficiency"


@dataclass(frozen=True)
class Devices:
    """What the trials of a study were trained on.

    Attributes:
        trials: how many there are by the devices of their last attempt, such as "2 x cuda", the most first.
        rate: samples per second and device, the median of the trials that several trained; None where none has told.
        efficiency: the share of a step's time in which a device does not wait for the others, likewise.
        changed: the devices of the attempts at each trial that was resumed on another number of them, by its number.
    """

    trials: dict[str, int]
    rate: float | None
    efficiency: float | None
    changed: dict[int, list[str]]


def summarize_devices(study: StoredStudy) -> Devices | None:
    """Return what the trials of a study were trained on; None where each had one device."""
    found = {
        number: [_kind(name) for name in names] for number, names in read_devices(study.engine, study.study_id).items()
    }
    if not any(_count(device) > 1 for devices in found.values() for device in devices):
        return None
    paces = [trial.user_attrs[DEVICE_SPEED] for trial in study.trials() if DEVICE_SPEED in trial.user_attrs]
    return Devices(
        trials=dict(Counter(devices[-1] for devices in found.values()).most_common()),
        rate=_median([pace[_RATE] for pace in paces if _RATE in pace]),
        efficiency=_median([pace[_EFFICIENCY] for pace in paces if _EFFICIENCY in pace]),
        changed={number: devices for number, devices in found.items() if len({_count(name) for name in devices}) > 1},
    )


def summarize_throughput(epochs: list[dict[str, float]]) -> dict[str, object]:
    """Return the attribute that tells how fast several devices trained a trial; nothing where one did.

    Args:
        epochs: the metrics of each epoch.
    """
    medians = {name: _median([each[name] for each in epochs if name in each]) for name in (_RATE, _EFFICIENCY)}
    told = {name: float(f"{value:.4g}") for name, value in medians.items() if value is not None}
    return {DEVICE_SPEED: told} if told else {}


def format_devices(devices: Devices) -> str:
    """Return the devices, their pace and the trials that changed them, in a line."""
    several = len(devices.trials) > 1
    parts = [", ".join(f"{kind} ({pluralize(n, 'trial')})" if several else kind for kind, n in devices.trials.items())]
    parts += [] if devices.rate is None else [f"{_rate(devices.rate)} samples per second and device"]
    parts += [] if devices.efficiency is None else [f"scaling efficiency {devices.efficiency:.2f}"]
    parts += [
        f"trial {number} was resumed on another number ({', then '.join(kind for kind, _ in groupby(changed))})"
        for number, changed in list(devices.changed.items())[:_NAMED]
    ]
    parts += [f"and {more} more were"] if (more := len(devices.changed) - _NAMED) > 0 else []
    return "; ".join(parts)


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _kind(device: str) -> str:
    """Which of a machine's devices it was says nothing here."""
    return device.partition(":")[0]


def _count(device: str) -> int:
    number, times, _ = device.partition(DEVICE_COUNT_SEPARATOR)
    return int(number) if times else 1


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
