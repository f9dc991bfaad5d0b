"""What other systems have in place of Linux's own calls: with those taken away, everything still does what it promises."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from streamrl import system

ALONE = ("sched_getaffinity", "posix_fallocate", "memfd_create")
"""macOS has none of these."""


@pytest.fixture(params=["linux", "elsewhere"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "elsewhere":
        for name in ALONE:
            monkeypatch.delattr(os, name)
        monkeypatch.setattr(system.ctypes, "CDLL", lambda *given, **named: object())
    return request.param


def test_there_are_cores_and_a_full_device_is_an_error(calls: str) -> None:
    assert 1 <= system.cores() <= (os.cpu_count() or 1)
    with open("/dev/full", "wb") as full, pytest.raises(OSError):
        system.reserve(full.fileno(), 1 << 20)


@pytest.mark.parametrize("nbytes", [0, 1, 4096, (1 << 20) + 1, 5 << 20])
def test_a_file_gets_its_length(calls: str, tmp_path: Path, nbytes: int) -> None:
    with (tmp_path / "file").open("wb") as file:
        if nbytes == 0 and calls == "linux":
            with pytest.raises(OSError) as caught:
                system.reserve(file.fileno(), nbytes)
            assert caught.value.errno == errno.EINVAL
            return
        system.reserve(file.fileno(), nbytes)
    assert (tmp_path / "file").read_bytes() == bytes(nbytes)


def test_a_file_in_memory_is_opened_by_others_and_goes(calls: str) -> None:
    descriptor, path, free = system.memory_file("streamrl-test")
    os.pwrite(descriptor, b"bytes", 0)
    other = os.open(path, os.O_RDONLY)
    assert os.pread(other, 5, 0) == b"bytes"
    os.close(other)
    assert os.fstat(descriptor).st_mode & 0o077 == 0 or calls == "linux"
    free()
    assert not Path(path).exists()
    with pytest.raises(OSError):
        os.fstat(descriptor)


@pytest.mark.process
def test_a_child_starts(calls: str) -> None:
    tie = system.dies_with_parent(signal.SIGKILL)
    done = subprocess.run([sys.executable, "-c", "print('here')"], capture_output=True, text=True, preexec_fn=tie, check=True)
    assert done.stdout == "here\n"


async def test_weights_go_over_shared_memory(calls: str, tmp_path: Path) -> None:
    from streamrl.schemas.versions import Version
    from streamrl.weights.protocol import Shard
    from streamrl.weights.shm import ShmTransport

    data = np.arange(1000, dtype=np.float32).view(np.uint8)
    transport = ShmTransport(run="r", policy="policy", directory=tmp_path / "weights")
    shard = Shard(name="w", dtype="float32", global_shape=(1000,), data=data, shape=(1000,))
    manifest = await transport.publish(Version(0, 1), iter([shard]))
    assert await transport.holds(manifest)
