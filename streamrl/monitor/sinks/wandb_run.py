"""A run on Weights & Biases, or its offline directory."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb

from streamrl.config.load import dump
from streamrl.config.tree import Config
from streamrl.monitor.series import RUN, Row
from streamrl.monitor.sinks.position import Position
from streamrl.monitor.sinks.protocol import Once, version_number

logger = logging.getLogger(__name__)

_INIT_S = 30.0


class WandbRun:
    """Logs each row under the metrics' own names; those of a worker after `<worker>/`. Their axis is `version`.

    Without a key, with a wrong one, or where the service does not answer, the rows are kept offline, and the log says so. The position
    is stored before the rows are logged: a kill may cost the rows of a second, and none is there twice.

    Args:
        config: of the run; also shown there. It holds no secrets.
        folder: where the directory `wandb` goes.
        position: how far was written.
        path: of the position.
    """

    def __init__(self, config: Config, folder: Path, position: Position, path: Path) -> None:
        self._position = position
        self._path = path
        self._once = Once()
        if not position.id:
            position.id = secrets.token_hex(4)
            position.store(path)
        mode = config.metrics.wandb.mode
        if mode == "online" and not _has_key():
            logger.warning("event=wandb_offline reason=no key: WANDB_API_KEY is not set; `wandb sync` sends what is kept in %s", folder)
            mode = "offline"
        try:
            self._run = self._open(config, folder, mode)
        except wandb.Error as error:
            if mode == "offline":
                raise OSError(str(error)) from error
            reason = " ".join(str(error).split())
            logger.warning("event=wandb_offline reason=%s; `wandb sync` sends what is kept in %s", reason, folder)
            wandb.teardown()  # its service holds the run's id otherwise
            self._run = self._open(config, folder, "offline")
        self._run.define_metric("version", hidden=True)
        self._run.define_metric("*", step_metric="version")

    def write(self, rows: Sequence[Row]) -> None:
        """See `Sink`."""
        self._position.add(rows)
        self._position.store(self._path)
        for row in rows:
            prefix = "" if row.of == RUN else f"{row.of}/"
            values = {prefix + name: value for name, value in self._once.values(row).items()}
            if values:
                self._run.log({**values, "version": version_number(row), "time_s": row.time_s})

    def close(self) -> None:
        """See `Sink`."""
        self._run.finish()

    def _open(self, config: Config, folder: Path, mode: str) -> Any:
        return wandb.init(
            project=config.metrics.wandb.project,
            entity=config.metrics.wandb.entity or None,
            id=self._position.id,
            name=config.run.name,
            dir=folder,
            config={"streamrl": dump(config)},
            resume="allow" if mode == "online" else None,
            mode=mode,  # type: ignore[arg-type]
            settings=wandb.Settings(
                console="off", disable_git=True, disable_code=True, save_code=False, x_disable_stats=True, init_timeout=_INIT_S, silent=True
            ),
        )


def _has_key() -> bool:
    """Whether there is a key in the environment, or in the file that `wandb login` writes."""
    return bool(os.environ.get("WANDB_API_KEY") or wandb.api.api_key)
