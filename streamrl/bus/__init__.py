"""The message bus of a run: durable streams, a task queue, keys and blobs.

`streamrl.bus.protocol` has the seam, `streamrl.bus.jetstream` the adapter for NATS, `streamrl.bus.memory` the one in process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.bus.address import BusAddress
from streamrl.bus.protocol import Blobs, Bus, KeyEntry, KeyValue, Lease, Message, Receipt, StreamState
from streamrl.config.tree import BusConfig

if TYPE_CHECKING:
    from streamrl.bus.jetstream.bus import JetStreamBus

__all__ = ["Blobs", "Bus", "BusAddress", "KeyEntry", "KeyValue", "Lease", "Message", "Receipt", "StreamState", "connect"]


async def connect(
    address: BusAddress,
    run: str,
    config: BusConfig | None = None,
    *,
    create: bool = True,
    name: str = "",
    patience_s: float | None = None,
    gather: bool = False,
) -> JetStreamBus:
    """Connect to a run's bus on NATS JetStream and make the streams that are missing.

    Args:
        address: where the server is, and the credentials (`BusAddress.load` or `BusAddress.from_config`).
        run: run id; streams, keys and blobs of other runs on the same server are not touched.
        config: byte budgets, ack wait and patience.
        create: make missing streams. Without it the credentials need no right to create any.
        name: shown in the server's monitoring, for example the worker's name.
        patience_s: how long the first connection is tried; the configuration's patience if None.
        gather: new messages come up to 0.25 s later, several at once, which costs a fraction of the processor time: for who only looks.
            Answers come as soon as without.

    Raises:
        BusUnavailable: no server answers within the patience, or it refuses the credentials or its certificate is not trusted.
        BusError: the server has no JetStream, or a stream of that name exists with other settings.
    """
    from streamrl.bus.jetstream.bus import JetStreamBus

    return await JetStreamBus.open(address, run, config or BusConfig(), create=create, name=name, patience_s=patience_s, gather=gather)
