"""Host names and addresses: which of them never leave this machine, which mean every address of it, and which others reach it at."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

WILDCARDS = ("", "0.0.0.0", "::")
"""What a server listens on that takes connections on every address of its machine."""


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine and nobody else can see what is sent there. Names other than localhost are not looked up."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bracketed(host: str) -> str:
    """A host as it stands in a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def servers(url: str) -> list[tuple[str, str]]:
    """(scheme, host) of each server that a NATS URL names; several are separated by commas."""
    parts = [urlsplit(part.strip()) for part in url.split(",") if part.strip()]
    return [(part.scheme, part.hostname or "") for part in parts]


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
