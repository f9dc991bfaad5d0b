"""The engine worker: one engine, its HTTP server, the watcher of its weights, and its presence on the bus."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

import msgspec

from streamrl.config.recording import recording_of
from streamrl.config.tree import Config
from streamrl.consumers.serving.weight_watcher import WeightWatcher
from streamrl.data.model import ensure_model
from streamrl.engines.batching.delays import TokenDelay
from streamrl.engines.factory import make_engine
from streamrl.engines.protocol import Chunk, Engine, EngineInfo, GenerateRequest, HostedEngine
from streamrl.engines.server import serve
from streamrl.errors import BusError, EngineDied, EngineError
from streamrl.runtime.collection import keep_all
from streamrl.runtime.worker import WEIGHTS_FAIL, Worker, farewell, loading_model
from streamrl.schemas.codec import encode
from streamrl.schemas.control import EVALUATION_ROLE, ROLLOUT_ROLE, EnginePresence
from streamrl.schemas.subjects import PREFIX_PRESENCE
from streamrl.schemas.versions import Version
from streamrl.system import WILDCARDS, address_towards, bracketed
from streamrl.telemetry.clock import StateClock
from streamrl.telemetry.names import Reduction, metric
from streamrl.weights.factory import make_transports
from streamrl.weights.pins import Pins

logger = logging.getLogger(__name__)

PRESENCE_TTL_S = 5.0
HEARTBEAT_S = 1.0
DRAIN_FRACTION = 0.5
"""Part of `supervise.drain_s` that running requests get to finish; the rest is for the server and the process to end."""
POLL_S = 0.05


async def main(worker: Worker) -> None:
    """Serve until the worker drains: no new requests then, running ones get a while to finish.

    Each start is a new engine with an id of its own: nobody takes its counters for those of the one that died. Where the engine is
    a server of its own that dies, a new one is started `engine.sglang.restarts` times.

    Raises:
        ConfigError: the model directory does not fit the configuration.
        EngineError: the port is taken, the server did not start, or decoding failed.
        BusError: the bus stayed away.
    """
    config = worker.config
    clock = StateClock("setup")
    if role_of(config, worker.index) != EVALUATION_ROLE:
        worker.timed("engine", clock)
    # Off the loop: importing torch takes seconds, and the worker's heartbeats go on.
    model_dir = await asyncio.to_thread(ensure_model, config, worker.run_dir.model_dir)
    restarts = config.engine.sglang.restarts if config.engine.traits.server else 0
    for left in range(restarts, -1, -1):
        try:
            return await _one_life(worker, model_dir, clock)
        except EngineDied as error:
            if not left or worker.draining.is_set():
                raise
            logger.error("event=engine_restarting worker=%s left=%d message=%s", worker.name, left, error.message)
            await worker.metrics({"engine/restarts_total": 1.0})
            await worker.event("engine", {"worker": worker.name, "died": error.message, "restarts_left": left})


async def _one_life(worker: Worker, model_dir: Path, clock: StateClock) -> None:
    config = worker.config
    worker.state = loading_model(config)
    clock.enter("setup")
    engine = await asyncio.to_thread(
        make_engine,
        config.engine,
        model_dir,
        engine_id=f"{worker.name}-{secrets.token_hex(3)}",
        max_len=config.model.max_len,
        delay=token_delay(config),
        dtype=config.trainer.dtype or config.model.dtype,
        index=worker.index,
        log_path=worker.run_dir.log_path(f"{worker.name}-server"),
        routed=config.trainer.routing_replay,
        recording=recording_of(config),
    )
    engine.timed(clock)
    worker.gpus = float(engine.gpus)
    try:
        # A server takes minutes to start; a worker that is told to drain meanwhile does not wait for it.
        await until_drained(worker.draining, engine.start(), ends_with_work=True)
        if not worker.draining.is_set():
            await worker.event("engine", {"engine": engine.engine_id, "kind": config.engine.kind, **engine.detail})
            await _serve(worker, engine)
    finally:
        await engine.stop()


async def _serve(worker: Worker, engine: HostedEngine) -> None:
    config = worker.config
    door = Door(engine, engine.engine_id)
    port = config.engine.port + worker.index if config.engine.port else 0
    server = await serve(door, config.engine.host, port, token=worker.run_dir.engine_token())
    try:
        address = reachable(server.address, config.engine.host, advertise=config.engine.advertise, bus_url=worker.bus_url)
        presence = Presence(worker, engine, address)
        transports = make_transports(
            config.weights,
            bus=worker.bus,
            run=worker.subjects.run,
            policy=engine.policy,
            run_dir=worker.run_dir.path,
            hands_out_sources=config.engine.traits.sources,
        )
        watcher = WeightWatcher(
            worker.bus,
            worker.subjects,
            engine,
            transports,
            policy=engine.policy,
            engine=engine.engine_id,
            metrics=worker.metrics,
            event=worker.event,
            committed=presence.swapped,
            delay_versions=config.debug.delay_versions,
            pins=Pins(worker.bus.kv, engine.policy) if presence.role == EVALUATION_ROLE else None,
            role=presence.role,
        )
        presence.failure = lambda: watcher.failure
        keep_all()
        try:
            await until_drained(worker.draining, watcher.run(), presence.keep())
        finally:
            await presence.withdraw()
        door.close()
        await _finish(engine, DRAIN_FRACTION * config.supervise.drain_s)
        async with farewell():
            await presence.last_words()
    finally:
        await server.stop()


class Door:
    """An engine behind a door: once it is closed new requests are refused, and the running ones go on."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._closed = False

    def close(self) -> None:
        """Refuse what comes from now on."""
        self._closed = True

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """As the engine does, or EngineError when it is draining."""
        if self._closed:
            raise EngineError(f"engine {self._name} is draining and takes no new requests", hint="ask another engine")
        return self._engine.generate(request)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def info(self) -> EngineInfo:
        return await self._engine.info()


class Presence:
    """Keeps the key `presence/engines/<id>` alive from the first commit on, and publishes the engine's load with every beat.

    Nobody asks an engine before it serves anything: one that joins late takes the newest version first.
    """

    def __init__(self, worker: Worker, engine: HostedEngine, address: str) -> None:
        self._worker = worker
        self._engine = engine
        self._address = address
        self.role = role_of(worker.config, worker.index)
        self._key = f"{PREFIX_PRESENCE}engines/{engine.engine_id}"
        self._reported: dict[str, float] = {}
        """Totals as of the last report, by metric."""
        self._told = 0
        """Tokens sampled, as of the last presence."""
        self.failure: Callable[[], str] = str
        """Asked why the newest version could not be taken; empty: it was."""

    async def keep(self) -> None:
        """Beat until cancelled; raises EngineError once decoding has failed."""
        while True:
            info = await self._engine.info()
            await self._put(info)
            await self._report(info)
            await asyncio.sleep(HEARTBEAT_S)

    async def swapped(self, version: Version) -> None:
        """Say at once that the engine serves `version`: tasks may be waiting for it."""
        await self._put(await self._engine.info())

    async def withdraw(self) -> None:
        """Ask for no more requests; call it when `keep` has ended. The key expires by itself if the bus is away."""
        with contextlib.suppress(BusError, TimeoutError):
            await asyncio.wait_for(self._worker.bus.kv.delete(self._key), PRESENCE_TTL_S)

    async def last_words(self) -> None:
        """Report what was sampled after the presence ended, and what became of it."""
        with contextlib.suppress(EngineError):
            info = await self._engine.info()
            await self._report(info)
            if self.role == ROLLOUT_ROLE:
                await self._worker.metrics({"tokens/sampled_total": float(info.tokens_total - self._told)})

    async def _put(self, info: EngineInfo) -> None:
        self._worker.state = state_of(info, self.failure())
        if info.serving is None:
            return
        presence = EnginePresence(
            engine=info.engine,
            address=self._address,
            policy=info.policy,
            serving=info.serving,
            running=info.running,
            waiting=info.waiting,
            slots=info.slots,
            role=self.role,
            tokens_total=info.tokens_total,
            swaps_total=info.swaps_total,
            max_len=info.max_len,
            degraded=self._engine.detail.get("degraded", msgspec.UNSET),
        )
        try:
            await self._worker.bus.kv.put(self._key, encode(presence), ttl_s=PRESENCE_TTL_S)
            self._told = info.tokens_total
        except BusError as error:
            # The key expires while the bus is away; the next beat brings it back. Generation goes on meanwhile.
            logger.warning("event=presence_lost engine=%s error=%s", info.engine, error.message)

    async def _report(self, info: EngineInfo) -> None:
        values = {
            "engine/tokens_total": float(info.tokens_total),
            "engine/running_requests": float(info.running),
            "engine/waiting_requests": float(info.waiting),
            **info.counters,
        }
        lost, lengths = self._engine.lost, {}
        if self.role == ROLLOUT_ROLE:
            values["tokens/cut_total"] = float(lost.tokens)
            lengths = {"lengths/cut": cut} if (cut := lost.take_lengths()) else {}
        else:
            values.pop("engine/saturated_s", None)  # else a share of the rollouts' engines' time, as none of its other seconds is
        totals = {name: value for name, value in values.items() if metric(name).reduction is Reduction.SUM}
        made = {name: value - self._reported.get(name, 0.0) for name, value in totals.items()}
        self._reported = totals
        await self._worker.metrics(values | made, lengths)


def state_of(info: EngineInfo, failure: str = "") -> str:
    """The words for what an engine does or waits for; `failure`: why the newest version could not be taken."""
    why = f": {failure}" if failure else ""
    if info.serving is None:
        return f"waits for its first weights{why}"
    if info.waiting and not info.running:
        return f"waits for a version newer than {info.serving}, which {info.waiting} requests ask for{why}"
    return f"{WEIGHTS_FAIL} than {info.serving}{why}" if failure else "running"


def role_of(config: Config, index: int) -> str:
    """What the engine of this index is for: those behind the run's own serve evaluations, and any that joins later serves rollouts."""
    first = config.engine.workers
    return EVALUATION_ROLE if first <= index < first + config.evaluation.engines else ROLLOUT_ROLE


def token_delay(config: Config) -> TokenDelay | None:
    """The artificial time per token that the configuration asks for."""
    debug = config.debug
    return TokenDelay(mean_s=debug.token_delay_s, sigma=debug.token_delay_sigma, seed=config.run.seed) if debug.token_delay_s else None


def reachable(address: str, host: str, *, advertise: str = "", bus_url: str = "") -> str:
    """The address others can use.

    Args:
        address: `http://host:port` that the server listens on.
        host: as configured; a server that listens everywhere is asked at this machine's address on the way to the bus.
        advertise: name or address to use in any case; empty: none.
        bus_url: where the bus is.
    """
    if host not in WILDCARDS and not advertise:
        return address
    return f"http://{bracketed(advertise or address_towards(bus_url))}:{address.rpartition(':')[2]}"


async def until_drained(draining: asyncio.Event, *work: Coroutine[None, None, None], ends_with_work: bool = False) -> None:
    """Run `work` until `draining` is set; an error in any of it is raised at once. All of it has ended on return.

    Work is endless unless it `ends_with_work`: then the first that is done ends it all.
    """
    drained = asyncio.create_task(draining.wait())
    tasks = [asyncio.create_task(one) for one in work]
    try:
        done, _ = await asyncio.wait((drained, *tasks), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (drained, *tasks):
            task.cancel()
        await asyncio.gather(drained, *tasks, return_exceptions=True)


async def _finish(engine: HostedEngine, bound_s: float) -> None:
    """Wait until nothing is being decoded. Requests that wait for a version do not count: it may never come."""
    running = (await engine.info()).running
    for _ in range(round(bound_s / POLL_S)):
        if not running:
            break
        await asyncio.sleep(POLL_S)
        running = (await engine.info()).running
    logger.info("event=engine_drained engine=%s unfinished=%d", engine.engine_id, running)
