"""Going on from a checkpoint: what its pending groups are made of, from the checkpoint itself and from the stream."""

from __future__ import annotations

from pathlib import Path

import msgspec

from streamrl.bus.protocol import Log, Message
from streamrl.consumers.training.carried import fetch_messages, held, oldest_read_again, read_carried
from streamrl.consumers.training.checkpoints import check_stream
from streamrl.consumers.training.reader import open_samples
from streamrl.core.state import FoldState
from streamrl.schemas.columns import SampleBatch


class Pending(msgspec.Struct, frozen=True):
    """What a stepper that goes on from a state needs."""

    identity: str
    """Of the sample stream."""
    carried: dict[int, Message]
    """Messages that came from the checkpoint; they may be gone from the stream."""
    samples: dict[int, SampleBatch]
    """Decoded messages of the pending groups, by sequence."""


async def read_pending(log: Log, state: FoldState, checkpoint: Path | None, *, identity: str = "") -> Pending:
    """Check that the stream goes back far enough for `state`, and gather the messages of its pending groups.

    Args:
        log: the stream.
        state: where a reader goes on from.
        checkpoint: the directory it was loaded from; None for a beginning.
        identity: of the stream that the state was made from; empty if it is not known.

    Raises:
        LogTruncated: it is another stream, or it does not hold what is needed any more.
    """
    carried = read_carried(checkpoint) if checkpoint is not None else {}
    found = await check_stream(log, cursor=state.cursor, oldest_needed=oldest_read_again(state, carried), identity=identity)
    messages = carried | await fetch_messages(log, held(state) - carried.keys())
    return Pending(found, carried, open_samples(messages[sequence] for sequence in sorted(held(state))))
