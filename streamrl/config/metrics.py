"""The sections `metrics`, `slo` and `page`: what is seen of a run, and what it is held to."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Literal

from msgspec import Meta

from streamrl.config.bounds import Fraction, NonNegativeFloat, Port, Section, refuse
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


class SloConfig(Section, frozen=True, kw_only=True):
    """What a run is held to (docs/slo.md). 0 turns a bound off; what is not known is not judged."""

    p95_age: NonNegativeFloat = 0.0
    """Versions: 95th percentile of the ages of the newest batch's trained tokens."""
    stream_lag_s: NonNegativeFloat = 600.0
    """Seconds: age of the oldest message that no batch has come to."""
    versions_behind: NonNegativeFloat = 0.0
    """Versions that the worst engine is behind the newest one."""
    starvation: Fraction = 0.0
    """Part of its time in which the trainer waits for samples. Where sampling is what takes long, much of it is no fault."""
    drop_rate: Fraction = 0.9
    """Rollouts dropped, of those that were trained or dropped within a window."""
    no_progress_s: NonNegativeFloat = 1800.0
    """Seconds since the newest batch."""
    logprob_float32: NonNegativeFloat = 1e-4
    """Nats: mean distance of an engine's log-probs from the trainer's under the same weights, in a run whose weights are float32."""
    logprob_bfloat16: NonNegativeFloat = 0.1
    """The same in bfloat16, whatever the engine's first batches were."""
    logprob_growth: NonNegativeFloat = 3.0
    """In bfloat16: that distance over the median of the engine's first 5 batches that have one."""
    warn: Fraction = 0.75
    """So much of a bound is a warning."""
    hold_s: NonNegativeFloat = 30.0
    """A level counts once it has held for so long, above its bound, or below nine tenths of it."""
    webhook: str = ""
    """URL that is sent every change as JSON; empty: none."""
    webhook_timeout_s: Annotated[float, Meta(gt=0, le=60)] = 5.0
    """Longest that it may take to answer."""


class PageConfig(Section, frozen=True, kw_only=True):
    """The page that `up` serves beside a run (docs/page.md)."""

    enabled: bool = True
    """Serve it; `streamrl page RUN` does so without."""
    port: Port = 0
    """Port on 127.0.0.1; 0: the one it had before, or any free one."""


def check_slo(slo: SloConfig) -> None:
    """Raise ConfigError for a webhook that is none, or that has a password in it."""
    scheme, _, rest = slo.webhook.partition("://")
    refuse(
        "@" in slo.webhook,
        "slo.webhook must hold no user and password: the configuration is stored with the run, and others read it",
        hint="use a URL that needs none",
        key="slo.webhook",
    )
    refuse(
        bool(slo.webhook) and (scheme not in ("http", "https") or not rest),
        f"slo.webhook must be an http or https URL, got {slo.webhook!r}",
        hint="for example https://hooks.example.org/streamrl",
        key="slo.webhook",
    )


def check_sinks(metrics: MetricsConfig) -> None:
    """Raise ConfigError for the first sink whose package is not installed."""
    for kind in metrics.sinks:
        if importlib.util.find_spec(PACKAGES[kind]) is None:
            raise ConfigError(
                f"expected the package {PACKAGES[kind]}, which metrics.sinks takes for {kind!r}, to be installed",
                hint=f"pip install 'streamrl[{kind}]', or leave {kind!r} out of metrics.sinks",
                key="metrics.sinks",
            )
