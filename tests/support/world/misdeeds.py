"""User code that misbehaves now and then: a producer and a reward that say what they are about to do, and what must have become of it."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

ENDS: Mapping[str, frozenset[str]] = {
    "sleeps for ever": frozenset({"timeout"}),
    "blocks for ever": frozenset({"timeout", "deliveries"}),
    "spins for ever": frozenset({"timeout", "deliveries"}),
    "sys.exit": frozenset({"failed"}),
    "os._exit": frozenset({"deliveries"}),
    "segfault": frozenset({"deliveries"}),
    "raises": frozenset({"failed"}),
    "prints 1 MB": frozenset({"sample"}),
    "reward sleeps for ever": frozenset({"timeout"}),
    "reward spins for ever": frozenset({"timeout"}),
    "reward sys.exit": frozenset({"failed"}),
    "reward os._exit": frozenset({"failed"}),
    "reward segfault": frozenset({"failed"}),
    "reward raises": frozenset({"failed"}),
}
"""How a rollout ends that does it: by the reason of its record, or with a sample."""

_AGENT = '''
import asyncio
import ctypes
import json
import os
import random
import sys
import time
from pathlib import Path

TOLD = Path(__file__).with_name("misdeeds")
EVERY = {every}
KINDS = {kinds}


def misdeed(task):
    """What is done in a task, and by which rollout: each kind in turn, in an order that chance decides."""
    number, place = divmod(task, EVERY)
    rng = random.Random(number // len(KINDS))
    order = rng.sample(KINDS, len(KINDS))
    draw = random.Random(1000 + number)
    return (order[number % len(KINDS)], draw.randrange(3)) if place == draw.randrange(EVERY) else ("", 0)


def tell(task, rollout, what):
    with TOLD.open("a") as file:
        file.write(json.dumps({{"task": task, "rollout": rollout, "what": what, "time_s": time.time()}}) + "\\n")


def commit(what):
    match what:
        case "blocks for ever":
            time.sleep(10**6)
        case "spins for ever":
            while True:
                pass
        case "sys.exit":
            sys.exit(3)
        case "os._exit":
            os._exit(7)
        case "segfault":
            ctypes.string_at(0)
        case "raises":
            raise ValueError("raised on purpose")
        case "prints 1 MB":
            print("x" * 99 + "\\n" * 10_000)


async def agent(task, engine):
    chat = engine.chat(task)
    await chat.generate()
    what, rollout = misdeed(task.index)
    if what and not what.startswith("reward") and rollout == engine.context.rollout_index:
        tell(task.index, rollout, what)
        if what == "sleeps for ever":
            await asyncio.sleep(10**6)
        commit(what)
    return chat.episode()


def score(task, episode):
    what, rollout = misdeed(task.index)
    if what.startswith("reward") and rollout == episode.rollout:
        tell(task.index, rollout, what)
        what = what.removeprefix("reward ")
        commit("blocks for ever" if what == "sleeps for ever" else what)
    return float(sum(map(ord, episode.completion)) % 7)
'''


def agent(every: int) -> str:
    """The file with `agent` and `score`: one task of `every` misbehaves."""
    return _AGENT.format(every=every, kinds=list(ENDS))


class Misdeed(msgspec.Struct, frozen=True):
    """One that was begun; `time_s` in Unix seconds."""

    task: int
    rollout: int
    what: str
    time_s: float


def told(place: Path) -> list[Misdeed]:
    path = place / "misdeeds"
    return [msgspec.convert(json.loads(line), Misdeed) for line in path.read_text().splitlines()] if path.exists() else []


def wrong_ends(misdeeds: Iterable[Misdeed], ends: Mapping[tuple[int, int | None], frozenset[str]]) -> list[str]:
    """Rollouts whose record does not say what they did, and records of failures that nobody has caused."""
    problems: list[str] = []
    by_task: dict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for one in misdeeds:
        by_task[one.task][one.rollout].add(one.what)
    for task, rollouts in by_task.items():
        # What ends a process of the producer's ends the group.
        of_group = {end for whats in rollouts.values() for what in whats if _is_groups(what) for end in ENDS[what]} - {"sample"}
        for rollout, whats in rollouts.items():
            allowed = {end for what in whats for end in ENDS[what]} | of_group
            found = ends.get((task, rollout), frozenset()) | ends.get((task, None), frozenset())
            if not found <= allowed:
                what, said = ", ".join(sorted(whats)), ", ".join(sorted(found))
                problems.append(f"task {task} rollout {rollout}: {what}, and its records say {said}")
    for (task, rollout), reasons in ends.items():
        if reasons - {"sample"} and task not in by_task:
            problems.append(f"task {task} rollout {rollout} ended as {', '.join(sorted(reasons))}, and nobody misbehaved in it")
    return problems


def _is_groups(what: str) -> bool:
    return "deliveries" in ENDS[what]
