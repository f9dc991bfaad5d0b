"""A real `streamrl up` under faults: strikes its processes and its wires, and measures how long until the next batch is in the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa

from streamrl.bus import BusAddress, connect
from streamrl.bus.protocol import Bus
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import LEDGER, SAMPLES, Subjects
from tests.support.memory import freed_after_test
from tests.support.processes import alive, descendants, grader_pid, processor_s, send, server_pid, worker_pid
from tests.support.world.agents import Told, read_told
from tests.support.world.commands import command
from tests.support.world.damage import DAMAGES
from tests.support.world.faults import AGENT, CHECKPOINT, GRADER, MESSAGES, RANK_1, REQUESTS, TURNS, WHOLE, Fault
from tests.support.world.shapes import NAME, Shape, open_gate, write_files
from tests.support.world.wire import PROXY, SERVER, Wire, open_wire

AIM_S = 10.0
CATCH_S = 20.0
RECOVER_S = 120.0
START_S = 300.0
FINISH_S = 300.0
LEAVE_S = 5.0
ON_ITS_WAY_S = 0.05
"""An entry that the server stores so soon after a strike was sent before it."""


class Struck(msgspec.Struct, frozen=True):
    """Tells what came of a strike."""

    fault: Fault
    hit: bool
    """Whether it fell where it was aimed; else it was struck at the end of the patience."""
    version: int
    """Entries in the ledger at that time."""
    recovery_s: float
    """From the strike to the next ledger entry that was not on its way already; -1: none came. Where the whole run was killed, from the
    command that starts it again."""
    note: str = ""
    """What was damaged."""
    attach_s: float = -1.0
    """From the command that attaches a producer again to its first record on the server; -1: none was started, or none came."""
    engine_s: float = -1.0
    """From the death of an engine to the first bytes that the next one gives a producer; -1: it was not struck, or none came."""

    @property
    def as_told(self) -> bool:
        """True where it fell as it was aimed, damaged what it was to damage, and a batch came after it."""
        return self.hit and self.recovery_s >= 0 and bool(self.note) == bool(self.fault.damage)


class Disturbed:
    """One run that is up. `wires` lead to the nats-server and to the engine; `words` start it."""

    def __init__(
        self,
        place: Path,
        shape: Shape,
        wires: tuple[Wire, Wire],
        up: asyncio.subprocess.Process,
        words: Sequence[str],
        *,
        steps: int,
        stop_s: float,
        away_s: float,
        crew: Crew | None = None,
    ) -> None:
        self.crew = crew
        self.run = RunDir(place / "runs" / NAME)
        self._place = place
        self._shape = shape
        self._wire, self._http = wires
        self.up = up
        self._steps = steps
        self._stop_s = stop_s
        self._away_s = away_s
        self._opened = shape.tasks_before
        self._words = words
        self._stored_s: list[float] = []
        """When the server stored each entry of the ledger."""
        self.entries: dict[float, int] = {}
        """Samples of each entry that the ledger has ever had, by when the server stored it."""
        self.made: dict[str, set[str]] = {}
        """Digests of the parameters that the ledger has ever had, by version."""
        self._note = ""
        self._started = [up]
        self._attached: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._attach_s: asyncio.Task[float] | None = None

    @property
    def versions(self) -> int:
        return len(self._stored_s)

    async def until(self, holds: Callable[[], object], what: str, within_s: float = 90.0) -> None:
        """Wait; fails when `up` ends before, or after a time that no healthy machine needs."""
        deadline = time.monotonic() + within_s
        while not holds():
            assert self.up.returncode is None, f"the run ended before {what}:\n{self.said()}"
            assert time.monotonic() < deadline, f"{what} did not come within {within_s:g} s:\n{self.said()}"
            await asyncio.sleep(0.02)

    def said(self) -> str:
        return (self._place / "out").read_text()[-3000:]

    async def trained(self, versions: int, within_s: float = 90.0) -> None:
        """Wait for so many entries in the ledger; more work is let through as time goes by, since a crowded machine drops some as stale."""
        deadline = time.monotonic() + within_s
        while self.versions < versions:
            assert time.monotonic() < deadline, f"{versions} versions did not come within {within_s:g} s:\n{self.said()}"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5.0):
                    await self.until(lambda: self.versions >= versions, f"{versions} versions")
            self.open(1)

    async def begin(self) -> None:
        """Wait for the first workers, and follow the ledger from then on, past the wire."""
        await self.until(
            lambda: self.run.exists and worker_pid(self.run, "gateway" if self.crew else "producer"), "the first workers", within_s=START_S
        )
        self._watcher = asyncio.create_task(self._watch())

    async def _connect(self) -> Bus:
        address = msgspec.structs.replace(BusAddress.load(self.run.bus_path), url=f"nats://{SERVER}:{self._wire.port}")
        return await connect(address, NAME, self.run.load_config().bus, create=False, patience_s=60.0)

    async def _watch(self) -> None:
        bus = await self._connect()
        subject = Subjects(NAME).ledger("main")
        try:
            async for message in bus.read(LEDGER, after=0, subject=subject):
                entry = decode(message.body, LedgerEntry)
                if entry.gap is msgspec.UNSET:  # else it trains nothing
                    self._stored_s.append(message.time_s)
                    self.entries[message.time_s] = entry.num_samples
                    self.made.setdefault(str(entry.version), set()).add(entry.digest)
        finally:
            await bus.close()

    async def _look_away(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    async def start(self, *words: str) -> asyncio.subprocess.Process:
        self._started.append(await command(self._place, *words))
        return self._started[-1]

    async def attach(self) -> None:
        """Start the producer that belongs to nobody's supervisor."""
        function = "agent.py:agent" if self._shape.misdeed_every else "single_turn"
        self._attached = await self.start("attach", function, "--run", NAME, "--concurrency", "4")

    def pid(self, part: str) -> int | None:
        if part == WHOLE:
            return self.up.pid if self.up.returncode is None else None
        if part == "attached producer":
            return None if self._attached is None or self._attached.returncode is not None else self._attached.pid
        if part == AGENT:
            return None if self.crew is None else self.crew.pid
        if part == RANK_1:
            return worker_pid(self.run, "trainer", 1)
        if part == GRADER:
            return grader_pid(self.run)
        return server_pid(self.run) if part == "nats-server" else worker_pid(self.run, part)

    def open(self, batches: int) -> None:
        self._opened += batches * self._shape.batch_tasks
        open_gate(self._place, self._opened)

    async def strike(self, fault: Fault, rng: random.Random) -> Struck:
        """Strike once, and wait until the part is back and a batch has been trained."""
        self.open(3)
        target = self.versions + rng.randrange(3)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await self.until(lambda: self.versions >= target, "the moment of the strike")
        await self.until(lambda: self.pid(fault.part), f"a {fault.part}")
        self.open(3)
        hit = await self._aim(fault, rng)
        before, struck_s = self.versions, time.time()
        answered = asyncio.create_task(first_answer(self._http, struck_s)) if fault.part == "engine" and fault.kind == "kill -9" else None
        try:
            if fault.part == WHOLE:
                struck_s = await self._fall(fault, rng)
            else:
                await self._apply(fault)
        finally:
            self._release()
        recovery_s = await self._recovered(struck_s)
        await self.until(lambda: self.pid(fault.part), f"the {fault.part} again")
        attach_s = await self._attach_s if self._attach_s is not None else -1.0
        self._attach_s = None
        engine_s = await answered if answered is not None else -1.0
        return Struck(fault, hit, before, recovery_s, self._note if fault.damage else "", attach_s, engine_s)

    async def disturb(self, faults: Iterable[Fault], rng: random.Random) -> list[Struck]:
        """Strike after strike; once more where there was nothing to damage, as in a queue whose last tasks had just been done."""
        found: list[Struck] = []
        for fault in faults:
            struck = await self.strike(fault, rng)
            for _ in range(2):
                if fault.damage and not struck.note:
                    struck = await self.strike(fault, rng)
            found.append(struck)
        return found

    async def _fall(self, fault: Fault, rng: random.Random) -> float:
        """Kill everything but the attached producer at once, damage what is to be damaged, and start the run again."""
        pids = [self.up.pid, *descendants(self.up.pid)]
        for pid in pids:
            send(pid, signal.SIGKILL)
        await self.up.wait()
        self._release()
        await self._look_away()
        deadline = time.monotonic() + CATCH_S
        while any(alive(pid) for pid in pids):
            assert time.monotonic() < deadline, "processes outlive a SIGKILL"
            await asyncio.sleep(0.01)
        self._note = DAMAGES[fault.damage](self.run, rng) if fault.damage else ""
        if self._attached is not None and not self._shape.misdeed_every and rng.random() < 0.5:
            with contextlib.suppress(TimeoutError):  # it sees that the run is down, and leaves; one that is just starting waits for the bus
                await asyncio.wait_for(self._attached.wait(), LEAVE_S)
        self._stored_s.clear()
        self.up = await self.start(*self._words)
        started_s = time.time()
        await self.begin()
        if self._attached is not None and self._attached.returncode is not None:
            # One that has just been started finds nobody to join, and says so.
            left = self._attached.returncode == 0 or "expected a run that is up" in self.said()
            assert left, f"an attached producer ended with {self._attached.returncode}:\n{self.said()}"
            await self.attach()
        return started_s

    async def _aim(self, fault: Fault, rng: random.Random) -> bool:
        if not fault.aim:
            await asyncio.sleep(rng.uniform(0.0, 0.2))
            return True
        if fault.aim == CHECKPOINT:
            return await self._catch_checkpoint()
        sender, pattern = (MESSAGES | REQUESTS | TURNS)[fault.aim]
        await self.until(lambda: self.pid(sender), f"a {sender}")
        wire = self._http if fault.aim in REQUESTS else self._wire
        ambush = wire.ambush(self.pid(sender) or 0, pattern, fault.where)
        for _ in range(int(AIM_S)):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ambush.sprung.wait(), 1.0)
                return True
            self.open(1)
        return False

    def _release(self) -> None:
        self._wire.release()
        self._http.release()

    async def _catch_checkpoint(self) -> bool:
        """Leave the trainer stopped while the files of a checkpoint are being written."""
        deadline, look = time.monotonic() + CATCH_S, 0
        while time.monotonic() < deadline:
            for _ in range(10):
                if self._writing():
                    break
                await asyncio.sleep(0.001)
            pid = self.pid("trainer")
            if pid is not None and send(pid, signal.SIGSTOP):
                await asyncio.sleep(0.005)
                if self._writing():
                    return True
                send(pid, signal.SIGCONT)
            look += 1
            if look % 20 == 0:
                self.open(1)
        return False

    def _writing(self) -> bool:
        return any(".writing-" in name and not name.endswith("-removed") for name in os.listdir(self.run.checkpoints))

    async def _apply(self, fault: Fault) -> None:
        pid = self.pid(fault.part)
        assert pid is not None, f"expected a {fault.part} to strike"
        match fault.kind:
            case "kill -9":
                send(pid, signal.SIGKILL)
                if fault.part == RANK_1 and (leader := self.pid("trainer")):
                    send(leader, signal.SIGCONT)  # it was caught in a checkpoint
                if fault.part == "attached producer" and self._attached is not None:
                    await self._attached.wait()
                    bus = await self._connect()
                    after, began_s = (await bus.state(SAMPLES)).last, time.time()
                    await self.attach()
                    self._attach_s = asyncio.create_task(first_record(bus, after, began_s))
                elif fault.part == AGENT and self.crew is not None:
                    await self.crew.begin()
                else:
                    await self.until(lambda: self.pid(fault.part) not in (None, pid), f"the successor of the {fault.part}")
            case "SIGSTOP":
                send(pid, signal.SIGSTOP)
                self._release()
                await asyncio.sleep(fault.held_s or self._stop_s)
                send(pid, signal.SIGCONT)
            case "cut" if fault.part == AGENT and self.crew is not None:
                await self.crew.wire.cut(pid, self._away_s)
            case "cut":
                cut = asyncio.create_task(self._wire.cut(None if fault.part == "nats-server" else pid, self._away_s))
                await asyncio.sleep(0)
                send(pid, signal.SIGCONT)  # a trainer that was caught in a checkpoint goes on without its connection
                await cut
            case "damage":
                raise AssertionError("only the disk of a run that is down is damaged")
            case "HTTP cut":
                await self._http.cut(None if fault.part == "engine" else pid, self._away_s)

    async def _recovered(self, struck_s: float) -> float:
        """Seconds to the first entry that was not on its way already; -1: none came. There is work for one, whatever is dropped."""
        began_s = opened_s = time.monotonic()
        self.open(3)
        while time.monotonic() < began_s + RECOVER_S:
            if time.monotonic() > opened_s + 5.0:
                opened_s = time.monotonic()
                self.open(1)  # what has come since may have been dropped as stale
            later = [stored_s for stored_s in self._stored_s if stored_s > struck_s + ON_ITS_WAY_S]
            if later:
                return later[0] - struck_s
            assert self.up.returncode is None, f"the run ended before it recovered:\n{self.said()}"
            await asyncio.sleep(0.02)
        return -1.0

    async def finish(self) -> None:
        """Let all the work through, and wait until the run has ended by itself."""
        self.open(10**6)
        deadline = time.monotonic() + FINISH_S
        while self._shape.misdeed_every and self.up.returncode is None and self.versions < self._steps and time.monotonic() < deadline:
            await asyncio.sleep(0.1)  # what came of each misdeed is watched to the end
        await self._look_away()
        code = await asyncio.wait_for(self.up.wait(), FINISH_S)
        assert code == 0, f"expected `streamrl up` to end with 0, got {code}:\n{self.said()}"
        if self._attached is not None:
            assert await asyncio.wait_for(self._attached.wait(), 60) == 0, "an attached producer leaves when the run has finished"

    async def end(self) -> None:
        await self._look_away()
        if self.crew is not None:
            await self.crew.end()
        for process in self._started:
            if process.returncode is None:
                process.kill()
            await process.wait()
        if self.run.exists:
            freed_after_test(self.run.load_config(), self.run)


@contextlib.asynccontextmanager
async def disturbed(
    place: Path, shape: Shape, *, steps: int, stop_s: float = 1.5, away_s: float = 0.5, attach: bool = True
) -> AsyncGenerator[Disturbed]:
    """A run that is up, with an attached producer. Judge it before this ends: its address leads over the wire."""
    write_files(place, shape)
    async with open_wire() as wire, open_wire() as http, open_wire() as calls:
        words = ("up", f"{NAME}.toml", "--json", *shape.arguments(steps, wire.port, http.port, calls.port))
        up = await command(place, *words)
        crew = Crew(place, calls) if shape.agents else None
        found = Disturbed(place, shape, (wire, http), up, words, steps=steps, stop_s=stop_s, away_s=away_s, crew=crew)
        try:
            await found.begin()
            if crew is not None:
                await crew.begin()
            if attach and crew is None:  # an attached producer would roll out itself what a gateway that died gives back
                await found.attach()
            yield found
        finally:
            await found.end()


AGENTS = "4"


class Crew:
    """One process at a time; one that was killed leaves what it had written down, and its sessions to their limits."""

    def __init__(self, place: Path, wire: Wire) -> None:
        self.wire = wire
        self._place = place
        self._process: asyncio.subprocess.Process | None = None
        self._files: list[Path] = []

    @property
    def pid(self) -> int | None:
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def begin(self) -> None:
        if self._process is not None:
            await self._process.wait()
        self._files.append(self._place / f"told-{len(self._files)}.jsonl")
        words = ("--run", f"runs/{NAME}", "--out", str(self._files[-1]), "--agents", AGENTS, "--host", PROXY, "--rewards", "0")
        self._process = await command(self._place, *words, "--seed", str(100 * len(self._files)), module="tests.support.world.agents")

    async def end(self) -> None:
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()

    def told(self) -> Told:
        return read_told(*self._files)


PATIENCE_S = 120.0
LOOK_EVERY_S = 0.25


async def first_record(bus: Bus, after: int, since_s: float) -> float:
    """Seconds from then to the first samples that a producer of no supervisor has stored behind `after`; -1: none came."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for message in bus.read(SAMPLES, after=after, subject=Subjects(NAME).samples("main")):
                with pa.ipc.open_stream(message.body) as reader:
                    batch = reader.read_next_batch()
                    # What the one before had sent may still arrive.
                    if batch.column("producer")[0].as_py() != "producer-0" and min(batch.column("started_s").to_pylist()) >= since_s:
                        return message.time_s - since_s
    except TimeoutError:
        pass
    finally:
        await bus.close()
    return -1.0


async def first_answer(http: Wire, struck_s: float) -> float:
    """Seconds to the first bytes of the engine to a producer, over a connection that is younger than the strike; -1: none came."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        answers = [link.answered_s for link in http.links if link.opened_s > struck_s and link.answered_s]
        if answers:
            return min(answers) - struck_s
        await asyncio.sleep(0.02)
    return -1.0


async def speed(run: Disturbed, last: int) -> tuple[int, float, float]:
    """Let all the work through; samples, seconds and processor seconds of all processes between the first and the last entry seen."""
    run.open(10**6)
    looks: list[tuple[int, float, float]] = []
    while run.up.returncode is None and run.versions < last:
        await asyncio.sleep(LOOK_EVERY_S)
        if run.versions:
            looks.append((sum(run.entries.values()), time.monotonic(), processor_s([run.up.pid, *descendants(run.up.pid)])))
    begin, end = looks[0], looks[-1]
    return end[0] - begin[0], end[1] - begin[1], end[2] - begin[2]
