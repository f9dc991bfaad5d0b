"""What those who ask may cost a gateway: connections, requests and bytes of bodies in hand, and time to say what they want."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Hashable

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from streamrl.producers.gateway.errors import ApiError, later

IN_HAND_BYTES = 1 << 30
"""Bodies that are in hand at a time, counted as what becomes of them in memory."""
SHARE = 8
"""Of these one session has at most so small a part."""
VALUE_BYTES = 64
"""What each value of JSON costs beside its text."""
AGAIN_S = 2.0
SILENCE_S = 75.0
"""A connection is closed that brings no whole head of a request for so long."""
BODY_S = 60.0
"""Longest that a body may take to come, and an answer to be taken."""
LINGER_S = 2.0
"""For so long the rest of a body is taken, and thrown away, whose request is answered already."""
_OTHER_FILES = 512
"""Open files that are left for all but connections."""


class InHand:
    """Requests that are being read or answered, by session. Of one event loop.

    Args:
        max_body_bytes: of one request.
        max_requests: of one session, at a time.
    """

    def __init__(self, *, max_body_bytes: int, max_requests: int) -> None:
        self.max_requests = max_requests
        self.most_bytes = max(IN_HAND_BYTES, SHARE * max_body_bytes)
        self.num_bytes = 0
        """Of all."""
        self._of: dict[Hashable, list[Held]] = {}

    def take(self, who: Hashable) -> Held:
        """A request is in hand from now until it is let go; raises ApiError: too many of its session are.

        Of who has the gateway's own key, None, there may be any number: they start sessions, and wait for tasks.
        """
        of_session = self._of.setdefault(who, [])
        if who is not None and len(of_session) >= self.max_requests:
            raise later(
                f"expected at most {self.max_requests} requests of a session at a time (gateway.max_calls), got one more",
                AGAIN_S,
                status=429,
                code="busy",
            )
        held = Held(self, who)
        of_session.append(held)
        return held

    def add(self, held: Held, num_bytes: int) -> None:
        """See `Held.add`."""
        share = self.most_bytes // SHARE
        if held.num_bytes + num_bytes > share:
            raise ApiError(413, f"expected a body of at most {share} bytes in memory, got one of more values", code="body_too_large")
        if sum(other.num_bytes for other in self._of[held.who]) + num_bytes > share:
            raise later(f"expected at most {share} bytes of bodies of a session at a time, got more", AGAIN_S, status=429, code="busy")
        if self.num_bytes + num_bytes > self.most_bytes:
            raise later("the bodies of other calls fill the gateway's memory", AGAIN_S, code="busy")
        self.num_bytes += num_bytes
        held.num_bytes += num_bytes

    def let_go(self, held: Held) -> None:
        """See `Held.let_go`."""
        self.num_bytes -= held.num_bytes
        self._of[held.who].remove(held)
        if not self._of[held.who]:
            del self._of[held.who]


class Held:
    """One request in hand. Made by `InHand.take`."""

    def __init__(self, all_of: InHand, who: Hashable) -> None:
        self.who = who
        self.num_bytes = 0
        self._all = all_of

    def add(self, num_bytes: int) -> None:
        """So many bytes more of it are in memory; raises ApiError where there is no room for them."""
        self._all.add(self, num_bytes)

    def let_go(self) -> None:
        """It is answered."""
        self._all.let_go(self)


class Connections:
    """Makes the protocol of each connection that comes.

    Where there are as many as the limit of open files leaves, the one that has been silent longest is closed for it.

    Args:
        server: of the requests.
    """

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self.most = max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES)
        self._busy: set[RequestHandler] = set()

    def __call__(self) -> asyncio.Protocol:
        """For a new connection."""
        there = self._server.connections
        if len(there) >= self.most:
            silent = next((one for one in there if one not in self._busy), None)
            if silent is None:
                return _Refused()
            silent.force_close()
        return self._server()

    def begin(self, request: web.Request) -> None:
        """Its connection has brought a request."""
        self._busy.add(request.protocol)

    def end(self, request: web.Request) -> None:
        """It has taken the answer."""
        self._busy.discard(request.protocol)


class _Refused(asyncio.Protocol):
    """A connection that there is no room for."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
