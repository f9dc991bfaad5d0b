"""Shared memory of runs that no supervisor ends: freed after the test, as `streamrl up` frees it after a run."""

from streamrl.config.tree import Config
from streamrl.runtime.rundir import RunDir
from streamrl.weights.factory import free_weights

_runs: list[tuple[Config, RunDir]] = []


def freed_after_test(config: Config, run: RunDir) -> None:
    """Free the run's versions when the test that calls is over and all its fixtures are."""
    _runs.append((config, run))


def free() -> None:
    """Called by a fixture in tests/conftest.py."""
    while _runs:
        config, run = _runs.pop()
        free_weights(config.weights, config.run.name, run.path)
