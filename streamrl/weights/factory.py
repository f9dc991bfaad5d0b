"""Transports and the publisher from the configuration."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from streamrl.bus.protocol import Bus
from streamrl.config.tree import WeightsConfig
from streamrl.schemas.subjects import Subjects
from streamrl.weights.bus import BusTransport
from streamrl.weights.ipc import IpcTransport, Opener
from streamrl.weights.pins import Pins
from streamrl.weights.protocol import WeightTransport
from streamrl.weights.publisher import Publisher
from streamrl.weights.shm import ShmTransport, remove_directory
from streamrl.weights.slices import MergedTransport, OtherRanks, RankPublisher, Requests, SliceTransport

SHARED_MEMORY = Path("/dev/shm")


def weights_directory(config: WeightsConfig, run: str, run_dir: Path) -> Path:
    """Folder of transport `shm`, the same for trainer and engines of a run.

    In shared memory, named after the run and its directory (runs of one name in two places do not meet). Where all versions are
    kept (`weights.keep = 0`) it lies in the run directory: they would fill the memory, and outlive the run there.
    """
    if config.keep == 0:
        return run_dir / "weights"
    base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    place = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:8]
    return base / f"streamrl-{os.getuid()}-{run}-{place}"


def free_weights(config: WeightsConfig, run: str, run_dir: Path) -> None:
    """Free the shared memory of a run whose workers have ended; versions kept in the run directory stay.

    A resumed run publishes the weights it starts from again. Safe to call twice.
    """
    if config.keep != 0:
        remove_directory(weights_directory(config, run, run_dir))


def make_transports(
    config: WeightsConfig, *, bus: Bus, run: str, policy: str, run_dir: Path, hands_out_sources: bool = False, rank: int = 0
) -> Mapping[str, SliceTransport]:
    """All transports by name, in the order in which a reader prefers them.

    A reader `hands_out_sources` if its weights live in other processes (`SourceHost`): device memory is opened there, not here. `rank`
    is that of a trainer which publishes.
    """
    pins = Pins(bus.kv, policy)
    directory = weights_directory(config, run, run_dir)
    shm = ShmTransport(run=run, policy=policy, directory=directory, pins=pins, rank=rank)
    opener = None if hands_out_sources else _cuda_opener
    return {
        "ipc": IpcTransport(run=run, policy=policy, directory=directory, fallback=shm, opener=opener, pins=pins),
        "shm": shm,
        "bus": BusTransport(bus.blobs, run=run, policy=policy, pins=pins, anchor_every=config.anchor_every),
    }


def make_publisher(
    config: WeightsConfig,
    *,
    bus: Bus,
    subjects: Subjects,
    policy: str,
    run_dir: Path,
    loop: asyncio.AbstractEventLoop,
    report: Callable[[dict[str, float]], Awaitable[None]] | None = None,
    others: OtherRanks | None = None,
) -> Publisher:
    """The publisher of one policy; `loop` runs the bus in another thread than the caller of `offer`.

    `others`: ranks that have a part of what is offered; None: it is offered whole.
    """
    own = make_transports(config, bus=bus, run=subjects.run, policy=policy, run_dir=run_dir)
    transports: Mapping[str, WeightTransport] = own
    if others is not None:
        requests = Requests(bus.kv, policy, others)
        transports = {name: MergedTransport(name, own[name], requests) for name in _published_on(config)}
    main, *mirrors = _published_on(config)
    return Publisher(
        bus,
        subjects,
        transports[main],
        policy=policy,
        loop=loop,
        keep=config.keep,
        mirrors={name: transports[name] for name in mirrors},
        report=report,
        offered=others.offer if others is not None else None,
    )


def make_rank_publisher(
    config: WeightsConfig, *, bus: Bus, subjects: Subjects, policy: str, run_dir: Path, loop: asyncio.AbstractEventLoop, rank: int
) -> RankPublisher:
    """What rank `rank`, 1 at least, of a trainer that is cut has of the publisher; `loop` as for `make_publisher`."""
    transports = make_transports(config, bus=bus, run=subjects.run, policy=policy, run_dir=run_dir, rank=rank)
    return RankPublisher(bus.kv, policy, {name: transports[name] for name in _published_on(config)}, rank=rank, loop=loop)


def _published_on(config: WeightsConfig) -> list[str]:
    return [config.transport, *(["bus"] if config.also_on_bus and config.transport != "bus" else [])]


def _cuda_opener() -> Opener:
    from streamrl.weights.ipc_memory import CudaOpener

    return CudaOpener()
