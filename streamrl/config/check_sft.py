"""What a run of kind `sft` may not say: it has no rollouts, and its batches no rewards."""

from __future__ import annotations

from streamrl.config.loss import LossConfig
from streamrl.config.tree import Config, refuse


def check_sft(config: Config) -> None:
    """Raise ConfigError for keys that are for reinforcement learning alone."""
    if config.run.kind != "sft":
        return
    data, loss = config.data, config.loss
    own = LossConfig(reduction=loss.reduction, constant_length=loss.constant_length, experts=loss.experts)
    refuse(
        not data.messages_key and not data.label_key,
        "run.kind = sft needs data.messages_key or data.label_key, got neither: there is nothing to train on",
        hint="name the field with the conversations in data.messages_key, or that with the answers in data.label_key",
        key="data.messages_key",
    )
    unused = (
        ("warmup.max_steps", config.warmup.max_steps > 0, "the whole run is what a warm-up is"),
        ("run.until_reward", bool(config.run.until_reward), "its batches have no rewards"),
        (
            "loss",
            loss != own,
            "its loss is the negative log-likelihood of the answers, of which loss.reduction and loss.experts can be chosen",
        ),
        ("gateway.workers", config.gateway.workers > 0, "there are no rollouts for agents"),
        ("tasks.expire_versions", config.tasks.expire_versions > 0, "demonstrations have no age"),
        ("producer.function", config.producer.function != "single_turn", "nobody makes rollouts"),
        ("trainer.routing_replay", config.trainer.routing_replay, "no engine has routed these tokens"),
    )
    for key, is_set, why in unused:
        refuse(is_set, f"{key} is not for run.kind = sft: {why}", hint="leave it out", key=key)
