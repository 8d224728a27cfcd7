"""Metrics of all studies for Prometheus: workers, trials, epochs, attempts, best values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import sqlalchemy as sa
from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import make_wsgi_app
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError

from hpsearch.redaction import redact
from hpsearch.storage.attributes import INFEASIBLE, TRACKING, WANTED_WORKERS
from hpsearch.storage.database.connect import check_database, make_engine
from hpsearch.storage.trials.claim_sql import LOSS_WEIGHT_AT_START
from hpsearch.storage.trials.worker_registry import SILENT_SECONDS
from hpsearch.storage.web.guard import Wsgi
from hpsearch.storage.web.server import serve_wsgi

log = logging.getLogger(__name__)

_Family = CounterMetricFamily | GaugeMetricFamily

# A worker that has exited does not count. The server may run on another machine than the workers, so a lease or
# heartbeat that has expired is the only sign of a lost worker.
_WORKERS = f"""
    SELECT s.study_name, states.state, count(w.state)
      FROM studies s CROSS JOIN (VALUES ('running'), ('idle'), ('lost')) states (state)
      LEFT JOIN (
           SELECT w.study_id,
                  CASE WHEN a.expires_at >= clock_timestamp() THEN 'running'
                       WHEN a.expires_at IS NULL
                        AND w.seen_at > clock_timestamp() - {SILENT_SECONDS} * interval '1 second' THEN 'idle'
                       ELSE 'lost' END AS state
             FROM hpsearch_workers w
             LEFT JOIN (
                  SELECT t.study_id, a.worker, max(a.expires_at) AS expires_at
                    FROM hpsearch_attempts a JOIN trials t USING (trial_id)
                   WHERE a.ended_at IS NULL GROUP BY t.study_id, a.worker) a
                  ON a.study_id = w.study_id AND a.worker = w.name
            WHERE w.left_at IS NULL) w ON w.study_id = s.study_id AND w.state = states.state
     GROUP BY s.study_name, states.state
"""  # noqa: S608 the part is a constant

_TRIALS = f"""
    SELECT s.study_name, states.state, count(t.state)
      FROM studies s
      CROSS JOIN (VALUES ('complete'), ('pruned'), ('infeasible'), ('failed'), ('running'), ('waiting')) states (state)
      LEFT JOIN (
           SELECT study_id,
                  CASE WHEN state = 'FAIL' THEN 'failed'
                       WHEN state = 'PRUNED' AND EXISTS (
                            SELECT FROM trial_user_attributes u WHERE u.trial_id = trials.trial_id
                               AND u.key = '{INFEASIBLE}') THEN 'infeasible'
                       ELSE lower(CAST(state AS text)) END AS state
             FROM trials) t ON t.study_id = s.study_id AND t.state = states.state
     GROUP BY s.study_name, states.state
"""  # noqa: S608 the part is a constant

# Reports are numbered from 0 without gaps. The largest number of a trial takes one search of the index, and not a
# count of the trial's rows.
_EPOCHS = """
    SELECT s.study_name, coalesce(sum(CAST(v.step AS bigint) + 1), 0)
      FROM studies s LEFT JOIN trials t USING (study_id)
      LEFT JOIN LATERAL (
           SELECT step FROM trial_intermediate_values i WHERE i.trial_id = t.trial_id
            ORDER BY step DESC LIMIT 1) v ON true
     GROUP BY s.study_name
"""

_ATTEMPTS = f"""
    SELECT s.study_name,
           replace(outcome, 'lost', coalesce(replace(loss_cause, ' ', '_'), 'lost')) ||
           CASE WHEN outcome IN ('lost', 'released') AND loss_weight = {LOSS_WEIGHT_AT_START} THEN '_at_start' ELSE ''
           END, count(*)
      FROM hpsearch_attempts a JOIN trials t USING (trial_id) JOIN studies s USING (study_id)
     WHERE a.outcome IS NOT NULL GROUP BY 1, 2
"""  # noqa: S608 the part is a constant

_UNTRACKED = f"""
    SELECT s.study_name, count(u.trial_id)
      FROM studies s LEFT JOIN trials t USING (study_id)
      LEFT JOIN trial_user_attributes u ON u.trial_id = t.trial_id AND u.key = '{TRACKING}'
     GROUP BY s.study_name
"""  # noqa: S608 the part is a constant

# A constraint is violated if its number is positive or NaN. A cast would fail on values that other programs wrote.
_BEST = """
    SELECT s.study_name, CAST(d.objective AS text),
           CASE WHEN d.direction = 'MAXIMIZE' THEN max(v.value) ELSE min(v.value) END
      FROM studies s JOIN study_directions d USING (study_id) JOIN trials t USING (study_id)
      JOIN trial_values v ON v.trial_id = t.trial_id AND v.objective = d.objective AND v.value_type = 'FINITE'
     WHERE t.state = 'COMPLETE' AND NOT EXISTS (
           SELECT FROM trial_system_attributes c
            WHERE c.trial_id = t.trial_id AND starts_with(c.key, 'constraints:')
              AND c.value_json !~ '^(-.*|0([.]0+)?)$')
     GROUP BY s.study_name, d.objective, d.direction
"""

# Another program may have written any value.
_WANTED = f"""
    SELECT s.study_name, CAST(u.value_json AS integer)
      FROM studies s JOIN study_user_attributes u USING (study_id)
     WHERE u.key = '{WANTED_WORKERS}' AND u.value_json ~ '^[0-9]{{1,6}}$'
"""  # noqa: S608 the part is a constant

_QUERIES: tuple[tuple[type[_Family], str, str, tuple[str, ...], str], ...] = (
    (GaugeMetricFamily, "hpsearch_workers", "Workers that have not exited", ("state",), _WORKERS),
    (GaugeMetricFamily, "hpsearch_wanted_workers", "Workers that the study should have", (), _WANTED),
    (GaugeMetricFamily, "hpsearch_trials", "Trials", ("state",), _TRIALS),
    (CounterMetricFamily, "hpsearch_epochs", "Reported epochs of all trials", (), _EPOCHS),
    (CounterMetricFamily, "hpsearch_attempts", "Ended attempts of trials", ("outcome",), _ATTEMPTS),
    (GaugeMetricFamily, "hpsearch_untracked_trials", "Finished trials with records missing in MLflow", (), _UNTRACKED),
    (GaugeMetricFamily, "hpsearch_best_value", "Best value of the feasible complete trials", ("objective",), _BEST),
)


class _StudyCollector(Collector):
    """Collector that reads the metrics of all studies in one read-only transaction."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)

    def collect(self) -> Iterator[_Family]:
        """Yield the metrics."""
        with self._engine.begin() as connection:
            for make, name, description, labels, query in _QUERIES:
                family = make(name, description, labels=("study", *labels))
                for *values, number in connection.execute(sa.text(query)):
                    family.add_metric(values, float(number))
                yield family


def make_metrics_app(engine: sa.Engine) -> Wsgi:
    """Return the application that answers each request with the current metrics, or with status 503."""
    registry = CollectorRegistry()
    registry.register(_StudyCollector(engine))
    app: Any = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        try:
            return app(environ, start_response)  # type: ignore[no-any-return]
        except SQLAlchemyError as error:
            log.warning("the metrics cannot be read: %s", redact(str(error)).splitlines()[0])
            start_response("503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")])
            return [b"The database cannot be read.\n"]

    return answer


def serve_metrics(url: str, *, host: str, port: int, token: str | None) -> None:
    """Serve the metrics of the studies at `url` until the process ends.

    Args:
        url: Postgres URL; the worker role is sufficient.
        host: address to listen on.
        port: port to listen on.
        token: token that requests must have; None to accept requests without a token.

    Raises:
        StorageError: the database cannot be used, or the address cannot be bound.
    """
    check_database(url)
    engine = make_engine(url, application_name="hpsearch-metrics", pool_size=1)
    serve_wsgi(make_metrics_app(engine), host=host, port=port, token=token)
