"""Whether the trainer's backend can train the run's model here: what else would only be found when the trainer is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamrl.config.tree import Config
from streamrl.doctor.findings import Check
from streamrl.engines.unreached import read_description, router_bias, unreached
from streamrl.errors import ConfigError
from streamrl.models.megatron.names import Place, check_mesh
from streamrl.trainers.megatron.buildable import buildable, check_installed, read_architecture


def refuse_backend(config: Config) -> str:
    """What `trainer.backend = "megatron"` makes of the model, for people; empty with another backend.

    What other machines have installed, as with a cluster of Ray, is not looked at.

    Raises:
        ConfigError: megatron-core is missing or out of range, or cannot build the model, the critic's, or one that is looked at, on the
            mesh that is asked for.
    """
    trainer, model = config.trainer, config.model
    if trainer.backend != "megatron":
        return ""
    found = f"megatron-core {check_installed()}" if config.ray.address in ("", "local") else "megatron-core of Ray's nodes"
    tensors, experts, stages = trainer.tensor, trainer.experts, trainer.pipeline
    if model.path:
        _, arch = read_architecture(Path(model.path), tensors, experts, stages)
    else:
        arch = buildable(_built(config), "the model that [model] builds", tensors, experts, stages)
    loss = config.loss
    others = [("loss.critic.path", loss.critic.path), ("loss.kl.reference", loss.kl.reference)]
    for key, path in (*others, ("loss.distillation.teacher", loss.distillation.teacher)):
        try:
            if path:
                read_architecture(Path(path), tensors, experts, stages)
        except ConfigError as error:
            raise ConfigError(f"{key} = {path}: {error.message}", hint=error.hint, key=key, path=path) from error
    rows = -(-arch.vocabulary // tensors)
    if arch.experts:
        return (
            f"{found}: {arch.model_type} of {arch.layers} layers; a rank has {arch.experts} / {experts} = {arch.experts // experts} of a "
            f"layer's experts, and all else"
        )
    return (
        f"{found}: {arch.model_type} of {arch.layers} layers; a rank has {arch.layers} / {stages} = {arch.layers // stages} of them, "
        f"{arch.heads} / {tensors} = {arch.heads // tensors} heads, "
        f"{arch.kv_heads} / {tensors} = {arch.kv_heads // tensors} of keys and values, {arch.intermediate} / {tensors} = "
        f"{arch.intermediate // tensors} of a layer's width, {rows} rows of the vocabulary of {arch.vocabulary}"
    )


def check_backend(config: Config) -> Check | None:
    """The same as a finding; None with a backend of which nothing is to be said."""
    try:
        found = refuse_backend(config)
    except ConfigError as error:
        return Check("backend", "fail", error.message, error.hint)
    return Check("backend", "ok", found) if found else None


def check_served(config: Config) -> Check | None:
    """Tell whether engines can serve every version of the model as it is trained; None where that is not known, or they can."""
    described, swap = read_description(config.model.path), config.engine.sglang.swap
    kind = described.get("model_type")
    if not config.engine.traits.server:
        bias = router_bias(described)
        found = f"the local engine does not carry {bias} of {kind}: it refuses the model"
        return Check("model", "fail", found, "choose another model") if bias else None
    if not (tensor := unreached(described)):
        return None
    found = f"SGLang has {tensor} of {kind} outside of what a version carries"
    if swap == "pause":
        return Check("model", "warn", f"{found}, and loads it anew at each update; not tried", "choose another model")
    hint = 'choose another model; engine.sglang.swap = "pause" takes SGLang\'s own updates, which stop its requests: not tried'
    return Check("model", "fail", f"{found}: the run cannot go on with engine.sglang.swap = {swap}", hint)


def divides(config: Config) -> bool:
    """Whether heads, layers, widths and experts of the model are divided by the mesh of `trainer.backend = "megatron"`.

    True where that is not known, and with another backend.
    """
    trainer = config.trainer
    if trainer.backend != "megatron":
        return True
    try:
        _, arch = read_architecture(Path(config.model.path), 1)
    except ConfigError:
        return True
    try:
        check_mesh(arch, Place(tensors=trainer.tensor, expert_parts=trainer.experts, stages=trainer.pipeline))
    except ConfigError:
        return False
    return True


def _built(config: Config) -> dict[str, Any]:
    """What `streamrl.data.model.write_qwen3` will describe."""
    from streamrl.data.characters import VOCAB_SIZE

    model = config.model
    return {
        "model_type": "qwen3",
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.hidden // model.heads,
        "intermediate_size": model.intermediate,
        "vocab_size": model.vocab_size or VOCAB_SIZE,
        "tie_word_embeddings": True,
    }
