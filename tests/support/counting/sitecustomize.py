"""Count what tests start, in each of their Python processes: the wall clock lies on a shared machine, counts do not.

`scripts.run_tests` puts this folder on PYTHONPATH and names a file in STREAMRL_STARTS. Python imports a module of this name when it
starts. Each start is one line of the file, `WHAT TEST`, where TEST is what pytest calls the test that runs, or is inherited by its
processes. What a pytest process itself imports is not counted: which test meets it first is chance.
"""

import contextlib
import os
import sys

SERVERS = {"nats-server": "nats-server", "gcs_server": "ray head", "g++": "compiler"}
"""Programs by the last part of their path, with the kind that each counts as."""


def _kind(executable: object, arguments: object) -> str | None:
    """Return the kind that a started program counts as, or None."""
    words = [os.fsdecode(word) for word in arguments] if isinstance(arguments, list | tuple) else str(arguments).split()
    program = os.path.basename(os.fsdecode(executable) if isinstance(executable, str | bytes | os.PathLike) else words[0] if words else "")
    if program in SERVERS:
        return SERVERS[program]
    if "sglang.launch_server" in words:
        return "sglang server"
    if "up" in words[1:4] and ("streamrl" in words[:3] or words[0].endswith("/streamrl")):
        return "up"
    return "python" if program.startswith("python") else None


def _listen(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    inherited = "PYTEST_CURRENT_TEST" in os.environ

    def tell(kind: str) -> None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "-").rpartition(" (")[0] or "-"
        os.write(descriptor, f"{kind}\t{test}\n".encode())

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if event == "subprocess.Popen":
            if kind := _kind(arguments[0], arguments[1]):
                tell(kind)
        elif event == "import" and inherited and arguments[0] in ("torch", "torch._inductor.compile_fx"):
            tell("torch import" if arguments[0] == "torch" else "torch.compile")

    sys.addaudithook(hear)


if _path := os.environ.get("STREAMRL_STARTS"):
    with contextlib.suppress(OSError):  # another user's process, or one in a sandbox
        _listen(_path)
