"""Devices and training speed of studies whose trials use more than one device each."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from itertools import groupby

from hpsearch.search.console import pluralize
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import DEVICE_SPEED
from hpsearch.storage.trials.history import DEVICE_COUNT_SEPARATOR, read_devices

_MAX_LISTED = 3  # trials that changed devices, in the text
_RATE, _EFFICIENCY = "samples_per_second_per_device", "scaling_efficiency"


@dataclass(frozen=True)
class Devices:
    """Devices of the trials of a study.

    Attributes:
        trials: number of trials per devices of the last attempt, such as "2 x cuda", most frequent first.
        rate: samples per second and device, as the median over trials with several devices; None if unknown.
        efficiency: share of the step time in which a device does not wait for others, median as in `rate`.
        changed: devices of each attempt, by the number of a trial that was resumed on another number of devices.
    """

    trials: dict[str, int]
    rate: float | None
    efficiency: float | None
    changed: dict[int, list[str]]


def summarize_devices(study: StoredStudy) -> Devices | None:
    """Return the devices of the trials of a study; None if each trial used one device."""
    attempts = read_devices(study.engine, study.study_id)
    found = {number: [_strip_index(name) for name in names] for number, names in attempts.items()}
    if not any(_count_devices(device) > 1 for devices in found.values() for device in devices):
        return None
    speeds = [trial.user_attrs[DEVICE_SPEED] for trial in study.trials() if DEVICE_SPEED in trial.user_attrs]
    return Devices(
        trials=dict(Counter(devices[-1] for devices in found.values()).most_common()),
        rate=_get_median(speeds, _RATE),
        efficiency=_get_median(speeds, _EFFICIENCY),
        changed={number: names for number, names in found.items() if len(set(map(_count_devices, names))) > 1},
    )


def summarize_throughput(epochs: list[dict[str, float]]) -> dict[str, object]:
    """Return the trial attribute with the speed of several devices; empty for one device.

    Args:
        epochs: the metrics of each epoch.
    """
    medians = {name: _get_median(epochs, name) for name in (_RATE, _EFFICIENCY)}
    known = {name: float(f"{value:.4g}") for name, value in medians.items() if value is not None}
    return {DEVICE_SPEED: known} if known else {}


def format_devices(devices: Devices) -> str:
    """Return one line with the devices, their speed and the trials that changed devices."""
    is_mixed = len(devices.trials) > 1
    parts = [", ".join(f"{kind} ({pluralize(n, 'trial')})" if is_mixed else kind for kind, n in devices.trials.items())]
    parts += [] if devices.rate is None else [f"{_format_rate(devices.rate)} samples per second and device"]
    parts += [] if devices.efficiency is None else [f"scaling efficiency {devices.efficiency:.2f}"]
    parts += [
        f"trial {number} was resumed on another number ({', then '.join(kind for kind, _ in groupby(changed))})"
        for number, changed in list(devices.changed.items())[:_MAX_LISTED]
    ]
    parts += [f"and {more} more were"] if (more := len(devices.changed) - _MAX_LISTED) > 0 else []
    return "; ".join(parts)


def _format_rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _strip_index(device: str) -> str:
    return device.partition(":")[0]


def _count_devices(device: str) -> int:
    number, times, _ = device.partition(DEVICE_COUNT_SEPARATOR)
    return int(number) if times else 1


def _get_median(records: list[dict[str, float]], name: str) -> float | None:
    values = [record[name] for record in records if name in record]
    return statistics.median(values) if values else None
