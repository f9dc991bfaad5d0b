from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

LOOK = "from streamrl.monitor.terminal import in_front; print(in_front(0), flush=True)"
SESSION = f"""
import fcntl, subprocess, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
{LOOK}
subprocess.run([sys.executable, "-c", {LOOK!r}], process_group=0, check=True)
"""


@pytest.mark.process
def test_a_job_in_the_background_is_not_in_front_of_its_terminal() -> None:
    master, slave = pty.openpty()
    try:
        command = [sys.executable, "-c", SESSION]
        done = subprocess.run(command, stdin=slave, capture_output=True, text=True, start_new_session=True, check=False)
        assert (done.stdout.split(), done.returncode) == (["True", "False"], 0), done.stderr
    finally:
        os.close(master)
        os.close(slave)
