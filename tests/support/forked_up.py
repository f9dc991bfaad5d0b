"""`streamrl up` whose workers are forked: `python -m tests.support.forked_up TOML [--set SECTION.KEY=VALUE ...]`, itself such a fork.

A run of two ranks starts eight processes that import torch, a minute of a processor. All but its workers' command lines is as in a real
one; `process_id` finds them by what the supervisor says.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from streamrl.cli import main as streamrl
from streamrl.config.tree import Config
from streamrl.data.model import ensure_model
from streamrl.launch import local, prepare
from streamrl.runtime import beats
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.service import SUPERVISOR_VARIABLE
from tests.support.preloaded import PRELOADED, Forked, nested


async def forked_up(place: Path, *settings: str) -> tuple[int, str, str]:
    """Run the `run.toml` of a directory to its end: exit code, its summary as JSON, and what it says besides."""
    changed = (word for one in settings for word in ("--set", one))
    return await PRELOADED.run("-m", __name__, "run.toml", *changed, folder=place)


def process_id(run: RunDir, worker: str) -> int:
    """The process that the supervisor has started last for a worker, such as `trainer-1`."""
    return int(re.findall(rf"event=worker_(?:re)?started worker={worker} pid=(\d+)", run.events_path.read_text())[-1])


def main() -> int:
    """See the module."""
    workers, parent = nested()

    def start(command: Sequence[str], *, stdout: Any, env: Mapping[str, str], pass_fds: Sequence[int], **same: Any) -> Forked:
        assert same == {"stdin": subprocess.DEVNULL, "stderr": stdout, "start_new_session": True}
        environment = {**env, SUPERVISOR_VARIABLE: str(parent)}
        out = stdout.fileno()
        return workers.start(*command[1:], environment=environment, out=out, err=out, variable=beats.VARIABLE, more=pass_fds, session=True)

    async def build_model(config: Config, run: RunDir) -> Path:
        return ensure_model(config, run.model_dir)

    local.subprocess = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
    prepare.build_model = build_model
    try:
        return streamrl(["up", *sys.argv[1:], "--json"])
    finally:
        workers.close()
        os.waitpid(parent, 0)  # whose processor time is counted then


if __name__ == "__main__":
    sys.exit(main())
