"""The section `bus` and its rules."""

from __future__ import annotations

from streamrl.config.bounds import NonNegativeFloat, Port, PositiveFloat, PositiveInt, Replicas, Section, refuse
from streamrl.system import is_loopback, servers

_MIN_SAMPLES_BYTES = 32 << 20


class BusConfig(Section, frozen=True, kw_only=True):
    """NATS JetStream: an embedded server, or an existing cluster."""

    url: str = ""
    """`nats://` or `tls://` URL of an existing cluster; empty: a server is started on loopback with random credentials."""
    user: str = ""
    """User name at an existing cluster. `{role}` here or in a file's name stands for each role: a login for each (docs/security.md)."""
    password_file: str = ""
    """File that holds the password."""
    token_file: str = ""
    """File that holds a token, instead of user and password."""
    credentials_file: str = ""
    """NATS .creds file."""
    ca_file: str = ""
    """Certificate authority for TLS."""
    host: str = "127.0.0.1"
    """Address the embedded server listens on; 0.0.0.0: every one of its host. Off loopback it speaks TLS only."""
    advertise: str = ""
    """Host name or address that other hosts reach the embedded server at; empty: bus.host, or this host's name for 0.0.0.0."""
    port: Port = 0
    """Port of the embedded server; 0: any free one."""
    allow_plaintext: bool = False
    """Allow a bus off loopback without TLS: whoever sees the network then reads passwords and samples."""
    patience_s: NonNegativeFloat = 60.0
    """How long an operation is retried while the bus is away."""
    samples_bytes: PositiveInt = 2_000_000_000
    """Byte budget of the sample stream, at least 32 MiB: what is kept free while it is trimmed must hold the largest message."""
    blobs_bytes: PositiveInt = 4_000_000_000
    """Byte budget of the blobs: weights, drops, dead letters."""
    sample_blobs_bytes: PositiveInt = 4_000_000_000
    """Byte budget of the blobs that samples name: the experts of their tokens (trainer.routing_replay), what these were drawn
    from (trainer.support_replay), the images of their rows (data.images_key)."""
    turns_bytes: PositiveInt = 1_000_000_000
    """Byte budget of the turns of a gateway's open sessions; a call that finds no room waits for sessions to end, as a 503."""
    ack_wait_s: PositiveFloat = 30.0
    """A claimed task that is not kept alive for this long is delivered again; at least 1."""
    replicas: Replicas = 1
    """Servers of the cluster at `url` that keep each message. 3 go on when one is lost. Raised in streams that are there, never lowered."""
    sync_always: bool = False
    """Sync every message to disk (survives power loss; slower)."""

    @property
    def by_role(self) -> bool:
        """Whether the cluster at `url` has a login for each role."""
        return any("{role}" in text for text in (self.user, self.password_file, self.token_file, self.credentials_file))


def check_bus(bus: BusConfig) -> None:
    """Raise ConfigError for the first rule of `bus` that does not hold."""
    refuse(
        bus.samples_bytes < _MIN_SAMPLES_BYTES,
        f"bus.samples_bytes must be at least {_MIN_SAMPLES_BYTES} (32 MiB), got {bus.samples_bytes}: the largest message must find room",
        hint="change it in the TOML file or with --set bus.samples_bytes=...",
        key="bus.samples_bytes",
    )
    refuse(
        bus.ack_wait_s < 1,
        f"bus.ack_wait_s must be at least 1, got {bus.ack_wait_s}: a busy worker could not keep its tasks alive in time",
        hint="change it in the TOML file or with --set bus.ack_wait_s=...",
        key="bus.ack_wait_s",
    )
    credentials = [key for key in ("user", "token_file", "credentials_file") if getattr(bus, key)]
    refuse(
        not bus.url and bool(credentials or bus.password_file or bus.ca_file),
        "credentials and bus.ca_file are for the cluster that bus.url names, got no bus.url: the embedded server makes its own",
        hint="name the cluster in bus.url, or leave them out",
        key="bus.url",
    )
    refuse(
        bool(bus.url) and bus.port != 0,
        f"bus.port is the embedded server's, but bus.url names an existing one: got {bus.port}",
        hint="put the port into bus.url, or leave bus.url out",
        key="bus.port",
    )
    refuse(
        bool(bus.url) and bus.url.partition("://")[0] not in ("nats", "tls"),
        f"bus.url must begin with nats:// or tls://, got {bus.url!r}",
        hint="for example nats://nats.example.org:4222",
        key="bus.url",
    )
    refuse(
        not bus.url and bus.replicas > 1,
        f"bus.replicas must be 1 without bus.url, got {bus.replicas}: the embedded server is one, and keeps one copy",
        hint="name a cluster of at least that many servers in bus.url, or leave it out",
        key="bus.replicas",
    )
    refuse(
        "@" in bus.url,
        "bus.url must hold no user and password: the configuration is stored with the run, and others read it",
        hint="leave them out, and set bus.user and bus.password_file, or bus.token_file",
        key="bus.url",
    )
    refuse(
        len(credentials) > 1,
        f"expected one kind of credentials, got bus.{' and bus.'.join(credentials)}",
        hint="keep one of them",
        key="bus.url",
    )
    refuse(
        bool(bus.user) != bool(bus.password_file),
        "bus.user and bus.password_file go together, got one of them",
        hint="give both or neither",
        key="bus.user",
    )
    refuse(
        bool(bus.url) and (bus.host != BusConfig().host or bool(bus.advertise)),
        "bus.host and bus.advertise are the embedded server's, but bus.url names an existing one",
        hint="leave them out, or leave bus.url out",
        key="bus.host",
    )
    open_to = [host for scheme, host in servers(bus.url) if scheme == "nats" and not is_loopback(host)]
    refuse(
        bool(open_to) and not bus.ca_file and not bus.allow_plaintext,
        f"bus.url must begin with tls:// for a server on another machine, got plain text to {', '.join(open_to)}",
        hint="use tls:// (and bus.ca_file), or set bus.allow_plaintext = true on a network that nobody else sees",
        key="bus.url",
    )
