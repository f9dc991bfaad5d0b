import asyncio
import os
import signal
import socket
from collections.abc import Generator
from pathlib import Path

import pytest

from streamrl.bus import BusAddress
from streamrl.bus.protocol import Bus
from streamrl.config.tree import BusConfig, Config, RunConfig
from streamrl.errors import BusError, BusUnavailable, ConfigError, Fenced
from streamrl.launch.down import stop_run
from streamrl.runtime.bus_server import end_former, run_bus_server
from streamrl.runtime.lock import lock_run
from streamrl.runtime.processes import started
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.service import SUPERVISOR_VARIABLE, Exit
from streamrl.runtime.worker import farewell, first_cause
from streamrl.schemas.codec import decode
from streamrl.schemas.control import WorkerPresence
from streamrl.schemas.events import Event, MetricReport
from streamrl.schemas.subjects import Subjects
from tests.support.programs import STREAMRL, Start, said
from tests.support.runs import bare_run, named_run

pytestmark = pytest.mark.nats


@pytest.fixture
def run(tmp_path: Path, nats_address: BusAddress, run_id: str) -> RunDir:
    directory = named_run(tmp_path / run_id, bus=BusConfig(patience_s=20.0))
    nats_address.save(directory.bus_path)
    return directory


@pytest.fixture
def behave(run: RunDir, nats_bus: Bus, start: Start) -> Start:
    """Starts `behaving_worker.py`; `nats_bus` makes the streams before and removes them after."""

    async def one(*behaviours: str, index: str = "0", supervised: bool = False) -> asyncio.subprocess.Process:
        supervisor = {SUPERVISOR_VARIABLE: str(os.getpid())} if supervised else {}
        return await start(str(Path(__file__).with_name("behaving_worker.py")), str(run.path), index, *behaviours, env=supervisor)

    return one


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), 30)).decode().strip()


async def test_errors_choose_the_exit_code_and_leave_no_traceback(behave: Start) -> None:
    _, out, err = await said(await behave("fail", "refuse", "group", "fence", "leave"))
    assert list(map(int, out.split())) == [Exit.FAILED, Exit.CONFIG, Exit.CONFIG, Exit.FENCED, Exit.CONFIG]
    *said_lines, left, _ = [line for line in err.splitlines() if line.startswith(("error: ", "hint: "))]
    assert "sys.exit(0)" in left and ".py:" in left
    assert said_lines == [
        "error: the stream is gone",
        "hint: make it again",
        *["error: tasks.batch_tasks must be even", "hint: take 64"] * 2,
        "error: another trainer has fence 7",
    ]
    assert "Traceback" not in err


async def test_an_unexpected_error_comes_with_its_traceback(behave: Start, run: RunDir) -> None:
    code, _, err = await said(await behave("crash"))
    assert code == Exit.FAILED
    assert "Traceback" in err
    assert "ZeroDivisionError" in run.log_path("producer-0").read_text()


async def test_the_first_signal_drains(behave: Start, nats_bus: Bus, run: RunDir) -> None:
    process = await behave("timed")
    assert await line(process) == "producer-0"
    entry = await nats_bus.kv.get("presence/workers/producer-0")
    assert entry is not None and entry.value is not None
    presence = decode(entry.value, WorkerPresence)
    assert (presence.kind, presence.state, presence.pid) == ("producer", "loading", process.pid)
    process.send_signal(signal.SIGTERM)
    code, out, _ = await said(process)
    assert (code, out) == (0, "drained\n")
    gone = await nats_bus.kv.get("presence/workers/producer-0")
    assert gone is None or gone.value is None
    report = await nats_bus.last(Subjects(run.name).metrics("producer-0"))
    assert report is not None and decode(report.body, MetricReport).left is True, "it says that it has left"


async def test_the_second_signal_ends_the_process_at_once(behave: Start) -> None:
    process = await behave("ignore")
    await line(process)
    process.send_signal(signal.SIGINT)
    assert await line(process) == "draining"
    process.send_signal(signal.SIGINT)
    assert (await said(process))[0] == -signal.SIGINT


@pytest.mark.parametrize("verb", ["attach letters.py:letters", "rewarder"])
async def test_a_guest_that_is_told_to_stop_while_it_reads_its_file_stops_cleanly(start: Start, tmp_path: Path, verb: str) -> None:
    attach = tmp_path / "demo.attach"
    os.mkfifo(attach)
    process = await start(*STREAMRL, *verb.split(), "--credentials", str(attach))
    with await asyncio.to_thread(attach.open, "wb"):  # which waits for a reader
        process.send_signal(signal.SIGTERM)
        assert await said(process) == (Exit.DONE, "", "")


@pytest.mark.parametrize(
    ("verb", "number", "code"),
    [
        ("worker feeder --run", signal.SIGTERM, Exit.DRAINED),
        ("gateway --run", signal.SIGINT, Exit.DONE),
        ("tap --name aside", signal.SIGTERM, Exit.DONE),
    ],
)
async def test_a_worker_that_is_told_to_stop_while_it_waits_for_its_bus_stops_cleanly(
    start: Start, tmp_path: Path, verb: str, number: signal.Signals, code: Exit
) -> None:
    run = named_run(tmp_path / "demo")
    supervisor = {SUPERVISOR_VARIABLE: str(os.getpid())} if code == Exit.DRAINED else {}
    with socket.create_server(("127.0.0.1", 0)) as silent, lock_run(run):
        silent.setblocking(False)
        BusAddress(url=f"nats://127.0.0.1:{silent.getsockname()[1]}").save(run.bus_path)
        process = await start(*STREAMRL, *verb.split(), str(run.path), env=supervisor)
        connection, _ = await asyncio.wait_for(asyncio.get_running_loop().sock_accept(silent), 120)
        with connection:
            process.send_signal(number)
            assert (await said(process))[0] == code


ENDING = """
import asyncio, signal
from streamrl.runtime.worker import drain_on_signals

async def main():
    drain_on_signals(asyncio.Event())

asyncio.run(main())
signal.raise_signal(signal.SIGTERM)
print("ends", flush=True)
signal.raise_signal(signal.SIGTERM)
"""


async def test_a_first_signal_in_the_last_moments_changes_nothing(start: Start) -> None:
    assert (await said(await start("-c", ENDING)))[:2] == (-signal.SIGTERM, "ends\n")


async def test_a_worker_by_hand_takes_a_name_that_nobody_has(behave: Start) -> None:
    supervised = await behave("wait", index="0", supervised=True)
    first, second = await behave("wait", index="-"), None
    assert (await line(supervised), await line(first)) == ("producer-0", "producer-1")
    second = await behave("wait", index="-")
    assert await line(second) == "producer-2"


async def test_a_supervised_worker_logs_to_stderr_alone(behave: Start, run: RunDir) -> None:
    code, _, err = await said(await behave("fail", supervised=True))
    assert code == Exit.FAILED
    assert "event=failed" in err
    assert not run.log_path("producer-0").exists()


async def test_a_supervised_worker_that_drains_says_so_by_its_exit_code(behave: Start) -> None:
    process = await behave("wait", supervised=True)
    await line(process)
    process.send_signal(signal.SIGTERM)
    assert (await said(process))[0] == Exit.DRAINED


async def test_metrics_and_events_are_published(behave: Start, nats_bus: Bus, run: RunDir) -> None:
    assert (await said(await behave("report")))[0] == 0
    subjects = Subjects(run.name)
    metrics, event = await nats_bus.last(subjects.metrics("producer-0")), await nats_bus.last(subjects.events("evaluation"))
    assert metrics is not None
    assert event is not None
    assert decode(metrics.body, MetricReport).mean == {"train/loss": 1.5}
    assert decode(event.body, Event).detail == {"accuracy": 0.5}


async def test_a_worker_without_run_or_supervisor_does_not_start(behave: Start, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.bus_path.unlink()
    code, _, err = await said(await behave("wait"))
    assert code == Exit.CONFIG
    assert "is the run up?" in err
    monkeypatch.setenv(SUPERVISOR_VARIABLE, "1")
    code, out, _ = await said(await behave("wait"))
    assert (code, out) == (Exit.FAILED, "")


def test_the_cause_of_a_group_is_what_decides_the_exit() -> None:
    plain, bus, config, fenced = ValueError("a"), BusError("b"), ConfigError("c"), Fenced("d")
    assert first_cause(plain) is plain
    assert first_cause(ExceptionGroup("", [plain, bus])) is bus
    assert first_cause(ExceptionGroup("", [bus, ExceptionGroup("", [plain, config])])) is config
    assert first_cause(ExceptionGroup("", [config, ExceptionGroup("", [fenced])])) is fenced
    assert first_cause(ExceptionGroup("", [plain])) is plain


async def test_last_words_are_given_up_when_the_bus_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.runtime.worker._FAREWELL_S", 0.05)
    async with farewell():
        await asyncio.Event().wait()
    async with farewell():
        raise BusUnavailable("expected a bus, there is none")
    with pytest.raises(ValueError, match="ours"):
        async with farewell():
            raise ValueError("ours")


SUPERVISOR = """
import asyncio, ctypes, sys
ctypes.CDLL = lambda *given, **named: object()
from pathlib import Path
from streamrl.config.tree import Config, RunConfig
from streamrl.runtime.bus_server import run_bus_server
from streamrl.runtime.rundir import RunDir


async def main():
    async with run_bus_server(Config(run=RunConfig(name="demo")), RunDir(sys.argv[1]), print):
        print("up", flush=True)
        await asyncio.sleep(600)


asyncio.run(main())
"""


@pytest.fixture
def former(tmp_path: Path) -> Generator[RunDir]:
    former = bare_run(tmp_path / "demo")
    yield former
    end_former(former)  # a test that has failed leaves none


def server_of(former: RunDir) -> tuple[int, str]:
    """Process id and start of the former's server, as they were written down."""
    pid, _, began = (former.bus_store / "nats-server.process").read_text().partition(" ")
    return int(pid), began


@pytest.mark.parametrize("by", ["up", "down"])
async def test_a_server_that_outlives_its_supervisor_is_ended_before_another_opens_its_store(start: Start, former: RunDir, by: str) -> None:
    supervisor = await start("-c", SUPERVISOR, str(former.path))
    assert supervisor.stdout is not None
    assert await asyncio.wait_for(supervisor.stdout.readline(), 60) == b"up\n"
    supervisor.kill()
    await supervisor.wait()
    pid, began = server_of(former)
    assert started(pid) == began, "it lives on"
    if by == "down":
        former.write_config(Config(run=RunConfig(name="demo")))
        assert not stop_run(former, now=False, timeout_s=60)
        assert started(pid) != began
        return
    async with run_bus_server(Config(run=RunConfig(name="demo")), former, print):
        assert started(pid) != began
        assert server_of(former)[0] != pid


@pytest.mark.parametrize("text", ["", "nonsense", "1 0", "0 0", "own 17", "99999999999999999999 1", "²3 1", "\x00"])
async def test_what_was_written_down_of_a_server_ends_nobody_else(former: RunDir, text: str) -> None:
    former.bus_store.mkdir(parents=True, exist_ok=True)
    (former.bus_store / "nats-server.process").write_text(text.replace("own", str(os.getpid())))
    async with run_bus_server(Config(run=RunConfig(name="demo")), former, print):
        pid, began = server_of(former)
        assert started(pid) == began
