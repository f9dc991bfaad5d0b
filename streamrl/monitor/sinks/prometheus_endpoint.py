"""An endpoint that Prometheus scrapes: amounts as counters, other metrics as gauges of their newest value."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from streamrl.config.metrics import PrometheusConfig
from streamrl.errors import LaunchError
from streamrl.monitor.series import Row
from streamrl.monitor.sinks.names import prometheus_name
from streamrl.monitor.sinks.protocol import Once, version_number
from streamrl.telemetry.names import Reduction, metric

_MOST_SERIES = 1 << 16
_UNSEEN = re.compile(r"[\x00-\x1f]")


class PrometheusEndpoint:
    """Serves `/metrics` until it is closed.

    Totals of batches are those of the whole ledger; totals of what workers report begin with this process, as Prometheus expects.

    Args:
        run: value of the label `run`.
        config: where to listen.

    Raises:
        LaunchError: the address cannot be listened on.
    """

    def __init__(self, run: str, config: PrometheusConfig) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], float] = {}
        self._version = 0
        self._once = Once()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(config.port, config.host, registry)
        except OSError as error:
            raise LaunchError(
                f"expected to listen on {config.host}:{config.port} for Prometheus, got {error.strerror or error}",
                hint="choose another with metrics.prometheus.port, or end who listens there",
            ) from error

    def write(self, rows: Sequence[Row]) -> None:
        """See `Sink`."""
        with self._lock:
            for row in rows:
                self._version = max(self._version, version_number(row))
                for name, value in self._once.values(row).items():
                    key = (name, row.of)
                    if key not in self._values and len(self._values) >= _MOST_SERIES:
                        continue
                    before = self._values.get(key, 0.0) if metric(name).reduction is Reduction.SUM else 0.0
                    self._values[key] = before + value

    def close(self) -> None:
        """See `Sink`."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Metric]:
        """What a scrape gets; called by prometheus_client."""
        with self._lock:
            values, version = dict(self._values), self._version
        families: dict[str, Metric] = {}
        for (name, of), value in values.items():
            called, reason = prometheus_name(name)
            declared = metric(name)
            labels = ["run", "worker", *(["reason"] if reason else [])]
            if called not in families:
                kind = CounterMetricFamily if declared.reduction is Reduction.SUM else GaugeMetricFamily
                text = f"{declared.unit} decided against, by reason" if reason else f"{declared.meaning} [{declared.unit}]"
                families[called] = kind(called, text, labels=labels)
            families[called].add_metric([self._run, _UNSEEN.sub("", of), *([reason] if reason else [])], value)  # type: ignore[attr-defined]
        number = GaugeMetricFamily("streamrl_version", "number of the newest version: batches trained", labels=["run"])
        number.add_metric([self._run], version)
        yield from (number, *families.values())
