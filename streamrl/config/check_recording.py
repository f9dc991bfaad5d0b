"""What engines cannot record of what tokens are drawn from, and what is recorded for nobody: refused before anything starts."""

from __future__ import annotations

from streamrl.config.data import data_sets
from streamrl.config.recording import MOST_MASKED
from streamrl.config.tree import Config, refuse
from streamrl.schemas.tasks import Sampling

KEY = "trainer.support_replay"


def cuts(sampling: Sampling) -> bool:
    """Whether tokens are drawn from a part of the vocabulary."""
    return sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0


def check_recording(config: Config) -> None:
    """Raise ConfigError for the first rule about `trainer.support_replay` that does not hold."""
    if not config.trainer.support_replay:
        return
    own = any(one.sampling_key for _, one in data_sets(config.data)) or config.producer.function != "single_turn" or config.gateway.workers
    refuse(
        not cuts(config.sampling) and not own,
        f"{KEY} is about what top_p, top_k and min_p leave, but sampling draws from the whole vocabulary",
        hint="leave it out, or set for example sampling.top_p = 0.95",
        key=KEY,
    )
    refuse(
        config.trainer.tensor > 1,
        f"{KEY} does not go with trainer.tensor = {config.trainer.tensor}: log-probs over a vocabulary in parts are of all of it",
        hint="leave one of them out",
        key=KEY,
    )
    refuse(
        bool(config.loss.slime_loss),
        f"{KEY} does not go with loss.slime_loss, whose function is given the logits of the whole vocabulary",
        hint="leave one of them out",
        key=KEY,
    )


def check_recorded(config: Config, sampling: Sampling, place: str) -> None:
    """Raise ConfigError where the engine cannot say what tokens are drawn from that are drawn so, and a trainer is to know.

    Args:
        config: the whole tree.
        sampling: of tasks that are trained on; it cuts something off.
        place: where it is from, such as `sampling`.
    """
    if not config.trainer.support_replay or not config.engine.traits.server:
        return
    refuse(
        not 0 < sampling.top_k <= MOST_MASKED,
        f"{KEY} needs {place}.top_k between 1 and {MOST_MASKED} with engine.kind = sglang, got {sampling.top_k}: SGLang says what it drew "
        "from only then",
        hint=f"set {place}.top_k = {MOST_MASKED}, which cuts next to nothing off by itself",
        key=f"{place}.top_k",
    )
    refuse(
        sampling.min_p > 0 and sampling.top_p < 1,
        f"{KEY} does not go with both {place}.min_p and {place}.top_p on SGLang: on a GPU it cuts by top_p what top_k has left, and "
        "says what it would have cut of the whole",
        hint="leave one of them out",
        key=f"{place}.min_p",
    )
    flags = {name.lstrip("-").replace("-", "_") for name, value in config.engine.sglang.flags.items() if value}
    refuse(
        "speculative_algorithm" in flags,
        f"{KEY} does not go with engine.sglang.flags.speculative_algorithm: SGLang does not say what it drew drafted tokens from",
        hint="leave one of them out",
        key=KEY,
    )
