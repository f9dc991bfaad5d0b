"""What a run that has ended is judged by: the independent audit, and a replay of its log by the command line."""

import asyncio
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pyarrow as pa
from msgspec import UNSET

from streamrl.bus import BusAddress, connect
from streamrl.bus.memory import MemoryBus
from streamrl.bus.protocol import Bus
from streamrl.bus.server import NatsServer
from streamrl.config.load import load
from streamrl.data.model import ensure_model
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode
from streamrl.schemas.samples import Tombstone
from streamrl.schemas.subjects import SAMPLES, WEIGHTS, kind_of
from streamrl.schemas.weights import Manifest
from tests.support.audit.answers import check, read_sessions
from tests.support.audit.audit import audit
from tests.support.audit.raw import read_run
from tests.support.harness import make_run, read_ledger, run_to_end
from tests.support.preloaded import PRELOADED
from tests.support.world.agents import Told
from tests.support.world.commands import ROOT
from tests.support.world.misdeeds import told, wrong_ends
from tests.support.world.shapes import NAME, Shape, open_gate, write_files


class Verdict(msgspec.Struct, frozen=True):
    problems: list[str]
    counts: dict[str, int]
    digests: dict[str, str]
    """Digest of the parameters by version."""


FOLLOWS = (
    re.compile(r"ledger sequence \d+: \S+ goes on after a gap \((end|samples)\)"),
    re.compile(r"task \d+ is lost: nobody held it, .* it was dropped as lost "),
    re.compile(r"stream (samples|ledger): \d+ messages are missing between "),
)
"""What the audit says where the end of a stream was torn off: that something was lost, each time in the run's own words."""


async def judge(run: RunDir, shape: Shape | None = None, made: Mapping[str, set[str]] | None = None, agents: Told | None = None) -> Verdict:
    """Audit and replay a run that is not up."""
    losses = shape is not None and shape.losses
    server = NatsServer(run.bus_store)
    server.start()
    try:
        address = server.address
        report = await audit(address.url, address.user, address.password, NAME, complete=True, directory=run.path)
        wrong = [] if agents is None else await _agents(address, agents)
        bus = await connect(address, NAME, run.load_config().bus)
        entries = await read_ledger(bus, NAME)
        manifests = await _manifests(bus)
        ends = await _ends(bus) if shape is not None and shape.misdeed_every else {}
        await bus.close()
    finally:
        server.stop()
    place = run.path.parents[1]
    gaps = [entry for entry in entries if entry.gap is not UNSET]
    versions = [entry for entry in entries if entry.gap is UNSET]
    problems = [f"audit: {problem}" for problem in report.problems if not (losses and any(f.match(problem) for f in FOLLOWS))]
    problems += [f"agents: {problem}" for problem in wrong]
    # Rows above the version that was gone on from were trained anew; those up to it stay without an entry, which is one more word,
    # unless the run went back behind them later.
    there = {entry.version.number for entry in versions}
    missing = {n for g in gaps if g.gap is not UNSET for a, b in g.gap.missing for n in range(a, min(b, g.version.number) + 1)}
    holes = not missing <= there
    problems += await replay(place, named=len(gaps) + holes)
    # What is behind entries that are lost is verified from where it goes on.
    for gap in gaps:
        if gap.gap is not UNSET and gap.gap.missing and gap.version.number < versions[-1].version.number:
            problems += await replay(place, first=gap.version.number)
    problems += [f"user code: {problem}" for problem in (wrong_ends(told(place), ends) if ends else [])]
    digests: dict[str, set[str]] = {version: set(known) for version, known in (made or {}).items()}
    for one in (*versions, *manifests):
        digests.setdefault(str(one.version), set()).add(one.digest)
    problems += [f"version {version} was given to {len(known)} sets of parameters" for version, known in digests.items() if len(known) > 1]
    counts = {**report.counts, "gaps": len(gaps), "samples": sum(entry.num_samples for entry in versions)}
    return Verdict(problems, counts, {str(entry.version): entry.digest for entry in versions})


async def undisturbed(place: Path, shape: Shape, steps: int) -> dict[str, str]:
    """Digests by version of a run of this shape whose services are in this process and which nobody disturbs."""
    write_files(place, shape)
    open_gate(place, 10**6)
    words = [word for word in shape.arguments(steps, 0, 0, 0) if word != "--set"]
    run, config = make_run(place / "runs", load(place / f"{NAME}.toml", [*words, "engine.advertise="]))
    ensure_model(config, run.model_dir)
    bus = MemoryBus(NAME, config.bus)
    await run_to_end(config, run, bus)
    entries = await read_ledger(bus, NAME)
    await bus.close()
    return {str(entry.version): entry.digest for entry in entries}


async def _agents(address: BusAddress, told: Told) -> list[str]:
    raw = await read_run(address.url, address.user, address.password, NAME)
    queued = {message.sequence - 1 for message in raw.tasks.messages}
    found = check(read_sessions(raw.samples.messages), told.answers, told.ended, queued=queued)
    return [*found, *(f"an answer that no fault explains: {one}" for one in told.wrong)]


async def _manifests(bus: Bus) -> list[Manifest]:
    state = await bus.state(WEIGHTS)
    return [decode((await bus.fetch(WEIGHTS, sequence)).body, Manifest) for sequence in range(state.first, state.last + 1)]


async def _ends(bus: Bus) -> dict[tuple[int, int | None], frozenset[str]]:
    """Reasons of the records of each (task, rollout), `sample` for one with samples; rollout None for records of whole tasks."""
    found: dict[tuple[int, int | None], frozenset[str]] = {}
    state = await bus.state(SAMPLES)
    async for message in bus.read(SAMPLES, after=state.first - 1):
        kind = kind_of(message.subject)
        if kind == "tombstones":
            stone = decode(message.body, Tombstone)
            found[stone.task, stone.rollout] = found.get((stone.task, stone.rollout), frozenset()) | {stone.reason}
        elif kind == "samples":
            with pa.ipc.open_stream(message.body) as reader:
                batch = reader.read_next_batch()
            for task, rollout in set(zip(batch.column("task").to_pylist(), batch.column("rollout").to_pylist(), strict=True)):
                found[task, rollout] = found.get((task, rollout), frozenset()) | {"sample"}
        if message.sequence >= state.last:
            break
    return found


async def replay(place: Path, *, first: int = 0, named: int | None = None) -> list[str]:
    words = ("-m", "streamrl", "replay", NAME, "--verify", "--json", *(("--from", str(first)) if first else ()))
    variables = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as said:
        process = PRELOADED.start(*words, folder=place, environment=variables, out=told.fileno(), err=said.fileno())
        try:
            code = await asyncio.to_thread(process.wait)
        finally:
            process.kill()
        told.seek(0)
        said.seek(0)
        out, err = told.read(), said.read()
    if code not in (0, 1) or not out:
        return [f"replay: exit code {code}: {err.decode()[-500:]}"]
    report = json.loads(out)
    lost = len(report["lost"])
    equal = report["same_fingerprint"] and report["equal"] == report["versions"] and not report["problem"]
    if equal and named in (None, lost) and report["ok"] == (not lost):
        return []
    words_of = f"{report['problem']} {report['lost']} {report['first_difference'] or ''}"
    return [
        f"replay from {first}: {report['equal']} of {report['versions']} versions are equal, {lost} losses named of {named}: {words_of}"
    ]
