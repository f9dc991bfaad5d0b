"""Sinks of runs: what third parties' own readers find in them, and what becomes of the run when they are in trouble."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import socket
import sqlite3
import struct
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from streamrl.monitor.metrics_file import decoded, files
from streamrl.monitor.series import Row
from streamrl.runtime.rundir import RunDir
from tests.support.processes import alive, descendants, until
from tests.support.programs import Start, said

pytestmark = pytest.mark.nats


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def batches(run: RunDir) -> list[Row]:
    rows = [decoded(line) for path in files(run.metrics) for line in path.read_bytes().splitlines()]
    return [row for row in rows if row is not None and row.kind == "batch"]


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return [(one.step, one.value) for one in read.Scalars(tag)]


def sink_pids(kind: str, above: int | None) -> list[int]:
    assert above is not None
    words = [b"streamrl.monitor.sinks", kind.encode()]
    return [pid for pid in descendants(above) if all(word in command(pid) for word in words)]


def command(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def as_float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


async def test_tensorboard_reads_what_the_metrics_file_has(up: Start, run: RunDir) -> None:
    code, out, err = await said(await up("learn", 'metrics.sinks=["tensorboard"]'))
    assert (code, err) == (0, ""), out
    name = "rollout/raw_reward"
    expected = [(int(row.version.partition(".")[2]), as_float32(row.values[name])) for row in batches(run)]
    assert len(expected) == 30
    assert scalars(run.path / "tensorboard" / "batches", name) == expected, out
    assert scalars(run.path / "tensorboard" / "evaluations", "eval/heldout") == [(0, 0.125), (30, 0.875)]
    assert "sink" not in out


async def test_a_killed_sink_goes_on_where_it_was_and_no_step_is_there_twice(up: Start, run: RunDir) -> None:
    process = await up("learn-slowly", 'metrics.sinks=["tensorboard"]')
    position = run.sink_dir("tensorboard") / "position.json"
    await until(lambda: position.is_file() and json.loads(position.read_bytes())["version"], within_s=120)
    (pid,) = sink_pids("tensorboard", process.pid)
    os.kill(pid, signal.SIGKILL)
    code, out, err = await said(process)
    assert (code, err) == (0, ""), out
    assert [step for step, _ in scalars(run.path / "tensorboard" / "batches", "rollout/raw_reward")] == list(range(1, 31))
    assert out.count("the sink tensorboard ended with signal SIGKILL") == 1


async def test_what_a_kill_left_behind_the_position_is_cut(up: Start, run: RunDir) -> None:
    code, out, _ = await said(await up("learn", 'metrics.sinks=["tensorboard"]'))
    assert code == 0, out
    from streamrl.monitor.sinks.position import load
    from streamrl.monitor.sinks.tensorboard_files import FILE, TensorboardFiles

    folder, path = run.path / "tensorboard", run.sink_dir("tensorboard") / "position.json"
    with (folder / "batches" / FILE).open("ab") as file:
        file.write(b"\x20\0\0\0torn")
    position = load(path)
    sink = TensorboardFiles(folder, position, path)
    sink.write([Row(time_s=1.0, kind="batch", version="0.31", step=31, values={"rollout/raw_reward": 0.5})])
    sink.close()
    assert [step for step, _ in scalars(folder / "batches", "rollout/raw_reward")] == list(range(1, 32))


async def test_a_scrape_is_read_by_prometheus_own_parser(up: Start, run: RunDir) -> None:
    port = free_port()
    process = await up("learn-and-stay", 'metrics.sinks=["prometheus"]', f"metrics.prometheus.port={port}")

    def scraped() -> dict[tuple[str, str], float]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            return {}
        families = text_string_to_metric_families(text)
        return {(one.name, one.labels.get("worker", "")): one.value for family in families for one in family.samples}

    await until(lambda: scraped().get(("streamrl_version", "")) == 30, within_s=120)
    await until(lambda: bool(batches(run)) and batches(run)[-1].version.endswith(".30"), within_s=60)  # the file is written by itself
    found = scraped()
    assert found["streamrl_rollout_raw_reward", ""] == batches(run)[-1].values["rollout/raw_reward"] == 1.0
    assert all(math.isfinite(value) for value in found.values())
    process.send_signal(signal.SIGINT)
    code, _, err = await said(process)
    assert (code, err) == (0, "")


async def test_a_port_in_use_is_a_sentence_and_tried_again(up: Start, run: RunDir) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = int(other.getsockname()[1])
        process = await up("learn-and-stay", 'metrics.sinks=["prometheus"]', f"metrics.prometheus.port={port}")
        log = run.log_path("sink-prometheus-0")
        await until(lambda: log.is_file() and log.read_text().count("expected to listen on") >= 2, within_s=120)
    await until(lambda: answers(port), within_s=120)
    process.send_signal(signal.SIGINT)
    code, out, err = await said(process)
    assert (code, err) == (0, "")
    assert out.count("expected to listen on") == 1


def answers(port: int) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).status == 200
    except OSError:
        return False


async def test_a_sink_that_is_stopped_does_not_delay_the_run_and_is_no_orphan(up: Start, run: RunDir) -> None:
    process = await up("learn-slowly", 'metrics.sinks=["tensorboard"]')
    await until(lambda: sink_pids("tensorboard", process.pid), within_s=60)
    (pid,) = sink_pids("tensorboard", process.pid)
    os.kill(pid, signal.SIGSTOP)
    code, out, err = await said(process)
    assert (code, err) == (0, "")
    assert "demo finished: 30 steps" in out and "the sink tensorboard did not end within" in out
    assert not alive(pid)


async def test_a_sink_dies_with_the_supervisor(up: Start, run: RunDir) -> None:
    process = await up("endless", 'metrics.sinks=["tensorboard"]')
    await until(lambda: sink_pids("tensorboard", process.pid), within_s=60)
    pids = sink_pids("tensorboard", process.pid)
    await until(lambda: (run.sink_dir("tensorboard") / "position.json").is_file(), within_s=120)
    process.kill()
    await process.wait()
    await until(lambda: not any(alive(pid) for pid in pids))


async def test_a_sink_whose_folder_cannot_be_written_is_one_line(up: Start, place: Path) -> None:
    (place / "taken").write_text("a file")
    code, out, err = await said(await up("learn-slowly", 'metrics.sinks=["tensorboard"]', f"metrics.tensorboard.dir={place / 'taken'}"))
    assert (code, err) == (0, "")
    assert out.count("the sink tensorboard ended with exit code 1") == 1 and "demo finished: 30 steps" in out


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
async def test_a_disk_that_is_full_under_a_sink_costs_lines_and_never_the_run(up: Start, run: RunDir, kind: str) -> None:
    """Full for its processes alone, by the kernel's limit of a file's size; one that is started again has room."""
    process = await up("learn-and-stay", f'metrics.sinks=["{kind}"]', "metrics.wandb.mode=offline")
    await until(lambda: any(path.stat().st_size for path in written(run, kind)), within_s=120)
    (pid,) = sink_pids(kind, process.pid)
    for each in (pid, *descendants(pid)):
        resource.prlimit(each, resource.RLIMIT_FSIZE, (64, 64))
    os.kill(pid, 0)
    await until(lambda: not alive(pid), within_s=120)
    await until(lambda: sink_pids(kind, process.pid), within_s=120)
    process.send_signal(signal.SIGINT)
    code, out, err = await said(process)
    assert (code, err) == (0, "")
    assert out.count(f"the sink {kind} ended with") == 1
    assert run.log_path(f"sink-{kind}-0").stat().st_size < 100_000
    assert [row.step for row in batches(run)] == list(range(1, 31))


def written(run: RunDir, kind: str) -> list[Path]:
    return list(run.path.glob("tensorboard/batches/*" if kind == "tensorboard" else "sinks/wandb/wandb/offline-run-*/run-*.wandb"))


async def test_a_package_that_is_missing_is_said_before_anything_starts(up: Start, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    from streamrl.config import metrics
    from streamrl.config.metrics import MetricsConfig, check_sinks
    from streamrl.errors import ConfigError

    monkeypatch.setitem(metrics.PACKAGES, "wandb", "no_such_package_of_wandb")
    check_sinks(MetricsConfig())
    with pytest.raises(ConfigError, match=r"streamrl\[wandb\]"):
        check_sinks(MetricsConfig(sinks=("wandb",)))


def wandb_history(path: Path) -> list[dict[str, float]]:
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


@pytest.mark.needs("trackio")
async def test_the_store_of_trackio_has_each_batch_once_over_a_kill(up: Start, run: RunDir) -> None:
    process = await up("learn-slowly", 'metrics.sinks=["trackio"]')
    position = run.sink_dir("trackio") / "position.json"
    await until(lambda: position.is_file() and json.loads(position.read_bytes())["version"], within_s=120)
    (pid,) = sink_pids("trackio", process.pid)
    os.kill(pid, signal.SIGKILL)
    code, out, err = await said(process)
    assert (code, err) == (0, ""), out
    rows = trackio_rows(run.sink_dir("trackio") / "streamrl.db")
    name = "rollout/raw_reward"
    assert [(step, values[name]) for step, values in rows if name in values] == [
        (int(row.version.partition(".")[2]), row.values[name]) for row in batches(run)
    ]
    assert [values["eval/heldout"] for _, values in rows if "eval/heldout" in values] == [0.125, 0.875]


@pytest.mark.needs("trackio")
async def test_rows_that_trackio_has_before_the_position_was_stored_are_there_once(up: Start, run: RunDir, place: Path) -> None:
    """As a kill between the two leaves it; the store may lie elsewhere, and have several runs."""
    position = run.sink_dir("trackio") / "position.json"
    for again in (False, True):
        process = await up("learn-and-stay", 'metrics.sinks=["trackio"]', f"metrics.trackio.dir={place / 'store'}")
        await until(lambda: position.is_file() and json.loads(position.read_bytes())["version"] == "0.30", within_s=120)
        process.send_signal(signal.SIGINT)
        code, out, err = await said(process)
        assert (code, err) == (0, ""), out
        if not again:
            position.write_text(json.dumps(json.loads(position.read_bytes()) | {"version": "0.7"}))
    rows = trackio_rows(place / "store" / "streamrl.db")
    assert sorted(step for step, values in rows if "rollout/raw_reward" in values) == list(range(1, 31))


def trackio_rows(path: Path) -> list[tuple[int, dict[str, float]]]:
    with contextlib.closing(sqlite3.connect(path)) as store:
        assert store.execute("SELECT count(*) FROM configs").fetchone() == (1,)
        return [(step, json.loads(metrics)) for step, metrics in store.execute("SELECT step, metrics FROM metrics WHERE run_name = 'demo'")]


class Refuses(BaseHTTPRequestHandler):
    """A service that knows no key."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(401)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(
    ("key", "why"), [("a" * 40, "returned error 401"), ("too-short", "WANDB_API_KEY invalid"), ("b" * 40, "context deadline exceeded")]
)
async def test_a_wrong_key_or_no_service_is_one_line_and_the_rows_are_kept_offline(
    up: Start, run: RunDir, key: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    answering = threading.Thread(target=service.serve_forever)
    if why == "returned error 401":
        answering.start()
    else:
        service.server_close()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{service.server_port}")
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("HOME", str(run.path.parent.parent))
    try:
        process = await up("learn-and-stay", 'metrics.sinks=["wandb"]')
        await until(lambda: any(path.stat().st_size for path in written(run, "wandb")), within_s=100)
        await until(lambda: len(batches(run)) == 30, within_s=60)
        process.send_signal(signal.SIGINT)
        code, out, err = await said(process)
    finally:
        if answering.ident is not None:
            service.shutdown()
            answering.join()
            service.server_close()
    assert (code, err) == (0, ""), out
    assert "the sink" not in out
    log = run.log_path("sink-wandb-0").read_text()
    assert log.count("event=wandb_offline") == 1 and why in log and key not in log
    assert len(log) < 5000
    assert len([one for path in written(run, "wandb") for one in wandb_history(path) if "rollout/raw_reward" in one]) == 30


@pytest.mark.parametrize("mode", ["offline", "online"])
async def test_the_offline_directory_of_wandb_has_the_batches(up: Start, run: RunDir, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)  # without a key, online is offline too
    monkeypatch.setenv("HOME", str(run.path.parent.parent))
    code, out, err = await said(await up("learn-slowly", 'metrics.sinks=["wandb"]', f"metrics.wandb.mode={mode}"))
    assert (code, err) == (0, ""), out
    (path,) = run.sink_dir("wandb").glob("wandb/offline-run-*/run-*.wandb")
    history = wandb_history(path)
    rewards = [(one["version"], one["rollout/raw_reward"]) for one in history if "rollout/raw_reward" in one]
    assert rewards == [(int(row.version.partition(".")[2]), row.values["rollout/raw_reward"]) for row in batches(run)]
    assert ("no key" in run.log_path("sink-wandb-0").read_text()) == (mode == "online")
