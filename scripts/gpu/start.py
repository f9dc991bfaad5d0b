"""The time line of a run's start, from its logs and its log on the bus: `start.py RUN BEGAN NAME OUT` (Unix seconds; see start.sh)."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from datetime import datetime
from pathlib import Path

from streamrl.runtime.run_bus import open_bus
from streamrl.runtime.rundir import RunDir

MARKS = {
    "supervisor": (("prepared", "text=(starting|resuming)"),),
    "trainer-0": (
        ("process", "event=started "),
        ("model loaded", "event=fence_taken"),
        ("first version published", "event=weights_published"),
    ),
    "engine-0": (
        ("process", "event=started "),
        ("SGLang begins", "event=sglang_starting"),
        ("SGLang answers", "event=sglang_started"),
        ("first version served", "event=weights_committed"),
    ),
    "engine-0-server": (
        ("imported", r"\] server_args="),
        ("scheduler begins", "Init (torch distributed|parallel) begin"),
        ("weights begin", "Load weight begin"),
        ("weights end", "Load weight end"),
        ("graphs begin", "(?i)capture (decode )?cuda graph.* begin"),
        ("graphs end", "(?i)capture (decode )?cuda graph.* end"),
        ("second graphs end", "event=streamrl_graphs"),
        ("plugin", "event=streamrl_plugin"),
    ),
    "producer-0": (("process", "event=started "), ("engine found", "event=engine_found")),
    "evaluator-0": (("process", "event=started "), ("engine found", "event=engine_found")),
}
"""The words that are shown for each log file, and what the first line of it matches."""
PLAIN = {"processes": "event=streamrl_(used|spawned)", "graphs": "event=streamrl_graphs"}
"""Lines of the server's log that are kept as they are."""


def time_of(line: str) -> float | None:
    """When a line was written; ours are in UTC, SGLang's in local time."""
    if found := re.match(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+)Z", line):
        return datetime.fromisoformat(found[1] + "+00:00").timestamp()
    if found := re.match(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", line):
        return datetime.fromisoformat(found[1]).timestamp()
    return None


def marks(run: RunDir, began_s: float) -> list[tuple[float, str]]:
    """Seconds since the start and words for what the logs say, in the order of time."""
    found: list[tuple[float, str]] = []
    for worker, wanted in MARKS.items():
        path = run.log_path(worker)
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        for what, pattern in wanted:
            times = (time_of(line) for line in lines if re.search(pattern, line))
            if (first := next((one for one in times if one is not None), None)) is not None:
                found.append((first - began_s, f"{worker}: {what}"))
    return sorted(found)


async def stored(run: RunDir) -> list[tuple[float, str]]:
    """Unix seconds of the first rollout and of the first batch on the bus."""
    found: list[tuple[float, str]] = []
    async with open_bus(run) as bus:
        for stream, what in (("samples", "first rollout published"), ("ledger", "first batch trained")):
            message = await bus.first_from(stream, 1)
            while message is not None and message.subject.endswith((".rewards", ".marks")):
                message = await bus.first_from(stream, message.sequence + 1)
            if message is not None:
                found.append((message.time_s, what))
    return found


def main(place: str, began: str, name: str, out: str) -> None:
    """Print the time line of the run in `place`, and add it to start.json in `out`."""
    run, began_s = RunDir(Path(place)), float(began)
    on_bus = [(time_s - began_s, what) for time_s, what in asyncio.run(stored(run))]
    line = sorted([*marks(run, began_s), *on_bus])
    server = run.log_path("engine-0-server")
    text = server.read_text(encoding="utf-8", errors="replace") if server.exists() else ""
    said = {what: [one.strip() for one in text.splitlines() if re.search(pattern, one)] for what, pattern in PLAIN.items()}
    print(f"== {name}")
    for seconds, what in line:
        print(f"{seconds:7.1f} s  {what}")
    result = {"name": name, "seconds": {what: round(seconds, 1) for seconds, what in line}, **said}
    with (Path(out) / "start.json").open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
