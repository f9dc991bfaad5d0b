"""Host names and addresses: which of them never leave this machine, and which mean every address of it."""

from __future__ import annotations

import ipaddress
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
