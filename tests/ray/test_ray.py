"""`streamrl up` on Ray: of this machine, and on two nodes that are this machine under two addresses."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from streamrl.launch.placed import PlacedWorker
from streamrl.monitor.metrics_file import decoded, files
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.service import Exit
from streamrl.weights.factory import weights_directory
from tests.ray.running import ended, two_nodes, up
from tests.support.processes import alive, find, parent, until, worker_pid
from tests.support.programs import Start, said

pytestmark = [pytest.mark.needs("ray"), pytest.mark.nats, pytest.mark.slow]

ENDLESS = ("--set", "tasks.drop_zero_variance=false", "--set", "run.steps=100000")
ACROSS = ("bus.host=0.0.0.0", "bus.advertise=127.0.0.1", "engine.host=0.0.0.0", "engine.advertise=127.0.0.1")


async def test_a_run_on_a_ray_of_its_own_survives_its_workers_and_its_actors(start: Start, run: RunDir) -> None:
    process = await up(start, "local", "tasks.drop_zero_variance=false", "run.steps=60")
    log = run.log_path("trainer-0")
    await until(lambda: log.exists() and "checkpoint" in log.read_text() and worker_pid(run, "engine"), within_s=90)
    engine, trainer = worker_pid(run, "engine"), worker_pid(run, "trainer")
    assert engine is not None and trainer is not None
    os.kill(engine, signal.SIGKILL)
    # The actor takes its worker along.
    os.kill(parent(trainer), signal.SIGKILL)
    await until(lambda: not alive(trainer))
    out, _ = await ended(process)
    summary: Any = json.loads(out)
    assert (summary["steps"], summary["heldout_last"]) == (60, 1.0)
    events = run.events_path.read_text()
    assert any("engine-0 " in line and "SIGKILL" in line for line in events.splitlines())
    assert "event=actor_lost worker=trainer-0" in events
    assert (events.count("event=worker_restarted worker=engine-0"), events.count("event=worker_restarted worker=trainer-0")) == (1, 1)
    assert find("worker", "--run", str(run.path)) == []
    out, _ = await ended(await start("-m", "streamrl", "replay", "digits", "--verify", "--json"))
    assert json.loads(out)["ok"] is True


async def test_a_silent_worker_is_restarted_and_the_screen_says_why(start: Start, run: RunDir) -> None:
    process = await up(start, "local", *ENDLESS[1::2], "supervise.silent_s=5")
    log = run.log_path("engine-0")
    # By the second commit it has said that it has loaded.
    await until(lambda: log.exists() and log.read_text().count("event=weights_committed") > 1, within_s=90)
    engine = worker_pid(run, "engine")
    assert engine is not None
    os.kill(engine, signal.SIGSTOP)
    said_so = "engine-0 ended with signal SIGKILL (silent for 5 s); restart 1 in 0.1 s"
    await until(lambda: said_so in run.events_path.read_text(), within_s=90)
    process.send_signal(signal.SIGINT)
    await ended(process)
    assert "most recent call first" in log.read_text()


async def test_sinks_and_the_page_run_beside_a_run_on_ray(start: Start, run: RunDir) -> None:
    process = await up(start, "local", 'metrics.sinks=["tensorboard"]')
    await ended(process)
    rows = [row for path in files(run.metrics) for line in path.read_bytes().splitlines() if (row := decoded(line)) is not None]
    trained = [int(row.version.partition(".")[2]) for row in rows if row.kind == "batch"]
    assert trained == list(range(1, len(trained) + 1)) and len(trained) >= 15
    (path,) = run.path.glob("tensorboard/batches/*")
    read = EventAccumulator(str(path.parent), size_guidance={"scalars": 0})
    read.Reload()
    assert [one.step for one in read.Scalars("train/loss")] == trained
    assert "served on port" in run.log_path("page-0").read_text()


async def test_engines_on_another_node_get_their_weights_over_the_bus(start: Start, run: RunDir) -> None:
    cluster, address = await two_nodes(start)
    assert cluster.stdin is not None and cluster.stdout is not None
    there = ("ray.trainer.resources={trainers=1}", "ray.engine.resources={engines=1}", "engine.workers=2")

    _, err = await ended(await up(start, address, *there, "ray.engine.gpus=1"), code=1)
    assert (
        "it asks for 1 trainer with 0.5 CPU, 1 trainers each; 2 engines with 0.5 CPU, 1 GPU, 1 engines each; there is 0 GPU in all" in err
    )
    assert "hint: lower engine.workers" in err

    _, err = await ended(await up(start, address, *there), code=1)
    assert "workers on 127.0.0.2 cannot" in err and "hint: set bus.host" in err

    out, _ = await ended(await up(start, address, *there, *ACROSS))
    summary: Any = json.loads(out)
    assert (summary["steps"], summary["heldout_last"]) == (15, 1.0)
    events = run.events_path.read_text()
    assert {f"event=placed worker=engine-{index} host=127.0.0.2" in events for index in range(2)} == {True}
    assert "weights.transport = bus" in events
    assert run.load_config().weights.transport == "bus"

    cluster.stdin.write(b"hold\n")
    assert (await asyncio.wait_for(cluster.stdout.readline(), 60)) == b"held\n"
    _, err = await ended(await up(start, address, *there, *ACROSS, "ray.start_timeout_s=3"), code=1)
    assert "ray.start_timeout_s = 3 s" in err


async def test_a_host_that_sees_no_run_directory_makes_its_own(start: Start, run: RunDir, place: Path) -> None:
    """An actor's body on this machine, whose run directory of the same name lies elsewhere."""
    process = await start("-m", "streamrl", "up", "run.toml", "--plain", *ENDLESS)
    await until(lambda: worker_pid(run, "producer") and run.log_path("trainer-0").exists(), within_s=60)
    elsewhere = RunDir(place / "other-host" / "digits")
    paths = (run.engine_token_path, run.bus_path_of("producer"))
    files = {str(path.relative_to(run.path)): path.read_bytes() for path in paths}
    body = PlacedWorker(str(elsewhere.path), run.config_path.read_text(), files, "producer", 7, False)
    pid = await body.start()
    assert pid > 0, await body.tail()
    waiting = asyncio.create_task(body.wait())
    log = elsewhere.log_path("producer-7")
    await until(lambda: log.exists() and "event=started" in log.read_text(), within_s=60)
    assert "worker=producer-7" in await body.tail()
    assert elsewhere.role_path("producer").stat().st_mode & 0o777 == 0o600
    assert not elsewhere.role_path("trainer").exists()
    await body.stop()
    assert await asyncio.wait_for(waiting, 30) == (Exit.DRAINED, "")
    memory = weights_directory(run.load_config().weights, elsewhere.name, elsewhere.path)
    memory.mkdir()
    await body.free()
    assert not memory.exists()
    process.send_signal(signal.SIGINT)
    assert (await said(process))[0] == 0


async def test_a_place_without_room_for_a_run_directory_says_so(run: RunDir, place: Path) -> None:
    (place / "file").touch()
    token = {"credentials/engine-token": b"secret"}
    body = PlacedWorker(str(place / "file" / "digits"), "{}", token, "producer", 0, False)
    assert await body.start() == 0
    assert await body.wait() == (Exit.FAILED, "")
    assert "cannot be made" in await body.tail()
