"""What the feeder has on record about the mixture of sources, before it issues tasks by it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from streamrl.bus.protocol import Bus
from streamrl.config.check_data import weight_at
from streamrl.config.tree import Config
from streamrl.data.mixed import MixedRows
from streamrl.data.mixture import extended
from streamrl.errors import ConfigError, Conflict
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import Grant, MixtureRecord, MixtureSegment
from streamrl.schemas.subjects import KEY_MIXTURE

logger = logging.getLogger(__name__)


def scheduled(config: Config, version: int) -> tuple[float, ...]:
    """Weights of `data.sources` at a version."""
    return tuple(weight_at(one, version) for one in config.data.sources)


def first_segments(config: Config) -> tuple[MixtureSegment, ...]:
    """The mixture of version 0: that of the warm-up, and of a run without one until a grant has other weights."""
    return extended((), scheduled(config, 0), seed=config.run.seed, version=0, granted=0)


Weights = Callable[[MixtureSegment | None, int], tuple[float, ...]]
"""Of the last segment on record and a grant's version: what is to be in force."""


async def settled(bus: Bus, rows: MixedRows, config: Config, grant: Grant, weights: Weights | None = None) -> MixedRows:
    """The rows with the mixture that tasks of this grant are drawn by, which is on record when this returns.

    Two feeders settle on one record: of two that write at once the second is refused, and reads again. It is read at every call, so that
    none goes on with an older one; a feeder that was stopped between this and its publication may at worst repeat a row or leave one out.

    `weights` are those of the schedule unless they are given.

    Raises:
        ConfigError: the record is of other sources.
    """
    while True:
        entry = await bus.kv.get(KEY_MIXTURE)
        value = None if entry is None else entry.value
        known = MixtureRecord(sources=rows.names, segments=()) if value is None else decode(value, MixtureRecord, where=KEY_MIXTURE)
        if known.sources != rows.names:
            raise ConfigError(
                f"expected the sources {', '.join(known.sources)} that the run was started with, got {', '.join(rows.names)}",
                hint="put data.sources back, or start a new run under another run.name",
                key="data.sources",
            )
        segments = known.segments
        if grant.warmup_end is not None:
            segments = extended(
                segments,
                weights(segments[-1] if segments else None, grant.version) if weights else scheduled(config, grant.version),
                seed=config.run.seed,
                version=grant.version,
                granted=max(0, grant.granted - grant.warmup_end),
            )
        if segments != known.segments:
            try:
                record = MixtureRecord(sources=rows.names, segments=segments)
                await bus.kv.put(KEY_MIXTURE, encode(record), expect=0 if entry is None else entry.revision)
            except Conflict:
                continue
            newest = segments[-1]
            logger.info("event=mixture version=%d from_task=%d weights=%s", newest.version, newest.first, newest.weights)
        return MixedRows(rows.names, rows.sets, segments)
