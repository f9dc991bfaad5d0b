"""The launcher that a configuration asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator

from streamrl.config.tree import Config
from streamrl.errors import LaunchError
from streamrl.launch.local import LocalLauncher
from streamrl.launch.protocol import Launcher
from streamrl.runtime.rundir import RunDir


@contextlib.contextmanager
def opened_launcher(config: Config, run: RunDir, note: Callable[[str], None]) -> Generator[tuple[Launcher, Config]]:
    """Child processes, or with `ray.address` actors on a cluster; and the configuration that its workers are to have.

    Raises:
        LaunchError: Ray is not installed, there is no such cluster, or the run does not fit it.
    """
    if not config.ray.address:
        yield LocalLauncher(run, config), config
        return
    try:
        from streamrl.launch.ray import RayLauncher
    except ModuleNotFoundError as error:
        raise LaunchError(
            f"ray.address is {config.ray.address}, but {error.name} cannot be imported",
            hint="pip install 'streamrl[ray]' on every node, or leave ray.address empty",
        ) from error
    launcher = RayLauncher.open(config, run, note)
    try:
        yield launcher, launcher.config
    finally:
        launcher.close()
