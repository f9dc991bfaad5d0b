"""The names of a run's metrics: all that are declared without a condition are seen, and no other."""

from __future__ import annotations

import math

import pytest

from streamrl.bus import connect
from streamrl.bus.server import NatsServer
from streamrl.monitor.metrics_file import decoded, files
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode
from streamrl.schemas.events import MetricReport
from streamrl.schemas.subjects import METRICS as REPORTS
from streamrl.telemetry.names import LENGTHS, METRICS, declared
from tests.support.harness import read_ledger
from tests.support.looked_at import LookedAt

pytestmark = pytest.mark.nats


async def reported(run: RunDir) -> tuple[set[str], set[str]]:
    """Names of all values, and of all histograms, in the ledger and in the workers' reports."""
    server = NatsServer(run.bus_store)
    server.start()
    try:
        bus = await connect(server.address, "digits", run.load_config().bus)
        entries = await read_ledger(bus, "digits")
        state = await bus.state(REPORTS)
        reports = [
            decode((await bus.fetch(REPORTS, number)).body, MetricReport, where="reports") for number in range(state.first, state.last + 1)
        ]
        await bus.close()
    finally:
        server.stop()
    assert reports and entries
    values = {name for entry in entries for name in entry.metrics}
    values |= {name for one in reports for group in (one.mean, one.sum, one.max, one.last) for name in group}
    return values, {name for one in (*entries, *reports) if isinstance(one.histograms, dict) for name in one.histograms}


async def test_every_name_without_a_condition_is_seen_and_every_name_that_is_seen_is_declared(finished: LookedAt) -> None:
    run = finished.run
    rows = [decoded(line) for path in files(run.metrics) for line in path.read_bytes().splitlines()]
    seen = {name for row in rows if row is not None for name, value in row.values.items() if math.isfinite(value)}
    assert [name for name, one in METRICS.items() if not one.when and name not in seen] == []
    assert {"eval/heldout", "train/answer_probability", "tokens/evaluated_total", "lengths/dropped_p50"} <= seen
    values, histograms = await reported(run)
    assert [name for name in values if declared(name) is None] == [] and histograms <= LENGTHS.keys() and "lengths/trained" in histograms
