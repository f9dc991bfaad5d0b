"""Where a bus is and how to log in: what the supervisor writes for its workers as `bus.json`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from streamrl.config.tree import BusConfig
from streamrl.errors import ConfigError
from streamrl.system import write_private

OPERATOR = "operator"
API = "$JS.API"
"""What the subjects of JetStream's API begin with, where JetStream is the account's own."""
ROLE_API = "$STREAMRL.API"
"""`API` in the account of a role: its own `$JS.API` is the server's, which says there that the account has no JetStream."""


def inbox(role: str) -> str:
    """First token of a role's reply subjects: users cannot read each other's replies."""
    return f"_INBOX_{role}"


class BusAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Server and credentials. Holds secrets: it is saved with mode 0600 and its `repr` shows none of them."""

    url: str
    """`nats://host:port` or `tls://host:port`; several servers of one cluster are separated by commas."""
    user: str = ""
    password: str = ""
    token: str = ""
    credentials_file: str = ""
    """NATS .creds file (needs the package `nkeys`)."""
    ca_file: str = ""
    """Certificate authority that signed the server's certificate; empty: the system's."""
    ca_pem: str = ""
    """The same as PEM text, so that these credentials are one file that can be taken to another host."""
    inbox_prefix: str = "_INBOX"
    """First token of reply subjects; one prefix per user keeps users from reading each other's replies."""
    api: str = API
    """What the subjects of JetStream's API begin with in this login's account."""

    def __repr__(self) -> str:
        return f"BusAddress(url={self.url!r}, user={self.user!r})"

    @classmethod
    def from_config(cls, config: BusConfig, role: str = OPERATOR) -> BusAddress:
        """Address of an existing cluster (`bus.url`), with the secrets read from the files that the configuration names.

        Where it names a login for each role, the one of `role`, in whose account the API has the name that `bus.accounts` gives it.

        Raises:
            ConfigError: `bus.url` is empty, or a file cannot be read.
        """
        if not config.url:
            raise ConfigError("bus.url must be set to connect to an existing cluster, got an empty string", key="bus.url")
        limited = config.by_role and role != OPERATOR
        return cls(
            url=config.url,
            user=_of(role, config.user),
            password=_secret(_of(role, config.password_file), "bus.password_file"),
            token=_secret(_of(role, config.token_file), "bus.token_file"),
            credentials_file=_of(role, config.credentials_file),
            ca_file=config.ca_file,
            inbox_prefix=inbox(role) if limited else "_INBOX",
            api=ROLE_API if limited else API,
        )

    def save(self, path: Path) -> None:
        """Write as JSON with mode 0600, atomically."""
        write_private(path, msgspec.json.format(msgspec.json.encode(self)) + b"\n")

    @classmethod
    def load(cls, path: Path) -> BusAddress:
        """Read what `save` wrote; raises ConfigError when the file is missing or is something else."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ConfigError(
                f"expected the bus address of a run in {path}: {error.strerror}",
                hint="is the run up? `streamrl up` writes this file",
                path=str(path),
            ) from error
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ConfigError(
                f"expected a bus address in {path}: {error}",
                hint=f"delete it (rm {path}), and `streamrl up` writes a new one; where it was copied to, copy it again",
                path=str(path),
            ) from error


def _secret(path: str, key: str) -> str:
    """First line of a secrets file, without its newline; an empty path gives an empty string."""
    if not path:
        return ""
    try:
        found = Path(path).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key} must name a readable text file, got {path!r}: {error}", hint=f"check {key}", key=key) from error
    if not found:
        raise ConfigError(f"{key} must name a file with a secret in it, got the empty file {path!r}", hint=f"check {key}", key=key)
    return found


def _of(role: str, text: str) -> str:
    return text.replace("{role}", role)
