"""Before the load: that versions arrive whole, that tokens follow the weights, and that equal weights change nothing."""

from __future__ import annotations

import asyncio

from benchmarks.report import Check
from benchmarks.weights.engine import BenchEngine
from benchmarks.weights.options import Mode
from benchmarks.weights.records import UpdateRecord
from benchmarks.weights.updates import Updates

_SHORT, _LONG = 32, 256
"""Tokens of the answers that are compared."""
_PUSHES = 3
_TRIES = 5
"""On a busy machine the tokens may all be made before the first update is committed."""


async def check_updates(engine: BenchEngine, updates: Updates, *, distributed: bool = False) -> tuple[list[Check], list[UpdateRecord]]:
    """Bring several versions into the engine, idle and decoding one request; every rank digests each of them.

    Args:
        engine: serves them.
        updates: `connected` for what is asked.
        distributed: try SGLang's own update over a process group too.
    """
    records: list[UpdateRecord] = []
    answers: list[list[int]] = []
    for _ in range(3):  # contents A, B, A; no request runs
        records.append(await updates.apply(Mode.FLIP, -1, digest=True))
        answers.append(await engine.greedy(_SHORT))
    undisturbed = await engine.greedy(_LONG)
    disturbed, pushes = undisturbed, 0
    for _ in range(_TRIES):
        running = asyncio.create_task(engine.greedy(_LONG))
        pushes = 0
        for _ in range(_PUSHES):
            records.append(await updates.apply(Mode.PACED, -1, change=False, digest=True))
            # One that was committed after the last token has shown nothing.
            pushes += not running.done()
        disturbed = await running
        if pushes or disturbed != undisturbed:
            break
    checks = [
        Check("an idle engine serves a version at once", all(not record.error for record in records[:3]), _errors(records[:3])),
        Check("the same weights give the same tokens", answers[0] == answers[2], f"{_SHORT} greedy tokens, versions 1 and 3"),
        Check("other weights give other tokens", answers[0] != answers[1], f"{_SHORT} greedy tokens, versions 1 and 2"),
        Check(
            "pushing the same bytes changes no token",
            disturbed == undisturbed and pushes > 0,
            f"{_LONG} greedy tokens, {pushes} updates while they were made",
        ),
    ]
    if distributed:
        records.append(await updates.apply(Mode.DISTRIBUTED, -1))
        same = await engine.greedy(_SHORT) == answers[1]
        detail = records[-1].error or f"{_SHORT} greedy tokens, version {records[-1].version} like version 2"
        checks.append(Check("stock's broadcast gives the same tokens as ours", same and not records[-1].error, detail))
    return checks, records


def _errors(records: list[UpdateRecord]) -> str:
    return "; ".join(record.error for record in records if record.error) or f"{len(records)} versions"
