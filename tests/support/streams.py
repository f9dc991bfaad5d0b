"""Read streams."""

from streamrl.bus.protocol import Log, Message
from streamrl.bus.reading import stretch


async def stored(log: Log, stream: str, subject: str | None = None) -> list[Message]:
    """Return all messages of a stream, or those of one subject."""
    state = await log.state(stream)
    return [message async for message in stretch(log, stream, first=state.first, last=state.last, subject=subject)]
