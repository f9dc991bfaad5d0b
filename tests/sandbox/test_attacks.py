"""Programs that mean ill, in each isolation: what they reach, and what is left of them. docs/sandbox.md has the table."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.sandbox.conftest import Attacker, marked, wait_for
from tests.support.processes import until

pytestmark = pytest.mark.process
SMALL: dict[str, Any] = {"seconds": 0.5}


def tried(*statements: str, imports: str = "") -> str:
    """A program that prints `done` or the error of each statement."""
    lines = [f"import os, sys\n{imports}"]
    for statement in statements:
        lines.append(f"try:\n    {statement}\n    print('done')\nexcept Exception as error:\n    print(type(error).__name__)")
    return "\n".join(lines)


FORKS = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
IGNORES = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 13, 15, 24)]; time.sleep(600)"
TOGETHER = "import os, time\nfor _ in range(3): os.fork()\nx = b'1' * (50 << 20); time.sleep(60)"
WITHOUT_END = "import sys\nwhile True: sys.{}.write('x' * (1 << 20))"
LARGE_FILE = "with open('x', 'wb') as file:\n    while True: file.write(b'x' * 100_000)"
ENDS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "loops": ("while True: pass", SMALL, "timeout", {"exit_code": -9}),
    "takes processor time in several processes": (
        "import os\nfor _ in range(3): os.fork()\nwhile True: pass",
        {"cpu_seconds": 0.5},
        "timeout .*processor",
        {},
    ),
    "closes its output": ("import os, time; os.close(1); os.close(2); time.sleep(600)", SMALL, "timeout", {}),
    "ignores signals": (IGNORES, SMALL, "timeout", {}),
    "stops itself": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", SMALL, "timeout", {}),
    # Refused by the kernel until the time is over, or found by looking: there are too many, or they hold too much together.
    "is a fork bomb": (FORKS, {"processes": 16, **SMALL}, "timeout|memory|.*more than 16 processes", {}),
    "ends its own group": ("import os, signal; os.killpg(0, signal.SIGTERM)", {}, "killed", {"exit_code": -15}),
    "gets no memory": ("x = bytearray(10 << 30)", {"memory_bytes": 256 << 20}, "error .*MemoryError", {}),
    "holds too much in several processes": (TOGETHER, {"memory_bytes": 200 << 20}, "memory .*together", {}),
    "writes without end": (WITHOUT_END.format("stdout"), {"output_bytes": 100_000}, "output", {"stdout": "x" * 100_000}),
    "warns without end": (WITHOUT_END.format("stderr"), {"output_bytes": 100_000}, "output", {"stderr": "x" * 100_000}),
    "writes no text": (r"import sys; sys.stdout.buffer.write(b'\xff\x00\xfe')", {}, "ok", {"stdout": "\ufffd\x00\ufffd"}),
    "writes a file without end": (LARGE_FILE, {"disk_bytes": 1 << 20}, "error .*OSError|.*bytes of files", {}),
    "makes files without end": (
        "n = 0\nwhile True:\n    open(f'{n}', 'w').close(); n += 1",
        {},
        "error .*No space left|.*more than 1000 files",
        {},
    ),
    "deletes its directory": (
        "import os, shutil; shutil.rmtree(os.getcwd(), ignore_errors=True); print('on')",
        {},
        "ok",
        {"stdout": "on\n"},
    ),
    "passes": ("pass", {}, "ok", {"exit_code": 0}),
    "leaves at once": ("import os; os._exit(7)", {}, "error", {"exit_code": 7}),
    "leaves": ("import sys; sys.exit(3)", {}, "error", {"exit_code": 3}),
    "leaves with a text": ("import sys; sys.exit('text')", {}, "error", {"exit_code": 1}),
    "raises": ("1 / 0", {}, "error", {"exit_code": 1}),
    "kills itself": ("import os; os.kill(os.getpid(), 11)", {}, "killed", {"exit_code": -11}),
    "aborts": ("import os; os.abort()", {}, "killed", {"exit_code": -6}),
    "reads address 0": ("import ctypes; ctypes.string_at(0)", {}, "killed", {"exit_code": -11}),
    "is no text": ("\udcff", {}, "error", {"exit_code": 1}),
}
"""Programs, their limits, a pattern of the reason with detail and errors, and other facts of the result."""


@pytest.mark.parametrize("case", ENDS)
async def test_how_a_program_ends_that(attacker: Attacker, case: str) -> None:
    code, limits, reason, facts = ENDS[case]
    result = await attacker.run(code, **limits)
    assert re.match(reason, f"{result.reason} {result.detail} {result.stderr}", re.DOTALL), result
    assert {name: getattr(result, name) for name in facts} == facts


async def test_a_daemon_that_has_left_its_parent_session_and_group(attacker: Attacker) -> None:
    code = """
        import os, time
        if os.fork():
            os._exit(0)
        os.setsid()
        if os.fork():
            os._exit(0)
        time.sleep(600)
        """
    assert (await attacker.run(textwrap.dedent(code))).reason == "ok"
    assert attacker.processes() == []


async def test_signals_to_everybody_else(attacker: Attacker) -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGURG, lambda number, frame: got.append(number))  # ignored by whoever does not ask for it
    try:
        # Signal 0 asks whether one may be sent.
        result = await attacker.run(
            tried(f"os.kill({os.getpid()}, 0)", "os.kill(os.getppid(), 9); os.kill(os.getppid(), 0)", "os.kill(-1, 23)")
        )
    finally:
        signal.signal(signal.SIGURG, before)
    mine, parent, _ = result.stdout.split()
    assert mine in ("PermissionError", "ProcessLookupError") and got == []
    # The first process of a namespace may be asked from within, and is not killed.
    assert parent == ("done" if attacker.isolation == "namespaces" else "PermissionError")
    assert result.reason == "ok"


async def test_directories_that_no_path_reaches_are_removed(attacker: Attacker) -> None:
    code = """
        import os
        print(os.getcwd(), flush=True)
        try:
            while True:
                os.mkdir("d" * 200); os.chdir("d" * 200); os.chmod(".", 0o500 | 0o200)
        except OSError:
            os.chmod(".", 0)
        """
    result = await attacker.run(textwrap.dedent(code))
    home = result.stdout.strip()
    assert home.startswith("/") and not (attacker.isolation == "landlock" and os.access(home, os.F_OK))


async def test_writing_elsewhere(attacker: Attacker, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "mine").chmod(0o666)
    places = [tmp_path / "new", tmp_path / "mine", "/usr/lib/new", "/etc/new", "/new", "/dev/shm/../new"]
    result = await attacker.run(tried(*[f"open({str(place)!r}, 'a')" for place in places]))
    assert len(result.stdout.split()) == len(places) and "done" not in result.stdout
    assert os.listdir(tmp_path) == ["mine"] and (tmp_path / "mine").read_text() == "mine"


async def test_links_to_elsewhere(attacker: Attacker, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    result = await attacker.run(
        tried(
            f"os.symlink({str(tmp_path)!r}, 'out')",
            "print(open('out/mine').read())",
            f"os.link({str(tmp_path / 'mine')!r}, 'hard')",
            "os.symlink('/', 'root')",
        )
    )
    assert result.stdout.split() == ["done", *result.stdout.split()[1:3], "done"] and "mine" not in result.stdout
    assert (tmp_path / "mine").read_text() == "mine"


async def test_secrets_of_the_run(attacker: Attacker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_TEST_SECRET", "hunter2")
    (tmp_path / "credentials").mkdir()
    for name, mode in (("producer.json", 0o600), ("open.json", 0o644)):
        (tmp_path / "credentials" / name).write_text("hunter2")
        (tmp_path / "credentials" / name).chmod(mode)
    me = os.getpid()
    statements = [
        "print(os.environ['STREAMRL_TEST_SECRET'])",
        *[f"print(open({str(tmp_path / 'credentials' / name)!r}).read())" for name in ("producer.json", "open.json")],
        f"print(os.listdir({str(tmp_path)!r}))",
        *[f"print(open('/proc/{me}/{name}', 'rb').read(100))" for name in ("environ", "mem", "cmdline")],
        *[f"print(open(f'/proc/{{os.getppid()}}/{name}', 'rb').read(100))" for name in ("environ", "mem")],
        "print(open('/etc/shadow').read())",
        "print(os.listdir('/root/.ssh'))",
    ]
    result = await attacker.run(tried(*statements))
    said = result.stdout.split()
    assert len(said) == len(statements) and set(said) <= {"KeyError", "PermissionError", "FileNotFoundError", "OSError"}, result


# Network and kernel


@pytest.fixture(params=["tcp", "unix", "abstract"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, list[object]]]:
    """Code that connects to a server of this host, and the connections that it has got."""
    if request.param == "tcp":
        listening = socket.create_server(("127.0.0.1", 0))
        code = f"socket.create_connection(('127.0.0.1', {listening.getsockname()[1]}), timeout=5)"
    else:
        tmp_path.chmod(0o755)
        name = str(tmp_path / "socket") if request.param == "unix" else f"\0streamrl-test-{os.getpid()}"
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(name)
        listening.listen()
        code = f"socket.socket(socket.AF_UNIX).connect({name!r})"
    got: list[object] = []

    def accept() -> None:
        try:
            while True:
                got.append(listening.accept()[0])
        except OSError:
            return

    thread = threading.Thread(target=accept)
    thread.start()
    yield code, got
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join()


async def test_servers_of_this_host(attacker: Attacker, server: tuple[str, list[object]]) -> None:
    code, got = server
    result = await attacker.run(tried(code, imports="import socket"))
    assert "done" not in result.stdout and len(result.stdout.split()) == 1 and got == []


async def test_the_outside(attacker: Attacker) -> None:
    statements = ["socket.create_connection(('192.0.2.1', 80), timeout=2)", "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)"]
    statements += ["socket.socket(40, socket.SOCK_STREAM)", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", "socket.socketpair()"]
    result = await attacker.run(tried(*statements, imports="import socket"))
    assert result.stdout.split() == ["PermissionError"] * 4 + ["done"]


async def test_calls_that_lead_out(attacker: Attacker) -> None:
    code = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        buffer = ctypes.create_string_buffer(16)
        print(libc.unshare(0x10000000), libc.ptrace(16, os.getppid(), 0, 0))
        print(libc.mount(b"none", b"/", b"tmpfs", 0, None), libc.chroot(b"."))
        print(libc.memfd_create(b"x", 0), libc.shmget(0, 1 << 30, 0o1600), libc.setns(0, 0), libc.umount2(b"/proc", 2))
        print(libc.process_vm_readv(os.getppid(), None, 0, None, 0, 0), libc.setuid(0), libc.setgid(0), libc.mknod(b"m", 0o60600, 0x800))
        """
    result = await attacker.run(textwrap.dedent(code))
    words = result.stdout.split()
    if attacker.isolation == "landlock" and "-1" not in words[9:11]:
        words[9:11] = ["-1", "-1"]  # user 0 without its rights becomes itself
    assert words == ["-1"] * 12, result


async def test_a_caller_that_is_cancelled_leaves_nothing(attacker: Attacker) -> None:
    task = asyncio.ensure_future(attacker.run("import os, time; os.fork(); time.sleep(600)", seconds=600.0))
    await until(lambda: len(attacker.processes()) >= 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert attacker.processes() == []


def test_a_caller_that_is_killed_leaves_nothing(attacker: Attacker) -> None:
    code = f"""
        import asyncio, sys
        from streamrl.sandbox import Limits, Sandbox
        from streamrl.sandbox.python import interpreter, packages_and_library
        argv = (interpreter(), "-c", "import os, time; os.fork(); os.fork() or os.setsid(); time.sleep(600)", {attacker.mark!r})
        sandbox = Sandbox(isolation={attacker.isolation!r})
        asyncio.run(sandbox.run(argv, limits=Limits(seconds=600), readable=packages_and_library()))
        """
    caller = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    try:
        wait_for(lambda: len(attacker.processes()) >= 4)
    finally:
        caller.kill()
        caller.wait()
    wait_for(lambda: not marked(attacker.mark))


async def test_its_watcher_killed_from_outside(attacker: Attacker) -> None:
    """As the kernel does that is out of memory."""
    task = asyncio.ensure_future(attacker.run("import os, time; os.fork(); time.sleep(600)", seconds=600.0))
    await until(lambda: len(attacker.processes()) >= 2)
    os.kill(psutil.Process(min(attacker.processes())).ppid(), 9)
    result = await task
    assert result.reason == "killed" and attacker.processes() == []
