from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import pytest

from streamrl.monitor.metrics_file import decoded, files
from streamrl.monitor.series import Row
from streamrl.runtime.lock import holder
from streamrl.runtime.rundir import RunDir
from tests.support.processes import alive, read_pids, server_pid, until
from tests.support.programs import Start, said

pytestmark = pytest.mark.nats


def nothing_runs(run: RunDir) -> bool:
    return server_pid(run) is None and not any(alive(pid) for pid in read_pids(run.path / "pids"))


async def test_a_run_ends_when_its_trainer_has_finished(up: Start, run: RunDir) -> None:
    code, out, err = await said(await up("learn"))
    assert (code, err) == (0, "")
    summary = json.loads(run.summary_path.read_text())
    assert (summary["steps"], summary["tokens_trained"], summary["staleness_max"]) == (30, 300, 1)
    assert (summary["heldout_first"], summary["heldout_last"]) == (0.125, 0.875)
    assert summary["reward_last"] == pytest.approx(20.5 / 30)
    assert run.plot_path.read_bytes().startswith(b"\x89PNG")
    assert "5 wrong" in out
    assert "demo finished: 30 steps" in out
    assert nothing_runs(run)
    assert holder(run) is None
    assert (run.bus_path.stat().st_mode & 0o777, run.path.stat().st_mode & 0o777) == (0o600, 0o700)


async def test_the_metrics_of_all_sessions_of_a_run_are_in_its_directory(up: Start, run: RunDir) -> None:
    process = await up("learn", "--set", "run.steps=30")
    await until(lambda: any(row.kind == "batch" for path in files(run.metrics) for row in rows_of(path)), within_s=120)
    process.kill()
    await process.wait()
    with (run.metrics / "metrics.jsonl").open("ab") as file:
        file.write(b'{"time_s":17')
    run.summary_path.unlink(missing_ok=True)  # else a first session that had come to its end leaves nothing to do
    code, _, err = await said(await up("learn", "--set", "run.steps=30"))
    assert (code, err) == (0, "")
    rows = [row for path in files(run.metrics) for row in rows_of(path)]
    batches = [row.version for row in rows if row.kind == "batch"]
    assert len(batches) == len(set(batches)) and [row.step for row in rows if row.kind == "batch"][-1] == 30
    assert {row.of for row in rows if row.kind == "window"} >= {""}
    assert all(line.endswith(b"}") for line in (run.metrics / "metrics.jsonl").read_bytes().splitlines())


def rows_of(path: Path) -> list[Row]:
    return [row for line in path.read_bytes().splitlines() if (row := decoded(line)) is not None]


async def test_a_run_that_is_over_goes_on_with_more_steps_and_its_schedule_is_recorded(up: Start, run: RunDir) -> None:
    code, out, err = await said(await up("learn", "--set", "run.steps=30"))
    assert (code, err) == (0, "") and "schedule" not in out
    assert run.load_config().trainer.optimizer.decay_steps == 30
    code, out, err = await said(await up("learn", "--set", "run.steps=50"))
    assert (code, err) == (0, "")
    assert "run.steps is 50, the learning rate's schedule still that of the first start, over 30 batches" in out
    config = run.load_config()
    assert (config.run.steps, config.trainer.optimizer.decay_steps) == (50, 30)


async def test_ctrl_c_drains_in_order_and_exits_with_0(up: Start, run: RunDir) -> None:
    process = await up("endless")
    await until(lambda: len(read_pids(run.path / "pids")) == 5)
    process.send_signal(signal.SIGINT)
    code, out, err = await said(process)
    assert (code, err) == (0, "")
    assert (run.path / "order").read_text().split() == ["trainer", "producer", "evaluator", "engine", "feeder"]
    assert "demo stopped" in out
    assert nothing_runs(run)


async def test_a_second_ctrl_c_stops_at_once_and_leaves_nothing(up: Start, run: RunDir) -> None:
    process = await up("stubborn", "supervise.drain_s=600")
    await until(lambda: len(read_pids(run.path / "pids")) == 5)
    process.send_signal(signal.SIGINT)
    await asyncio.sleep(0.3)
    assert process.returncode is None
    process.send_signal(signal.SIGINT)
    code, out, _ = await said(process)
    assert code == 130
    assert "stopped at once" in out
    assert nothing_runs(run)


async def test_nothing_outlives_a_supervisor_that_is_killed_and_the_run_can_be_resumed(up: Start, run: RunDir) -> None:
    process = await up("endless")
    await until(lambda: len(read_pids(run.path / "pids")) == 5)
    assert server_pid(run) is not None
    process.kill()
    await process.wait()
    await until(lambda: nothing_runs(run))
    code, out, err = await said(await up("learn"))
    assert (code, err) == (0, "")
    assert "] resuming" in out


async def test_a_run_that_is_up_is_not_started_twice(up: Start, run: RunDir) -> None:
    first = await up("endless")
    await until(lambda: len(read_pids(run.path / "pids")) == 5)
    code, _, err = await said(await up("endless"))
    assert code == 1
    assert f"run 'demo' is running already, supervised by process {first.pid}" in err
    assert "streamrl down demo" in err


async def test_a_dead_nats_server_comes_back_on_the_same_port(up: Start, run: RunDir) -> None:
    process = await up("endless")
    await until(lambda: len(read_pids(run.path / "pids")) == 5)
    first, address = server_pid(run), run.bus_path.read_bytes()
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: server_pid(run) not in (None, first))
    process.send_signal(signal.SIGTERM)
    code, out, _ = await said(process)
    assert code == 0
    assert "nats-server ended with signal SIGKILL; restarting it on the same store" in out
    assert run.bus_path.read_bytes() == address


async def test_a_killed_worker_is_restarted_and_that_is_said(up: Start, run: RunDir) -> None:
    process = await up("endless")
    await until(lambda: len(read_pids(run.path / "pids")) == 5)
    os.kill(read_pids(run.path / "pids")[0], signal.SIGKILL)
    await until(lambda: len(read_pids(run.path / "pids")) == 6)
    process.send_signal(signal.SIGTERM)
    code, out, _ = await said(process)
    assert code == 0
    assert "ended with signal SIGKILL; restart 1 in 0.05 s" in out


async def test_resuming_on_other_rows_is_refused(up: Start, run: RunDir, place: Path) -> None:
    assert (await said(await up("learn")))[0] == 0
    config = run.config_path.read_bytes()
    with (place / "train.jsonl").open("a") as file:
        file.write('{"prompt": "9+9=", "label": "18"}\n')
    code, _, err = await said(await up("learn"))
    assert code == 1
    assert "dataset changed on resume: run 'demo' was started on rows with digest" in err
    assert "hint: put the old rows back, or start a new run with --name" in err
    assert run.config_path.read_bytes() == config
    assert nothing_runs(run)


async def test_resuming_with_another_batch_is_refused_but_with_other_workers_is_not(up: Start, run: RunDir) -> None:
    assert (await said(await up("learn")))[0] == 0
    code, _, err = await said(await up("learn", "tasks.batch_tasks=7"))
    assert code == 1
    assert "tasks.batch_tasks changed on resume: run 'demo' was started with 64, got 7" in err
    assert (await said(await up("learn", "producer.workers=2", "engine.slots=4")))[0] == 0


async def test_a_port_that_is_taken_is_said(up: Start, run: RunDir) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = await said(await up("learn", f"bus.port={port}"))
    assert code == 1
    assert f"port {port}" in err
    assert "hint:" in err


async def test_a_broken_row_stops_the_run_before_it_starts(up: Start, run: RunDir, place: Path) -> None:
    with (place / "train.jsonl").open("a") as file:
        file.write('{"prompt": "9+9=", "lab')
    code, _, err = await said(await up("learn"))
    assert code == 1
    assert "line 5" in err
    assert not (run.path / "pids").exists()


async def test_a_reader_that_leaves_drains_the_run(up: Start, run: RunDir) -> None:
    reader, writer = os.pipe()
    process = await up("endless", stdout=writer)
    os.close(writer)
    await until(lambda: len(read_pids(run.path / "pids")) == 5)
    os.close(reader)
    await asyncio.wait_for(process.wait(), 60)
    assert (run.path / "order").read_text().split()[-1] == "feeder"
    assert nothing_runs(run)


async def test_a_typo_does_not_bind_the_name_of_a_run(up: Start, run: RunDir, place: Path) -> None:
    (place / "reward.py").write_text("def letters(task, episode):\n    return 1.0\n")
    code, _, err = await said(await up("learn", "reward.kind=reward.py:leters"))
    assert code == 1
    assert "did you mean 'letters'?" in err
    assert not run.path.exists()
    assert (await said(await up("learn", "reward.kind=reward.py:letters")))[0] == 0


async def test_a_start_that_failed_leaves_no_model_for_the_next(up: Start, run: RunDir) -> None:
    run.create()
    run.model_dir.mkdir()
    (run.model_dir / "of-other-settings").touch()
    assert (await said(await up("learn")))[0] == 0
    assert not (run.model_dir / "of-other-settings").exists()


async def test_rows_that_cannot_be_used_are_named_before_the_run_starts(up: Start, place: Path) -> None:
    with (place / "train.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "9" * 500, "label": "18"}) + "\n{\n")
    (place / "heldout.jsonl").write_text(json.dumps({"prompt": "1+1=", "label": "2"}) + "\n")
    code, out, err = await said(await up("learn", "--set", f"data.heldout={place / 'heldout.jsonl'}"))
    assert code == 0, out + err
    assert "data.train: 2 of the first 6 rows cannot be used, their tasks end when their turn comes" in out


async def test_rows_that_are_left_out_are_counted_on_the_screen(up: Start, place: Path) -> None:
    with (place / "train.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "9" * 500, "label": "18"}) + "\n")
    code, out, _ = await said(await up("learn", "--set", "data.reading=whole"))
    assert code == 0
    assert "data.train: 1 of 5 rows are left out: their prompts are longer than data.max_prompt_tokens = 128" in out


async def test_a_run_can_be_stopped_while_it_is_prepared(up: Start, start: Start, run: RunDir, place: Path) -> None:
    (place / "reward.py").write_text(
        "import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(3)\ndef one(task, episode):\n    return 1.0\n"
    )
    process = await up("learn", "reward.kind=reward.py:one")
    await until((place / "begun").exists)
    code, _, err = await said(await start("-m", "streamrl", "status", "demo"))
    assert (code, "has not come that far" in err) == (1, True)
    code, out, _ = await said(await start("-m", "streamrl", "down", "demo"))
    assert (code, out) == (0, "run demo has stopped\n")
    assert (await said(process))[0] == 0
    assert not run.path.exists()


@pytest.mark.parametrize(("times", "then"), [(2, "it is shown again"), (1000, "the run goes on unshown")])
async def test_a_screen_that_fails_is_said_and_shown_again_but_not_for_ever(up: Start, run: RunDir, times: int, then: str) -> None:
    process = await up("endless", f"--screen-fails={times}")
    await until(lambda: run.events_path.exists() and then in run.events_path.read_text())
    if times == 2:
        await until(lambda: run.events_path.read_text().count(then) == times)
        assert process.stdout is not None
        async with asyncio.timeout(60):
            while b"step=0" not in await process.stdout.readline():
                pass
    process.send_signal(signal.SIGINT)
    code, out, err = await said(process)
    assert (code, err) == (0, "")
    assert "demo stopped" in out
    assert nothing_runs(run)


async def test_a_launcher_that_fails_leaves_nothing(start: Start, run: RunDir, place: Path) -> None:
    """A secret lies in the folder by then."""
    (place / "hidden.py").write_text("import sys\nsys.modules['ray'] = None\nfrom streamrl.cli import main\nsys.exit(main(sys.argv[1:]))\n")
    (place / "reward.py").write_text("def one(task, episode, api_key):\n    return 1.0\n")
    words = ("ray.address=local", "reward.kind=reward.py:one", "reward.options.api_key=abc")
    sets = [word for value in words for word in ("--set", value)]
    code, _, err = await said(await start("hidden.py", "up", "demo.toml", *sets))
    assert code == 1
    assert "ray cannot be imported" in err
    assert not run.path.exists()


async def test_a_bus_that_is_given_up_is_not_waited_for(up: Start, run: RunDir) -> None:
    process = await up("stubborn", "supervise.max_restarts=0", "supervise.drain_s=600", "bus.patience_s=600")
    await until(lambda: len(read_pids(run.path / "pids")) == 5)
    server = server_pid(run)
    assert server is not None
    os.kill(server, signal.SIGKILL)
    code, out, err = await said(process)
    assert code == 1
    assert "the bus is gone; stopping at once" in out
    assert "nats-server ended 1 times within" in err
    assert nothing_runs(run)
