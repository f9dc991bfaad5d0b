"""The process of a run's page beside an `up`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from streamrl.config.tree import Config
from streamrl.launch.sidecars import Sidecar, Sidecars
from streamrl.page.address import address_of
from streamrl.runtime.rundir import RunDir

_DRAIN_S = 3.0


def page_beside(config: Config, run: RunDir, *, note: Callable[[str], None], tell: Callable[[str], None]) -> Sidecars:
    """The page of `run`; `tell` gets its address, which is secret, whenever it is a new one; `note` hears of trouble."""
    told, teller = "", 0

    def runs(pid: int) -> None:
        nonlocal told, teller
        if pid == teller or not (address := address_of(run, pid=pid)):
            return
        teller = pid
        if address != told:
            told = address
            tell(address)

    command = (sys.executable, "-m", "streamrl", "page", str(run.path), "--port", str(config.page.port))
    page = Sidecar(kind="page", called="the page", command=lambda again: command, runs=runs)
    return Sidecars([page], run, config, note=note, drain_s=_DRAIN_S)
