"""System metrics of a trial: sample MLflow's system monitors, and log the values with the trial's other metrics."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from hpsearch.storage.journals import journal_records
from hpsearch.storage.journals.journal import Journal

if TYPE_CHECKING:
    from mlflow.system_metrics.metrics.base_metrics_monitor import BaseMetricsMonitor

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 10.0  # as in MLflow


class SystemMetrics:
    """Sampling of CPU, memory, disk, network and GPU metrics, with the metric names that the MLflow UI plots.

    MLflow's own `SystemMetricsMonitor` is not used, because it loses samples if the server is unavailable.
    """

    def __init__(self, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._interval_seconds = interval_seconds
        self._monitors = _make_monitors()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, journal: Journal, *, since: float) -> None:
        """Start writing samples to a journal.

        Args:
            journal: journal of the trial's attempt.
            since: Unix time in seconds; the MLflow step of a sample is the number of seconds since then.
        """
        self.stop()
        self._stop = threading.Event()
        args = (journal, since, self._stop)
        self._thread = threading.Thread(target=self._sample, args=args, name="system-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _sample(self, journal: Journal, since: float, stop: threading.Event) -> None:
        while not stop.wait(self._interval_seconds):
            now = time.time()
            values: dict[str, Any] = {}
            for monitor in self._monitors:
                try:
                    monitor.collect_metrics()
                    values |= monitor.aggregate_metrics()
                    monitor.clear_metrics()
                except Exception as error:  # a failing driver must not fail the trial
                    log.debug("%s: system metrics unavailable: %s", type(monitor).__name__, error)
            named = {f"system/{name}": float(value) for name, value in values.items()}
            journal.append(journal_records.Metrics(max(int(now - since), 0), now, named))


def _make_monitors() -> list[BaseMetricsMonitor]:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    monitors: list[BaseMetricsMonitor] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    try:
        monitors.append(GPUMonitor())
    except Exception as error:  # no NVIDIA driver, or no pynvml
        log.debug("GPU: system metrics unavailable: %s", error)
    return monitors
