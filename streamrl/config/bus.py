"""The section `bus`."""

from __future__ import annotations

from streamrl.config.bounds import NonNegativeFloat, Port, PositiveFloat, PositiveInt, Replicas, Section


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
