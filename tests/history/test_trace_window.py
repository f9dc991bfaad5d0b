"""`streamrl trace RUN --window`: the file keeps the rules of the trace event format, and holds what the ledger and the samples have."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from streamrl.errors import ConfigError
from streamrl.history.record_log import RecordedLog
from streamrl.history.trace_window import Arrival, Swap, WindowEvents, WindowReader
from streamrl.schemas.ledger import Used
from streamrl.schemas.samples import Sample, TurnSpan
from streamrl.schemas.subjects import Subjects
from tests.support import ledgers
from tests.support import recorded as runs
from tests.support.golden_rows import former_samples
from tests.support.printed import Printed
from tests.support.recorded_run import Recorded

Lane = tuple[int, int]
Say = Callable[..., Printed]
VERB = "trace"


def check_format(events: list[dict[str, Any]]) -> dict[Lane, list[dict[str, Any]]]:
    """The rules of the format; returns the slices of each lane, in order of time."""
    named: set[Lane] = set()
    processes: set[int] = set()
    lanes: dict[Lane, list[dict[str, Any]]] = defaultdict(list)
    arrows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in events:
        assert event["ph"] in "MXsf" and isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["name"]
        if event["ph"] == "M":
            if event["name"] == "process_name":
                assert event["args"]["name"] and event["pid"] not in processes
                processes.add(event["pid"])
            elif event["name"] == "thread_name":
                assert event["args"]["name"] and (event["pid"], event["tid"]) not in named
                named.add((event["pid"], event["tid"]))
            continue
        assert isinstance(event["ts"], int) and event["ts"] >= 0
        assert event["pid"] in processes and (event["pid"], event["tid"]) in named
        if event["ph"] == "X":
            assert isinstance(event["dur"], int) and event["dur"] > 0
            lanes[event["pid"], event["tid"]].append(event)
        else:
            assert event["ph"] not in arrows[event["id"]]
            arrows[event["id"]][event["ph"]] = event
    for slices in lanes.values():
        slices.sort(key=lambda one: (one["ts"], -one["dur"]))
        open_until: list[int] = []
        for one in slices:
            while open_until and open_until[-1] <= one["ts"]:
                open_until.pop()
            assert not open_until or one["ts"] + one["dur"] <= open_until[-1], "a slice reaches out of the one that it begins in"
            open_until.append(one["ts"] + one["dur"])
    for arrow in arrows.values():
        assert set(arrow) == {"s", "f"} and arrow["s"]["ts"] <= arrow["f"]["ts"] and arrow["f"]["bp"] == "e"
        for end in arrow.values():
            assert any(one["ts"] <= end["ts"] < one["ts"] + one["dur"] for one in lanes[end["pid"], end["tid"]])
    return lanes


def named(lanes: dict[Lane, list[dict[str, Any]]], beginning: str) -> list[dict[str, Any]]:
    return [one for slices in lanes.values() for one in slices if one["name"].startswith(beginning)]


def written(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["traceEvents"]


async def samples_in(log: RecordedLog, first: int, last: int) -> tuple[int, int]:
    """How many samples the entries name, and how many of them were trained."""
    reader = WindowReader(log, Subjects(log.config.run.name), log.config.trainer.name)
    total = trained = 0
    for entry in await reader.entries(first, last):
        used = {(sequence, rollout) for group in entry.used for rollout, sequence in zip(group.rollouts, group.sequences, strict=True)}
        for arrival in await reader.arrivals(entry):
            total += len(arrival.samples)
            trained += sum((arrival.sequence, sample.rollout) in used for sample in arrival.samples)
    return total, trained


async def test_a_window_of_a_run_of_today(recorded: Recorded, tmp_path: Path, said: Say) -> None:
    out = tmp_path / "window.json"
    total, trained = await samples_in(RecordedLog(recorded.path), 8, 14)
    assert (await asyncio.to_thread(said, recorded.path, "--window", "8..14", "--out", out)).err == ""
    events = written(out)
    lanes = check_format(events)
    assert [one["args"]["version"] for one in named(lanes, "batch")] == [f"0.{number}" for number in range(8, 15)]
    assert len(named(lanes, "task")) >= total > trained > 0
    assert len([event for event in events if event["ph"] == "s"]) == trained
    assert {"wait", "generate", "reward"} <= {one["name"] for slices in lanes.values() for one in slices}
    # Versions that engines committed follow one another; the recording has the events of all of them.
    served = named(lanes, "0.")
    assert {one["name"] for one in served} >= {f"0.{number}" for number in range(8, 14)}
    assert all(earlier["ts"] + earlier["dur"] <= later["ts"] for earlier, later in pairwise(served))
    trained_into = [
        one["args"].get("trained into") for one in named(lanes, "task") if "sequence" in one["args"] and "reward" in one["args"]
    ]
    assert set(trained_into) >= {f"0.{number}" for number in range(8, 15)}


@pytest.mark.parametrize("name", ["fork", "drop", "warmup", "late"])
def test_a_window_of_a_run_of_an_earlier_build(name: str, tmp_path: Path, said: Say) -> None:
    facts = runs.unpack(name, tmp_path)
    out, last = tmp_path / "window.json", len(facts["digests"])
    said(tmp_path / runs.RECORDING, "--window", f"1..{last}", "--out", out, "--json")
    lanes = check_format(written(out))
    assert len(named(lanes, "batch")) == last and named(lanes, "generate" if name != "warmup" else "task")


SECONDS = st.just(0.0) | st.floats(1e9, 1e9 + 3) | st.floats(1e9 - 1e4, 1e9 + 1e4)


@st.composite
def arrival(draw: st.DrawFn, sequence: int) -> Arrival:
    full = former_samples()[0]
    turns = tuple(
        TurnSpan(start=start, length=2, asked_s=draw(SECONDS), began_s=draw(SECONDS), finished_s=draw(SECONDS)) for start in (2, 5)
    )
    samples: list[Sample] = [
        replace(
            full,
            rollout=rollout,
            claimed_s=draw(SECONDS),
            started_s=draw(SECONDS),
            finished_s=draw(SECONDS),
            began_s=draw(SECONDS),
            scored_s=draw(SECONDS),
            turns=turns if draw(st.booleans()) else (),
            producer=draw(st.sampled_from(["", "producer-0", "producer-1"])),
        )
        for rollout in range(3)
    ]
    return Arrival(sequence, draw(SECONDS), tuple(samples))


@given(data=st.data())
def test_clocks_that_disagree_break_no_rule(data: st.DataObject) -> None:
    """Times of several machines, some of them hours off, some not recorded."""
    events = WindowEvents("made")
    for number in range(1, 4):
        metrics = {"perf/step_s": data.draw(st.floats(-1, 100)), "perf/wait_s": data.draw(st.floats(0, 1e5))}
        made = ledgers.entry(number, used=(Used(41, (0, 2), (number, number)),), time_s=data.draw(SECONDS), metrics=metrics)
        events.batch(made, [data.draw(arrival(number))])
    seconds = st.floats(1e9 - 100, 1e9 + 100)
    swaps = [Swap(f"engine-{data.draw(st.integers(0, 1))}", f"0.{n}", data.draw(seconds), data.draw(st.floats(0, 50))) for n in range(4)]
    publications = sorted((time_s - data.draw(st.floats(0, 50)), time_s) for time_s in data.draw(st.lists(seconds, max_size=3)))
    swaps.sort(key=lambda swap: swap.time_s)
    check_format(list(events.events(swaps, publications)))


async def test_a_window_that_is_too_large_is_refused(recorded: Recorded) -> None:
    log = RecordedLog(recorded.path)
    reader = WindowReader(log, Subjects("parent"), "main")
    events = WindowEvents("parent", most=200)
    with pytest.raises(ConfigError, match="at most 200 events") as caught:
        for entry in await reader.entries(3, 16):
            events.batch(entry, await reader.arrivals(entry))
    assert caught.value.hint.startswith("end it before version ")
    with pytest.raises(ConfigError, match=r"got 12\.\.999"):
        await reader.entries(12, 999)


@pytest.mark.parametrize("window", ["", "a..b", "3..", "..3", "3.9", "-1..4", "9..3", "0..3", "1..99999"])
def test_garbage_windows_are_refused(recorded: Recorded, tmp_path: Path, said: Say, window: str) -> None:
    err = said(recorded.path, f"--window={window}", "--out", tmp_path / "window.json", code=1).err
    assert "error: expected --window FROM..TO" in err and not (tmp_path / "window.json").exists()


@pytest.mark.parametrize("arguments", [[], ["--window", "3..4"], ["5", "--out", "x.json"], ["5", "--window", "3..4", "--out", "x.json"]])
def test_a_task_or_a_window(recorded: Recorded, said: Say, arguments: list[str]) -> None:
    assert "expected TASK[/ROLLOUT], or --window" in said(recorded.path, *arguments, code=1).err


def test_a_file_that_cannot_be_written(recorded: Recorded, tmp_path: Path, said: Say) -> None:
    (tmp_path / "folder").mkdir()
    for out in ("nowhere/w.json", "folder"):
        assert "cannot be written" in said(recorded.path, "--window", "8", "--out", tmp_path / out, code=1).err
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
