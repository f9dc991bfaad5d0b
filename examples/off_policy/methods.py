"""The corrections that are compared; all take two optimizer steps a batch, as many tokens and the same rate."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

QUICKSTART = Path(__file__).parents[1] / "quickstart" / "quickstart.toml"


class Method(NamedTuple):
    """A way to train on old tokens."""

    title: str
    settings: tuple[str, ...]
    color: str


METHODS = {
    "none": Method("no correction", ("loss.correction.kind=none",), "#6c757d"),
    "ppo": Method("PPO against the sampler", ("loss.proximal=sampler", "loss.correction.kind=none"), "#edae49"),
    "tis": Method("TIS, current ratio", ("loss.correction.kind=truncate", "loss.correction.ratio=current"), "#1f6f8b"),
    "decoupled": Method("decoupled PPO", ("loss.correction.kind=truncate",), "#d1495b"),
    "cispo": Method(
        "CISPO",
        ("loss.policy=cispo", "loss.proximal=sampler", "loss.correction.kind=none", "loss.clip_low=1.0", "loss.clip_high=4.0"),
        "#66a182",
    ),
    "m2po": Method("M2PO", ("loss.policy=m2po", "loss.m2po_bound=0.04", "loss.proximal=sampler", "loss.correction.kind=none"), "#8e6c8a"),
    "vcpo": Method(
        "VCPO",
        (
            *("trainer.optimizer.ess_scaling=sqrt", "loss.advantage=opob", "loss.clip_low=1.0", "loss.clip_high=1e9"),
            *("loss.correction.kind=truncate", "loss.correction.level=sequence", "loss.correction.high=8.0"),
        ),
        "#2f3e46",
    ),
}


def shared(method: str, bound: int, seed: int, batches: int) -> list[str]:
    """What differs from the quickstart's file wherever methods are compared."""
    return [
        f"run.seed={seed}",
        f"run.steps={batches}",
        "run.max_seconds=0",
        "run.until_reward=0",
        f"tasks.max_staleness={bound}",
        "trainer.device=cpu",
        "trainer.minibatches=2",
        f"trainer.checkpoint_every={10 * batches}",
        *METHODS[method].settings,
    ]
