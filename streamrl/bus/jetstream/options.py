"""Options of a NATS connection, from a BusAddress; and what the client's errors mean."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from streamrl.bus.address import BusAddress
from streamrl.errors import BusUnavailable, ConfigError

RECONNECT_WAIT_S = 0.1
PING_S = 10
# The client blocks a publisher for good when its own buffer overflows during a disconnect, so the outbox bounds what is under way
# (`outbox.WINDOW_BYTES`) and this buffer is never filled.
CLIENT_BUFFER_BYTES = 1 << 30


def options(address: BusAddress, name: str) -> dict[str, Any]:
    """Keyword arguments of `nats.aio.client.Client.connect`, without callbacks.

    Raises:
        ConfigError: a certificate or credentials file cannot be used.
    """
    chosen: dict[str, Any] = {
        "servers": [part.strip() for part in address.url.split(",") if part.strip()],
        "name": name or None,
        "inbox_prefix": address.inbox_prefix,
        "reconnect_time_wait": RECONNECT_WAIT_S,
        "max_reconnect_attempts": -1,
        "ping_interval": PING_S,
        "connect_timeout": 5,
        "pending_size": CLIENT_BUFFER_BYTES,
    }
    if address.user:
        chosen |= {"user": address.user, "password": address.password}
    if address.token:
        chosen["token"] = address.token
    if address.credentials_file:
        path = Path(address.credentials_file).expanduser()
        if not path.is_file():
            raise ConfigError(f"bus.credentials_file must name a NATS .creds file, got {str(path)!r}", key="bus.credentials_file")
        chosen["user_credentials"] = str(path)
    if address.ca_file or address.ca_pem or address.url.startswith("tls://"):
        chosen["tls"] = _tls(address.ca_file, address.ca_pem)
    return chosen


def _tls(ca_file: str, ca_pem: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file or None, cadata=ca_pem or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"bus.ca_file must name a certificate authority in PEM format, got {ca_file!r}: {error}", key="bus.ca_file"
        ) from error


def refusal(error: Exception, address: BusAddress) -> BusUnavailable | None:
    """The named error for what no retry mends (credentials, certificates); None for anything else."""
    text = str(error).lower()
    if "authentication timeout" in text:
        return None  # a busy machine: what was sent to log in came too late
    if "authorization" in text or "authentication" in text:
        who = f"user {address.user!r}" if address.user else "these credentials"
        return BusUnavailable(
            f"the server at {address.url} refused {who}",
            hint="check user, password, token or credentials file in [bus]; for a run of this machine, load its bus.json again",
            url=address.url,
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return BusUnavailable(
            f"the certificate of {address.url} is not trusted: {error.verify_message}",
            hint="set bus.ca_file to the certificate authority that signed it",
            url=address.url,
        )
    return None


def unreachable(address: BusAddress, waited_s: float, last: Exception | None) -> BusUnavailable:
    """The named error for a server that did not answer in time."""
    reason = f": {last}" if last is not None and str(last) else ""
    return BusUnavailable(
        f"no NATS server answered at {address.url} within {waited_s:.1f} s{reason}",
        hint="is it up, and is the address right? `streamrl status` shows runs that are up; the address of a cluster is bus.url",
        url=address.url,
    )
