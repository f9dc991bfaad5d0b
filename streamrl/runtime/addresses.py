"""Which address of this machine others can reach it at."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit


def address_towards(url: str) -> str:
    """This machine's address on the way to the first server of `url`; its name if there is no way, or no URL.

    Whoever reaches that server's network reaches this address too. Nothing is sent.
    """
    try:
        target = urlsplit(url.split(",")[0].strip())
        family, kind, _, _, place = socket.getaddrinfo(target.hostname or "", target.port or 4222, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return socket.gethostname()
