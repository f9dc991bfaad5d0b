"""What `trainer.backend = "megatron"` is asked that it cannot do: refused before anything starts."""

from __future__ import annotations

from streamrl.config.bounds import refuse
from streamrl.config.loss import OF_LOGITS
from streamrl.config.tree import Config


def check_megatron(config: Config) -> None:
    """Raise ConfigError for keys that do not go with the backend; what the model decides is refused when it is read."""
    trainer = config.trainer
    tensor, experts, stages, ranks = trainer.tensor, trainer.experts, trainer.pipeline, trainer.ranks
    cuts = (("tensor", tensor), ("experts", experts), ("pipeline", stages))
    if trainer.backend != "megatron":
        for name, parts in cuts:
            refuse(
                parts != 1,
                f"trainer.{name} is for trainer.backend = megatron, got {parts} with {trainer.backend}",
                hint="set trainer.backend = 'megatron', or cut the model with trainer.shards",
                key=f"trainer.{name}",
            )
        return
    for name, parts in cuts:
        refuse(
            ranks % parts != 0,
            f"trainer.{name} must divide trainer.ranks, got ranks = {ranks} and {name} = {parts}: {ranks} = {ranks // parts} x {parts} + "
            f"{ranks % parts}",
            hint=f"set trainer.ranks to a multiple of {parts}, such as {parts * max(1, round(ranks / parts))}",
            key=f"trainer.{name}",
        )
    refuse(
        tensor > 1 and experts > 1,
        f"trainer.tensor = {tensor} cuts no mixture of experts: trainer.experts = {experts} divides them, each stays whole",
        hint="leave one of them out",
        key="trainer.tensor",
    )
    refuse(
        experts > 1 and stages > 1,
        f"trainer.pipeline = {stages} cuts no mixture of experts: trainer.experts = {experts} divides them in every layer",
        hint="leave one of them out",
        key="trainer.pipeline",
    )
    parts = tensor * stages
    refuse(
        ranks % parts != 0,
        f"trainer.tensor x trainer.pipeline must divide trainer.ranks, got {tensor} x {stages} = {parts} and ranks = {ranks}: "
        f"{ranks} = {ranks // parts} x {parts} + {ranks % parts}",
        hint=f"set trainer.ranks to a multiple of {parts}, such as {parts * max(1, round(ranks / parts))}",
        key="trainer.pipeline",
    )
    context, replicas = trainer.context, ranks // parts
    refuse(
        replicas % context != 0,
        f"trainer.context must divide the replicas, got {context} and {ranks} / ({tensor} x {stages}) = {replicas}: "
        f"{replicas} = {replicas // context} x {context} + {replicas % context}",
        hint=f"set trainer.ranks to a multiple of {parts * context}",
        key="trainer.context",
    )
    split = tensor > 1
    asked = [
        ("trainer.shards", trainer.shards > 1, "it cuts matrices instead: trainer.tensor"),
        ("trainer.context", trainer.context > 1 and experts > 1, "ranks that divide experts share no rows"),
        ("trainer.compile", trainer.compile == "on" and split, "tensor ranks wait for each other within a layer"),
        ("trainer.attention", trainer.attention == "flash", "its attention is packed or sdpa"),
        (OF_LOGITS, bool(config.loss.of_logits), "it hands out no logits"),
    ]
    for key, found, why in asked:
        refuse(
            found,
            f"trainer.backend = megatron cannot do what {key} asks for: {why}",
            hint=f"leave {key} out, or set trainer.backend = 'torch'",
            key=key,
        )
