"""The NATS client, without detours of a message on its way to whoever subscribed.

The client looks at each letter of a header's name, and puts a message into a queue from which a task of the subscription takes it: one
more turn of the event loop for each of the messages of which a run makes hundreds a second. Where another version of the client does not
call what is overridden here, it only costs more.
"""

from __future__ import annotations

from nats.aio.client import Client

_SPACE = " \t\r\n\v\f"


class DirectClient(Client):
    """Calls who subscribed with a callback as soon as a message is read, so callbacks must not wait."""

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        """Headers by name, as the client reads them: the last of a name counts, and lines that are none are passed over."""
        found: dict[str, str] = {}
        for line in raw.decode("utf-8", "replace").split("\r\n"):
            name, colon, value = line.partition(":")
            name = name.strip(_SPACE)
            if colon and name.isascii() and name.split() == [name]:
                found[name] = value.strip(_SPACE)
        return found

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        subscription = self._subs.get(sid)
        callback = None if subscription is None else subscription._cb  # pyright: ignore[reportPrivateUsage]  # it tells nobody
        if callback is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        message = self._build_message(sid, subject, reply, data, await self._process_headers(headers))
        try:
            await callback(message)
        except Exception as error:  # as the client does: what fails in a callback never ends the reading of the connection
            await self._error_cb(error)
