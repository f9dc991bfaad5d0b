"""Builds a run's initial model in a process of its own, so that the supervisor never loads torch.

Run as `python -m streamrl.launch.build_model RUN_DIRECTORY CONFIG_JSON`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from streamrl.config.load import dump, from_json
from streamrl.config.tree import Config
from streamrl.data.model import ensure_model
from streamrl.errors import LaunchError, StreamRLError
from streamrl.runtime.rundir import RunDir


async def build_model(config: Config, run: RunDir) -> Path:
    """The directory of the initial model, built if it is not there yet.

    Raises:
        ConfigError: `model.path` names no model.
        LaunchError: the model cannot be built.
    """
    if config.model.path or config.engine.traits.tabular or run.model_dir.is_dir():
        return ensure_model(config, run.model_dir)
    command = (sys.executable, "-m", "streamrl.launch.build_model", str(run.path), dump(config))
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE)
    try:
        _, said = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode != 0:
        raise LaunchError(
            f"the initial model could not be built:\n{said.decode(errors='replace').strip()}",
            hint="check the [model] section, and `streamrl doctor`",
        )
    return run.model_dir


def main() -> int:
    """Build it; errors of streamrl go to stderr without a traceback."""
    path, text = sys.argv[1:]
    try:
        ensure_model(from_json(text), RunDir(path).model_dir)
    except StreamRLError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
