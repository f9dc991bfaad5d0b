"""What a run of kind `sft` may not say: it has no rollouts, and its batches no rewards."""

from __future__ import annotations

from streamrl.config.bounds import refuse
from streamrl.config.check_data import pairs
from streamrl.config.data import data_sets
from streamrl.config.filters import FiltersConfig
from streamrl.config.loss import LossConfig
from streamrl.config.reward import LengthConfig
from streamrl.config.tree import Config


def check_sft(config: Config) -> None:
    """Raise ConfigError for keys that are for reinforcement learning alone."""
    if config.run.kind != "sft":
        return
    data, loss = config.data, config.loss
    own = LossConfig(
        reduction=loss.reduction, constant_length=loss.constant_length, legacy_samples=loss.legacy_samples, experts=loss.experts
    )
    # A recorded configuration may have another min_reward_std: a decision that is off.
    unfiltered = FiltersConfig(min_reward_std=config.filters.min_reward_std)
    for name, one in data_sets(data):
        refuse(
            not one.messages_key and not one.label_key,
            f"run.kind = sft needs data.messages_key or data.label_key, got neither{name and f' for {name}'}: there is nothing to train on",
            hint="name the field with the conversations in data.messages_key, or that with the answers in data.label_key",
            key="data.messages_key",
        )
    unused = (
        ("data.curriculum", bool(data.curriculum), "it weighs sources by their rewards"),
        (
            "data.sources",
            any(len(pairs(one)) > 1 for one in data.sources),
            "a source has one weight for the whole run: its `weight` is a number",
        ),
        ("reward.workers", config.reward.workers > 0, "there is nothing to score"),
        ("reward.overlong_buffer", config.reward.overlong_buffer > 0, "its batches have no rewards"),
        ("reward.length", config.reward.length != LengthConfig(), "its batches have no rewards"),
        ("filters", config.filters != unfiltered, "they are for rollouts, and never refuse demonstrations"),
        ("warmup.max_steps", config.warmup.max_steps > 0, "the whole run is what a warm-up is"),
        ("run.until_reward", bool(config.run.until_reward), "its batches have no rewards"),
        (
            "loss",
            loss != own,
            "its loss is the negative log-likelihood of the answers, of which loss.reduction and loss.experts can be chosen",
        ),
        ("gateway.workers", config.gateway.workers > 0, "there are no rollouts for agents"),
        ("trainer.optimizer.ess_scaling", config.trainer.optimizer.ess_scaling != "off", "no sampler has drawn its tokens"),
        ("tasks.expire_versions", config.tasks.expire_versions > 0, "demonstrations have no age"),
        ("producer.function", config.producer.function != "single_turn", "nobody makes rollouts"),
        ("trainer.routing_replay", config.trainer.routing_replay, "no engine has routed these tokens"),
        ("trainer.support_replay", config.trainer.support_replay, "no engine has drawn these tokens"),
    )
    for key, is_set, why in unused:
        refuse(is_set, f"{key} is not for run.kind = sft: {why}", hint="leave it out", key=key)
