"""What a run that has ended is judged by: the independent audit, and a replay of its log by the command line."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import msgspec

from streamrl.bus import connect
from streamrl.bus.server import NatsServer
from streamrl.runtime.rundir import RunDir
from tests.audit.audit import audit
from tests.faults.disturbed import ROOT
from tests.faults.shapes import NAME
from tests.loop.harness import read_ledger


class Verdict(msgspec.Struct, frozen=True):
    """What was found of one run."""

    problems: list[str]
    counts: dict[str, int]
    digests: dict[str, str]
    """Digest of the parameters by version."""


async def judge(run: RunDir) -> Verdict:
    """Audit and replay a run that is not up."""
    server = NatsServer(run.bus_store)
    server.start()
    try:
        address = server.address
        report = await audit(address.url, address.user, address.password, NAME, complete=True, directory=run.path)
        bus = await connect(address, NAME, run.load_config().bus)
        entries = await read_ledger(bus, NAME)
        await bus.close()
    finally:
        server.stop()
    problems = [f"audit: {problem}" for problem in report.problems]
    problems += await replay(run.path.parents[1])
    return Verdict(problems, report.counts, {str(entry.version): entry.digest for entry in entries})


async def replay(place: Path) -> list[str]:
    """What `streamrl replay --verify` says against the run in `place`."""
    words = ("-m", "streamrl", "replay", NAME, "--verify", "--json")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, cwd=place, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, stdout=pipe, stderr=pipe
    )
    out, err = await process.communicate()
    if process.returncode not in (0, 1) or not out:
        return [f"replay: exit code {process.returncode}: {err.decode()[-500:]}"]
    report = json.loads(out)
    equal = report["ok"] and report["same_fingerprint"] and report["equal"] == report["versions"]
    return [] if equal else [f"replay: {report['equal']} of {report['versions']} versions are equal: {report['problem']}"]
