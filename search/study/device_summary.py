"""Devices and training speed of studies whose trials train on several devices."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from itertools import groupby

from hpsearch.search.console import pluralize
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import DEVICE_SPEED
from hpsearch.storage.trials.history import DEVICE_COUNT_SEPARATOR, read_devices

_MAX_LISTED = 3  # maximum number of trials in the text about changed devices
_RATE, _EFFICIENCY = "samples_per_second_per_device", "scaling_efficiency"


@dataclass(frozen=True)
class DeviceSummary:
    """Devices on which the trials of a study trained.

    Attributes:
        trial_counts: number of trials whose last attempt used devices such as "2 x cuda", by devices, most frequent
            first.
        samples_per_second: samples per second and device, median over the trials with several devices; None if unknown.
        scaling_efficiency: share of the step time in which a device does not wait for the other devices, median over
            the trials with several devices; None if unknown.
        changed_devices: devices of each attempt, by trial number, for trials that resumed on another number of devices.
    """

    trial_counts: dict[str, int]
    samples_per_second: float | None
    scaling_efficiency: float | None
    changed_devices: dict[int, list[str]]


def summarize_devices(study: StoredStudy) -> DeviceSummary | None:
    """Return the devices of the trials of a study; None if no trial used several devices."""
    attempts = read_devices(study.engine, study.study_id)
    found = {number: [_strip_index(name) for name in names] for number, names in attempts.items()}
    if not any(_count_devices(device) > 1 for devices in found.values() for device in devices):
        return None
    speeds = [trial.user_attrs[DEVICE_SPEED] for trial in study.trials() if DEVICE_SPEED in trial.user_attrs]
    return DeviceSummary(
        trial_counts=dict(Counter(devices[-1] for devices in found.values()).most_common()),
        samples_per_second=_get_median(speeds, _RATE),
        scaling_efficiency=_get_median(speeds, _EFFICIENCY),
        changed_devices={number: names for number, names in found.items() if len(set(map(_count_devices, names))) > 1},
    )


def summarize_throughput(epochs: list[dict[str, float]]) -> dict[str, object]:
    """Return the trial attribute with the training speed of several devices; empty if the trial used one device.

    Args:
        epochs: the metrics of each epoch.
    """
    medians = {name: _get_median(epochs, name) for name in (_RATE, _EFFICIENCY)}
    known = {name: float(f"{value:.4g}") for name, value in medians.items() if value is not None}
    return {DEVICE_SPEED: known} if known else {}


def format_devices(devices: DeviceSummary) -> str:
    """Return one line with the devices, the training speed, and the trials whose number of devices changed."""
    counts, speed = devices.trial_counts, devices.samples_per_second
    parts = [", ".join(f"{kind} ({pluralize(n, 'trial')})" if len(counts) > 1 else kind for kind, n in counts.items())]
    parts += [] if speed is None else [f"{_format_rate(speed)} samples per second per device"]
    parts += [] if devices.scaling_efficiency is None else [f"scaling efficiency {devices.scaling_efficiency:.2f}"]
    parts += [
        f"trial {number} was resumed on other devices ({', then '.join(kind for kind, _ in groupby(changed))})"
        for number, changed in list(devices.changed_devices.items())[:_MAX_LISTED]
    ]
    parts += [f"and {more} more trials"] if (more := len(devices.changed_devices) - _MAX_LISTED) > 0 else []
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
