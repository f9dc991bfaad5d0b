"""What engines cannot record of what tokens are drawn from, and what is recorded for nobody: refused before anything starts."""

from __future__ import annotations

from streamrl.config.bounds import refuse
from streamrl.config.data import data_sets
from streamrl.config.loss import OF_LOGITS, LossConfig, likeliest_of
from streamrl.config.recording import MOST_MASKED
from streamrl.config.tree import Config
from streamrl.schemas.tasks import Sampling

KEY = "trainer.support_replay"


def check_recording(config: Config) -> None:
    """Raise ConfigError for the first rule about what is recorded that does not hold, whatever is sampled."""
    _check_support(config)
    loss, top = config.loss, likeliest_of(config.loss)
    refuse(
        not top and loss.dppo_top_k != LossConfig().dppo_top_k,
        f"loss.dppo_top_k = {loss.dppo_top_k} is read with loss.policy = dppo and loss.dppo_divergence = topk_tv or topk_kl alone",
        hint="leave it out, or set loss.dppo_divergence",
        key="loss.dppo_top_k",
    )
    if not top:
        return
    refuse(
        config.trainer.tensor > 1,
        f"loss.dppo_divergence = {loss.dppo_divergence} does not go with trainer.tensor = {config.trainer.tensor}: the sampler's likeliest "
        "tokens lie in several parts of the vocabulary",
        hint="set loss.dppo_divergence to 'tv' or 'kl', or trainer.tensor to 1",
        key="loss.dppo_divergence",
    )
    refuse(
        config.trainer.support_replay and config.engine.traits.server,
        f"loss.dppo_divergence = {loss.dppo_divergence} does not go with {KEY} on SGLang, which says what tokens were drawn from without "
        "the log-probs",
        hint="leave one of them out",
        key="loss.dppo_divergence",
    )
    refuse(
        config.engine.traits.server and _drafts(config),
        f"loss.dppo_divergence = {loss.dppo_divergence} does not go with engine.sglang.flags.speculative_algorithm: it has not been tried "
        "with drafted tokens",
        hint="leave one of them out",
        key="loss.dppo_divergence",
    )


def check_recorded(config: Config, sampling: Sampling, place: str) -> None:
    """Raise ConfigError where an engine cannot say what tokens are drawn from that are drawn so, and a trainer is to know.

    Args:
        config: the whole tree.
        sampling: of tasks that are trained on; it cuts something off.
        place: where it is from, such as `sampling`.
    """
    loss = config.loss
    refuse(
        likeliest_of(loss) > 0 and not config.trainer.support_replay,
        f"loss.dppo_divergence = {loss.dppo_divergence} compares whole distributions, of which {place} cuts a part off: what it leaves the "
        "policy of is not what it left the sampler of",
        hint=f"set {KEY} = true, or leave {place}.top_p, top_k and min_p out",
        key="loss.dppo_divergence",
    )
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
    refuse(
        _drafts(config),
        f"{KEY} does not go with engine.sglang.flags.speculative_algorithm: SGLang does not say what it drew drafted tokens from",
        hint="leave one of them out",
        key=KEY,
    )


def _drafts(config: Config) -> bool:
    flags = config.engine.sglang.flags.items()
    return any(value for name, value in flags if name.lstrip("-").replace("-", "_") == "speculative_algorithm")


def _check_support(config: Config) -> None:
    if not config.trainer.support_replay:
        return
    own = any(one.sampling_key for _, one in data_sets(config.data)) or config.producer.function != "single_turn" or config.gateway.workers
    refuse(
        not config.sampling.cuts and not own,
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
        bool(config.loss.of_logits),
        f"{KEY} does not go with {OF_LOGITS}, whose function is given the logits of the whole vocabulary",
        hint="leave one of them out",
        key=KEY,
    )
