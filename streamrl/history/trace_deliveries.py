"""Who had a task in hand before it was handed to the producer that ended it: as the reports of producers tell."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from streamrl.bus.protocol import Log
from streamrl.bus.reading import stored_between
from streamrl.errors import LogTruncated, SchemaError
from streamrl.history.trace_life import Earlier, Life
from streamrl.schemas.codec import decode
from streamrl.schemas.events import MetricReport
from streamrl.schemas.subjects import METRICS

logger = logging.getLogger(__name__)

_CLOCKS_S = 60.0
"""How far clocks of producers may be from the server's."""


async def with_deliveries(life: Life, log: Log) -> Life:
    """The life with the earlier deliveries of its task, where there were any and their times are known.

    Args:
        life: of a task.
        log: of the run; a recording has no reports. One that cannot be read is passed over.
    """
    claim = life.claim
    if claim is None or claim.deliveries < 2 or claim.issued_s is None or claim.claimed_s is None:
        return life
    found: dict[str, Earlier] = {}
    try:
        async for message in stored_between(log, METRICS, claim.issued_s - _CLOCKS_S, claim.claimed_s + _CLOCKS_S):
            try:
                one = decode(message.body, MetricReport, where=f"{message.subject} sequence {message.sequence}")
            except SchemaError as error:
                logger.warning("event=report_ignored error=%s", error.message)
                continue
            if life.task not in (one.tasks or ()) or (one.worker == claim.producer and one.time_s >= claim.claimed_s):
                continue
            known = found.get(one.worker) or Earlier(producer=one.worker, first_s=one.time_s, last_s=one.time_s)
            found[one.worker] = replace(known, last_s=one.time_s)
    except LogTruncated:  # the oldest go while they are read
        pass
    return replace(life, claim=replace(claim, earlier=tuple(sorted(found.values(), key=lambda one: one.first_s))))
