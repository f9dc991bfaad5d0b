"""The section `metrics`."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Literal

from msgspec import Meta

from streamrl.config.bounds import Section
from streamrl.errors import ConfigError

SinkKind = Literal["tensorboard", "wandb", "trackio", "prometheus"]
PACKAGES: dict[SinkKind, str] = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    "prometheus": "prometheus_client",
}
"""What each sink imports; the extra of its name installs it."""


class TensorboardConfig(Section, frozen=True, kw_only=True):
    """TensorBoard."""

    dir: str = ""
    """Log directory; a folder of the run's name is made in it. Empty: `tensorboard/` in the run directory."""


class WandbConfig(Section, frozen=True, kw_only=True):
    """Weights & Biases. The key comes from the environment of `up`, WANDB_API_KEY, and from nowhere else in streamrl."""

    project: str = "streamrl"
    """Project."""
    entity: str = ""
    """User or team; empty: the key's own."""
    mode: Literal["online", "offline"] = "online"
    """`offline`: kept in the run directory for `wandb sync`, as it is without a key, or where the service does not answer."""


class TrackioConfig(Section, frozen=True, kw_only=True):
    """trackio, locally."""

    project: str = "streamrl"
    """Project."""
    dir: str = ""
    """Where its store lies, TRACKIO_DIR for `trackio show`. Empty: `sinks/trackio/` in the run directory."""


class PrometheusConfig(Section, frozen=True, kw_only=True):
    """An endpoint that Prometheus scrapes. It has no password: who reaches it reads the metrics."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Meta(ge=1, le=65535)] = 9464
    """Port to listen on."""


class MetricsConfig(Section, frozen=True, kw_only=True):
    """What is kept of a run's metrics in its directory (docs/metrics.md)."""

    window_s: Annotated[float, Meta(ge=1)] = 10.0
    """Seconds in a row of what is no batch's."""
    file_bytes: Annotated[int, Meta(ge=1 << 16)] = 64 << 20
    """A file is put aside and a new one begun at this size."""
    sinks: tuple[SinkKind, ...] = ()
    """Where metrics go besides: processes beside the run, which it never waits for. Each takes the extra of its name:
    `pip install 'streamrl[wandb]'`."""
    tensorboard: TensorboardConfig = TensorboardConfig()
    wandb: WandbConfig = WandbConfig()
    trackio: TrackioConfig = TrackioConfig()
    prometheus: PrometheusConfig = PrometheusConfig()
    keep_bytes: Annotated[int, Meta(ge=0)] = 1 << 30
    """Of files put aside the oldest go once they are together above this; 0: there are none."""


def check_sinks(metrics: MetricsConfig) -> None:
    """Raise ConfigError for the first sink whose package is not installed."""
    for kind in metrics.sinks:
        if importlib.util.find_spec(PACKAGES[kind]) is None:
            raise ConfigError(
                f"expected the package {PACKAGES[kind]}, which metrics.sinks takes for {kind!r}, to be installed",
                hint=f"pip install 'streamrl[{kind}]', or leave {kind!r} out of metrics.sinks",
                key="metrics.sinks",
            )
