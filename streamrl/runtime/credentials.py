"""Credentials of a run's bus: one user a role, each with a file of its own in the run directory.

Those of the embedded server stay the same when a run is resumed, so that workers on other hosts find their way back; delete `credentials/`
to have new ones.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Collection, Mapping
from pathlib import Path

from streamrl.bus.address import BusAddress
from streamrl.bus.certificates import Certificate, certificate_for
from streamrl.bus.permissions import OPERATOR, ROLES, User, role_users
from streamrl.bus.server import NatsServer
from streamrl.config.tree import BusConfig
from streamrl.errors import ConfigError
from streamrl.runtime.rundir import RunDir
from streamrl.system import WILDCARDS, is_loopback

_PASSWORD_BYTES = 24


def users_of(run: RunDir) -> list[User]:
    """The operator and one user a role, with the passwords that the run has already; raises ConfigError for a broken file."""
    files = {OPERATOR: run.bus_path, **{role: run.role_path(role) for role in ROLES}}
    return role_users(run.name, [(role, _password(path, role)) for role, path in files.items()])


def certificate_of(run: RunDir, config: BusConfig) -> Certificate | None:
    """The embedded server's certificate; None where it listens on loopback only or plain text is allowed. Raises LaunchError."""
    if is_loopback(config.host) or config.allow_plaintext:
        return None
    names = {"localhost", "127.0.0.1", "::1", socket.gethostname(), config.advertise, config.host}
    return certificate_for(run.tls, sorted(names - set(WILDCARDS)))


def write_credentials(run: RunDir, server: NatsServer, users: list[User]) -> None:
    """Write `bus.json` and a file for each role, all with mode 0600. The folder may have been deleted to have new ones."""
    run.credentials.mkdir(mode=0o700, exist_ok=True)
    for user in users:
        server.address_of(user).save(run.bus_path if user.role == OPERATOR else run.role_path(user.role))


def logins(config: BusConfig, *, optional: Collection[str] = ()) -> dict[str, BusAddress]:
    """The logins of an existing cluster by role; only the operator's where all workers share one.

    Raises:
        ConfigError: one cannot be read, of a role that is not `optional`.
    """
    found: dict[str, BusAddress] = {}
    for role in (OPERATOR, *ROLES) if config.by_role else (OPERATOR,):
        try:
            found[role] = BusAddress.from_config(config, role)
        except ConfigError:
            if role not in optional:
                raise
    return found


def write_cluster(run: RunDir, logins: Mapping[str, BusAddress]) -> None:
    """Write the logins of an existing cluster. One that all workers share is the operator's; its cluster decides what it may do."""
    for path in run.credentials.glob("*.json"):
        path.unlink()
    for role, address in logins.items():
        address.save(run.bus_path if role == OPERATOR else run.role_path(role))


def _password(path: Path, role: str) -> str:
    known = BusAddress.load(path) if path.exists() else None
    return known.password if known is not None and known.user == role else secrets.token_urlsafe(_PASSWORD_BYTES)
