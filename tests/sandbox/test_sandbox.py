from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator

import pytest

from streamrl.errors import LaunchError, SchemaError
from streamrl.sandbox import Limits, Result, Sandbox, run_python, shared
from streamrl.sandbox.messages import Chosen
from tests.support.errors import raises

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(slots=2)
    yield sandbox
    sandbox.close()


async def test_what_a_program_gets_and_gives(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_TEST_SECRET", "hunter2")
    code = """
import os, sys
from lib.doubled import doubled
print(doubled(int(input())), sorted(os.listdir(".")), os.getcwd() == os.environ["HOME"], file=sys.stderr)
print("hunter2" in str(os.environ), os.getcwd() == sys.argv[0])
open("result", "w").write("x")
"""
    files = {"lib/doubled.py": "def doubled(x): return 2 * x\n", "data.bin": b"\xff"}
    for _ in range(2):  # the second finds nothing of the first
        result = await sandbox.run_python(code, stdin="21\n", files=files)
        assert result.stderr == "42 ['data.bin', 'lib', 'main.py'] True\n", result
        assert (result.stdout, result.exit_code, result.reason, result.detail) == ("False False\n", 0, "ok", "")
        assert 0 < result.seconds < 60


async def test_programs_have_their_input_packages_and_arguments(sandbox: Sandbox) -> None:
    result = await sandbox.run_python("import sys; print(repr(sys.stdin.read()))")
    assert result.stdout == "''\n"
    result = await sandbox.run_python("import numpy; print(int(numpy.arange(10).sum()))")
    assert result.stdout == "45\n", result
    result = await sandbox.run_python("x = bytearray(10 << 30)")
    assert (result.reason, result.exit_code) == ("memory", 1)
    result = await sandbox.run(["/bin/sh", "-c", "cat; echo $0 $1 $NAME; exit 4", "a", "b c"], stdin=b"in\n", env={"NAME": "x"})
    assert (result.stdout, result.exit_code, result.reason) == ("in\na b c x\n", 4, "error")
    with pytest.raises(LaunchError, match="No such file"):
        await sandbox.run(["/bin/no-such-program"])


async def test_no_more_at_once_than_there_are_slots(sandbox: Sandbox) -> None:
    code = "import time; print(time.monotonic()); time.sleep(0.2); print(time.monotonic())"
    results = await asyncio.gather(*[sandbox.run_python(code) for _ in range(5)])
    spans = [tuple(map(float, result.stdout.split())) for result in results]
    for begin, _ in spans:
        assert sum(other <= begin < end for other, end in spans) <= 2
    waiting = [asyncio.ensure_future(sandbox.run_python("import time; time.sleep(60)")) for _ in range(4)]
    await asyncio.sleep(0.05)
    for task in waiting:
        task.cancel()
    assert all(isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*waiting, return_exceptions=True))
    assert (await sandbox.run_python("print(1)")).stdout == "1\n"


async def test_a_server_that_was_killed_is_started_again(sandbox: Sandbox) -> None:
    running = asyncio.ensure_future(sandbox.run_python("print(input(), flush=True); import time; time.sleep(0.5); print(2)", stdin="1"))
    while not sandbox._server or sandbox._threads._work_queue.qsize():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    process = sandbox._server._process
    process.kill()
    process.wait()
    assert (await sandbox.run_python("print(3)")).stdout == "3\n"
    try:
        assert (await running).stdout == "1\n2\n"  # it needs the server for its start only
    except LaunchError as error:
        assert "supervisor ended" in error.message  # not forked yet


async def test_in_several_loops_and_threads_of_a_process() -> None:
    results: list[Result] = []

    def in_thread() -> None:
        results.append(asyncio.run(run_python("print(1)")))

    await asyncio.gather(*[asyncio.to_thread(in_thread) for _ in range(3)])
    assert [result.stdout for result in results] == ["1\n"] * 3
    shared().close()


@pytest.mark.parametrize(
    "given", [{"seconds": 0}, {"seconds": float("inf")}, {"memory_bytes": -1}, {"files": 1.5}, {"processes": True}, {"output_bytes": "1"}]
)
def test_limits_that_are_none(given: dict[str, object]) -> None:
    [(name, value)] = given.items()
    with pytest.raises(SchemaError, match=rf"limit {name}, got {value!r}"):
        Limits(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        ({"../x": ""}, Limits()),
        ({"/x": ""}, Limits()),
        ({"a/": ""}, Limits()),
        ({"": ""}, Limits()),
        ({"a\0": ""}, Limits()),
        ({"main.py": ""}, Limits()),
        ({"a": "x" * 10}, Limits(disk_bytes=9)),
        ({"a": "", "b": ""}, Limits(files=2)),
    ],
)
async def test_files_that_cannot_be(sandbox: Sandbox, files: dict[str, str], limits: Limits) -> None:
    with raises(SchemaError):
        await sandbox.run_python("", files=files, limits=limits)


async def test_arguments_that_cannot_be(sandbox: Sandbox) -> None:
    for argv in ([], ["python3"], ["/bin/sh", "\0"]):
        with raises(SchemaError):
            await sandbox.run(argv)
    with raises(SchemaError):
        await sandbox.run(["/bin/sh"], readable=["here"])
    with raises(SchemaError):
        Sandbox(slots=0)


def test_what_is_missing_is_said_once_and_loudly(caplog: pytest.LogCaptureFixture) -> None:
    weak = Sandbox(isolation="limits")
    with caplog.at_level(logging.WARNING):
        chosen = weak.check()
        weak.check()
    weak.close()
    [record] = caplog.records
    assert "event=sandbox_weak isolation=limits" in record.message and "it can read files" in record.message
    assert isinstance(chosen, Chosen) and any("it can read files" in one for one in chosen.missing)


def test_elsewhere_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    sandbox = Sandbox()
    with pytest.raises(LaunchError, match=r"Linux .* got darwin"):
        sandbox.check()
    sandbox.close()


def test_what_was_forked_has_a_sandbox_of_its_own() -> None:
    mine = shared()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, b"same" if shared() is mine else b"own")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 10) == b"own"
    os.close(reader)
    os.close(writer)
