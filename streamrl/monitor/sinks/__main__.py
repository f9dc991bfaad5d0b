"""One sink of one run: `python -m streamrl.monitor.sinks KIND --run DIR`, started by the supervisor."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from streamrl.bus.permissions import READER
from streamrl.config.tree import Config
from streamrl.errors import BusError
from streamrl.monitor.follow import Follower, read_totals
from streamrl.monitor.row_writer import RowWriter
from streamrl.monitor.series import Row, Series
from streamrl.monitor.sinks.position import Position, load
from streamrl.monitor.sinks.protocol import Sink
from streamrl.monitor.view import RunView
from streamrl.runtime.beats import BEAT_S, Pulse
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.service import STACKS_SIGNAL, SUPERVISOR_VARIABLE, Exit, die_with_parent
from streamrl.runtime.worker import connected, drain_on_signals, report_failure
from streamrl.schemas.subjects import METRICS
from streamrl.telemetry.logs import configure_logging

_LOOK_S = 0.2
_LAST_S = 3.0
"""For reading what the bus still has at the end."""
_WRITE_S = 30.0
"""One write that takes longer is a hang: no beat goes out then."""


class Guarded:
    """A sink as RowWriter calls it, on its thread; after a failure nothing is written, so that the position stays before it."""

    def __init__(self, sink: Sink) -> None:
        self.failure: Exception | None = None
        self._sink = sink
        self._began_s: float | None = None

    @property
    def hangs(self) -> bool:
        """Whether a write does not come to its end."""
        began_s = self._began_s
        return began_s is not None and time.monotonic() - began_s > _WRITE_S

    def write(self, rows: Sequence[Row]) -> None:
        """See `RowFile`."""
        if self.failure is not None:
            return
        self._began_s = time.monotonic()
        try:
            self._sink.write(rows)
        except Exception as error:  # written policy: whatever a third party's code raises is said and ends this process, not its thread
            self.failure = error
        self._began_s = None

    def close(self) -> None:
        """See `RowFile`."""
        try:
            self._sink.close()
        except Exception as error:  # as above
            self.failure = self.failure or error


def open_sink(kind: str, config: Config, run: RunDir, position: Position) -> Sink:
    """The sink of a kind; only its own package is imported."""
    path = run.sink_dir(kind) / "position.json"
    if kind == "tensorboard":
        from streamrl.monitor.sinks.tensorboard_files import TensorboardFiles

        own = config.metrics.tensorboard.dir
        return TensorboardFiles(Path(own) / run.name if own else run.path / "tensorboard", position, path)
    if kind == "wandb":
        from streamrl.monitor.sinks.wandb_run import WandbRun

        return WandbRun(config, run.sink_dir(kind), position, path)
    if kind == "trackio":
        from streamrl.monitor.sinks.trackio_store import TrackioStore

        own = config.metrics.trackio.dir
        return TrackioStore(config, Path(own) if own else run.sink_dir(kind), position, path)
    from streamrl.monitor.sinks.prometheus_endpoint import PrometheusEndpoint

    return PrometheusEndpoint(run.name, config.metrics.prometheus)


async def serve(kind: str, run: RunDir, pulse: Pulse, *, joined: bool) -> None:
    """Read the bus and write rows until a signal drains it; raises what the sink has raised."""
    config = run.load_config()
    draining = asyncio.Event()
    drain_on_signals(draining)
    pulse.beat(loading=True)
    async with connected(run, role=READER, name=f"sink-{kind}") as bus:
        # Opening a sink takes seconds, in which the workers report and the supervisor stores the totals.
        after, before = (await bus.state(METRICS)).last, await read_totals(bus)
    position = load(run.sink_dir(kind) / "position.json")
    sink = Guarded(open_sink(kind, config, run, position))
    with contextlib.closing(RowWriter(sink)) as rows:
        async with connected(run, role=READER, name=f"sink-{kind}", gather=True) as bus:
            series = Series(window_s=config.metrics.window_s, after=position.newest, evaluated=msgspec.structs.replace(position).has)
            view = RunView(run.name, before=before, joined=joined, series=series)
            async with Follower(bus, view, trainer=config.trainer.name, rows=rows, after=after) as follower:
                beat_s = 0.0
                while not draining.is_set() and sink.failure is None:
                    if time.monotonic() >= beat_s and not sink.hangs:
                        pulse.beat(loading=False)
                        beat_s = time.monotonic() + BEAT_S
                    await asyncio.sleep(_LOOK_S)
                with contextlib.suppress(BusError):
                    await follower.catch_up(within_s=_LAST_S)
    if sink.failure is not None:
        raise sink.failure


def main() -> int:
    """Run the sink; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m streamrl.monitor.sinks")
    parser.add_argument("kind")
    parser.add_argument("--run", required=True)
    parser.add_argument("--joined", action="store_true", help="others began this session of the run")
    arguments = parser.parse_args()
    pulse = Pulse.of(os.environ)
    if supervisor := int(os.environ.pop(SUPERVISOR_VARIABLE, "0")):
        die_with_parent(supervisor)
    configure_logging(f"sink-{arguments.kind}")
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    try:
        asyncio.run(serve(arguments.kind, RunDir(arguments.run), pulse, joined=arguments.joined))
    except Exception as error:  # the one place of this process that catches everything
        return report_failure(error)
    return Exit.DONE


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread of a third party's package may wait for a service that does not answer.
    os._exit(code) if threading.active_count() > 1 else sys.exit(code)
