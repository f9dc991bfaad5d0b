"""Sinks of runs: what third parties' own readers find in them, and what becomes of the run when they are in trouble."""

import contextlib
import json
import math
import os
import resource
import signal
import socket
import sqlite3
import struct
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from streamrl.bus import BusAddress
from streamrl.bus.protocol import Bus
from streamrl.config import metrics
from streamrl.config.metrics import MetricsConfig, TensorboardConfig, TrackioConfig, WandbConfig, check_sinks
from streamrl.config.tree import BusConfig, SuperviseConfig
from streamrl.errors import ConfigError
from streamrl.launch.sinks import sinks_beside
from streamrl.monitor.series import Row
from streamrl.monitor.sinks.position import Position, load
from streamrl.monitor.sinks.tensorboard_files import FILE, TensorboardFiles
from streamrl.runtime.rundir import RunDir
from tests.launch.conftest import Hook
from tests.support.processes import alive, descendants, find, until
from tests.support.programs import Start, said
from tests.support.runs import named_run, rows_of
from tests.support.tiny import evaluated, learned

pytestmark = pytest.mark.nats
REWARD = "rollout/raw_reward"


class Beside:
    """The sinks of a run whose trainer is this test: it writes to the ledger, and no worker is there."""

    def __init__(self, run: RunDir, bus: Bus) -> None:
        self.run = run
        self.notes: list[str] = []
        self._bus = bus

    @contextlib.asynccontextmanager
    async def kept(self, kind: str, *, drain_s: float = 60.0, **options: object) -> AsyncGenerator[None]:
        found = self.run.load_config()
        config = msgspec.structs.replace(found, metrics=MetricsConfig(sinks=(kind,), **options))  # type: ignore[arg-type]
        self.run.write_config(config)
        async with sinks_beside(config, self.run, self.notes.append, drain_s=drain_s).kept():
            yield

    async def train(self, first: int, last: int) -> None:
        await learned(self._bus, self.run.name, first, last)

    async def evaluate(self, number: int, accuracy: float) -> None:
        await evaluated(self._bus, self.run.name, number, accuracy)

    async def written(self, kind: str, version: str) -> None:
        """Return once the sink has stored that it has written a version."""
        await until(lambda: load(self.position(kind)).version == version, within_s=150)

    def position(self, kind: str) -> Path:
        return self.run.sink_dir(kind) / "position.json"

    def pid(self, kind: str) -> int:
        (pid,) = find("streamrl.monitor.sinks", kind, "--run", str(self.run.path))
        return pid

    def log(self, kind: str) -> str:
        path = self.run.log_path(f"sink-{kind}-0")
        return path.read_text() if path.is_file() else ""


@pytest.fixture
async def beside(tmp_path: Path, nats_address: BusAddress, nats_bus: Bus, run_id: str) -> AsyncIterator[Beside]:
    run = named_run(tmp_path / run_id, bus=BusConfig(patience_s=60.0), supervise=SuperviseConfig(backoff_s=0.05))
    nats_address.save(run.bus_path)
    yield Beside(run, nats_bus)


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return [(one.step, one.value) for one in read.Scalars(tag)]


def steps(folder: Path) -> list[int]:
    return [step for step, _ in scalars(folder / "batches", REWARD)]


def as_float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def scraped(port: int) -> dict[tuple[str, str], float]:
    """Read what an endpoint says, by Prometheus' own parser."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    families = text_string_to_metric_families(text)
    return {(one.name, one.labels.get("worker", "")): one.value for family in families for one in family.samples}


async def test_all_sinks_have_what_the_file_has_and_a_port_in_use_costs_a_line(
    up: Start, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)  # without a key, online is offline too
    monkeypatch.setenv("HOME", str(run.path.parent.parent))
    log = run.log_path("sink-prometheus-0")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = int(other.getsockname()[1])
        sinks = 'metrics.sinks=["tensorboard","prometheus","wandb"]'
        process = await up("learn-and-stay", sinks, f"metrics.prometheus.port={port}", "metrics.wandb.mode=online")
        await until(lambda: log.is_file() and log.read_text().count("expected to listen on") >= 2, within_s=120)
    await until(lambda: scraped(port).get(("streamrl_version", "")) == 30, within_s=120)
    await until(
        lambda: bool(rows_of(run, "batch")) and rows_of(run, "batch")[-1].version.endswith(".30"), within_s=60
    )  # the file is written by itself
    found, rows = scraped(port), rows_of(run, "batch")
    process.send_signal(signal.SIGINT)
    code, out, err = await said(process)
    assert (code, err) == (0, ""), out
    assert out.count("the sink") == out.count("the sink prometheus") == out.count("expected to listen on") == 1

    numbers = [(int(row.version.partition(".")[2]), row.values[REWARD]) for row in rows]
    assert [number for number, _ in numbers] == list(range(1, 31))
    assert found["streamrl_rollout_raw_reward", ""] == numbers[-1][1] == 1.0
    assert all(math.isfinite(value) for value in found.values())
    folder = run.path / "tensorboard"
    assert scalars(folder / "batches", REWARD) == [(number, as_float32(value)) for number, value in numbers]
    assert scalars(folder / "evaluations", "eval/heldout") == [(0, 0.125), (30, 0.875)]
    assert [(one["version"], one[REWARD]) for one in wandb_history(run) if REWARD in one] == numbers
    assert "reason=no key" in run.log_path("sink-wandb-0").read_text()


@pytest.mark.parametrize("kind", ["tensorboard", pytest.param("trackio", marks=pytest.mark.needs("trackio"))])
async def test_a_killed_sink_goes_on_where_it_was_and_no_step_is_there_twice(beside: Beside, tmp_path: Path, kind: str) -> None:
    """Trackio's has by then rows behind the position that it had stored, as a kill between the two leaves it."""
    place = tmp_path / "elsewhere"
    async with beside.kept(kind, tensorboard=TensorboardConfig(dir=str(place)), trackio=TrackioConfig(dir=str(place))):
        await beside.train(1, 15)
        await beside.evaluate(0, 0.125)
        await beside.written(kind, "0.15")
        pid = beside.pid(kind)
        os.kill(pid, signal.SIGKILL)
        while alive(pid):  # it is not started again before this test waits
            pass
        if kind == "trackio":
            position = beside.position(kind)
            position.write_text(json.dumps(json.loads(position.read_bytes()) | {"version": "0.7"}))
        await beside.train(16, 30)
        await beside.written(kind, "0.30")
        await beside.evaluate(30, 0.875)
    (note,) = beside.notes
    assert f"the sink {kind} ended with signal SIGKILL" in note
    expected = [(number, number / 30) for number in range(1, 31)]
    if kind == "tensorboard":
        assert scalars(place / beside.run.name / "batches", REWARD) == [(number, as_float32(value)) for number, value in expected]
        return
    rows = trackio_rows(place / "streamrl.db", beside.run.name)
    assert sorted((step, values[REWARD]) for step, values in rows if REWARD in values) == expected
    assert [values["eval/heldout"] for _, values in rows if "eval/heldout" in values] == [0.125, 0.875]


def test_what_a_kill_left_behind_the_position_is_cut(tmp_path: Path) -> None:
    folder, path = tmp_path / "tensorboard", tmp_path / "position.json"
    rows = [Row(time_s=1.0, kind="batch", version=f"0.{step}", step=step, values={REWARD: 0.5}) for step in range(1, 32)]
    for part in (rows[:30], rows[30:]):
        sink = TensorboardFiles(folder, load(path) if path.is_file() else Position(began_s=1.0), path)
        sink.write(part)
        sink.close()
        if part == rows[:30]:
            with (folder / "batches" / FILE).open("ab") as file:
                file.write(b"\x20\0\0\0torn")
    assert steps(folder) == list(range(1, 32))


async def test_a_sink_that_is_stopped_does_not_delay_the_end_and_is_no_orphan(beside: Beside) -> None:
    async with beside.kept("tensorboard", drain_s=1.0):
        await beside.train(1, 2)
        await beside.written("tensorboard", "0.2")
        pid = beside.pid("tensorboard")
        os.kill(pid, signal.SIGSTOP)
    (note,) = beside.notes
    assert "within 1 s" in note
    assert not alive(pid)


async def test_a_sink_whose_folder_cannot_be_written_is_one_line(beside: Beside, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    async with beside.kept("tensorboard", tensorboard=TensorboardConfig(dir=str(tmp_path / "taken"))):
        await until(lambda: beside.log("tensorboard").count("event=crashed") >= 2, within_s=120)
    (note,) = beside.notes
    assert "ended with exit code 1" in note


@pytest.mark.parametrize("kind", ["tensorboard", pytest.param("wandb", marks=pytest.mark.slow)])
async def test_a_disk_that_is_full_under_a_sink_costs_a_line(beside: Beside, kind: str) -> None:
    """Full for its processes alone, by the kernel's limit of a file's size; one that is started again has room."""
    async with beside.kept(kind, wandb=WandbConfig(mode="offline")):
        await beside.train(1, 10)
        await beside.written(kind, "0.10")
        pid = beside.pid(kind)
        for each in (pid, *descendants(pid)):
            resource.prlimit(each, resource.RLIMIT_FSIZE, (64, 64))
        await beside.train(11, 20)
        await until(lambda: not alive(pid), within_s=120)
        await beside.train(21, 30)
        await beside.written(kind, "0.30")
    (note,) = beside.notes
    assert f"the sink {kind} ended with" in note
    assert len(beside.log(kind)) < 100_000
    if kind == "tensorboard":
        assert steps(beside.run.path / "tensorboard") == list(range(1, 31))


def test_a_package_that_is_missing_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(metrics.PACKAGES, "wandb", "no_such_package_of_wandb")
    check_sinks(MetricsConfig())
    with pytest.raises(ConfigError, match=r"streamrl\[wandb\]"):
        check_sinks(MetricsConfig(sinks=("wandb",)))


def wandb_history(run: RunDir) -> list[dict[str, float]]:
    paths = run.sink_dir("wandb").glob("wandb/offline-run-*/run-*.wandb")
    return [one for path in paths for one in wandb_records(path)]


def wandb_records(path: Path) -> list[dict[str, float]]:
    """What a run's file has, by W&B's own record type; the file is a log in LevelDB's format behind seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    data, place, parts, found = path.read_bytes(), 7, b"", list[dict[str, float]]()
    assert data[:4] == b":W&B"
    while place < len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            record, parts = Record.FromString(parts), b""
            if record.HasField("history"):
                items = record.history.item
                found.append({one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items})
    return found


def trackio_rows(path: Path, run: str) -> list[tuple[int, dict[str, float]]]:
    with contextlib.closing(sqlite3.connect(path)) as store:
        assert store.execute("SELECT count(*) FROM configs").fetchone() == (1,)
        found = store.execute("SELECT step, metrics FROM metrics WHERE run_name = ?", (run,))
        return [(step, json.loads(values)) for step, values in found]


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("a" * 40, "returned error 401"),
        pytest.param("too-short", "WANDB_API_KEY invalid", marks=pytest.mark.slow),
        pytest.param("b" * 40, "context deadline exceeded", marks=pytest.mark.slow),
    ],
)
async def test_a_wrong_key_or_no_service_is_one_line_and_the_rows_are_kept_offline(
    beside: Beside, hook: Hook, key: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook.status = 401  # it knows no key
    if why != "returned error 401":
        hook.close()
    monkeypatch.setenv("WANDB_BASE_URL", hook.base)
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("HOME", str(beside.run.path.parent))
    async with beside.kept("wandb"):
        await beside.train(1, 30)
        await beside.written("wandb", "0.30")
    assert beside.notes == []
    log = beside.log("wandb")
    assert log.count("event=wandb_offline") == 1 and why in log and key not in log
    assert len(log) < 5000
    assert len([one for one in wandb_history(beside.run) if REWARD in one]) == 30
