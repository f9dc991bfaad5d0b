"""What a rank of a trainer holds on its GPU, reckoned from the configuration and the models' shapes before anything is loaded.

Pure arithmetic, by the rules of `streamrl.trainers.activations`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from streamrl.config.loss import estimator_of
from streamrl.config.registry import Role
from streamrl.config.tree import Config
from streamrl.tensors.mesh import gathers_once
from streamrl.trainers.activations import GIB, ModelShape, gathered_bytes, looked_at_bytes, pass_bytes, training_bytes
from streamrl.weights.protocol import COMPARED_BYTES

GROWING = 12
"""Bytes of a parameter's gradient and of its two moments, all in float32."""


class Models(NamedTuple):
    """The models of a trainer."""

    trained: Sequence[tuple[str, ModelShape]]
    """What for and its shape: the policy first, then the critic, without its head."""
    frozen: Sequence[tuple[str, ModelShape]]
    """Those that are only looked at, each directory once."""


class RankMemory(NamedTuple):
    """Bytes of one rank."""

    lasting: Sequence[tuple[str, int]]
    """What is there from the first step on, by what it is for."""
    token: int
    """What each token of the longest row takes at least."""
    growing: int
    """Gradients and moments among what lasts, which are there from the first step on, and not before."""
    making: int
    """Of the largest model, whole: a rank holds that for a moment, before it is cut."""

    @property
    def nbytes(self) -> int:
        """All that lasts."""
        return sum(nbytes for _, nbytes in self.lasting)

    @property
    def text(self) -> str:
        """What lasts, part by part, for people."""
        return " + ".join(f"{nbytes / GIB:.1f} {what}" for what, nbytes in self.lasting)


def itemsize_of(config: Config) -> int:
    """Bytes of a parameter as it is computed with and published."""
    return 2 if (config.trainer.dtype or config.model.dtype) == "bfloat16" else 4


def models_of(config: Config, shape_of: Callable[[str], ModelShape | None]) -> Models | None:
    """The models that a torch trainer loads.

    Args:
        config: the whole tree.
        shape_of: the shape of the model in a directory; None where it is not known.

    Returns:
        None where the policy's shape is not known. Another model of unknown shape counts as the policy's.
    """
    loss, policy = config.loss, config.model.path
    if config.trainer.tabular or (known := shape_of(policy)) is None:
        return None

    def shape(path: str) -> ModelShape:
        return (shape_of(path) if path else None) or known

    trained = [("policy", known)]
    if Role.VALUE in estimator_of(loss).needs:
        trained.append(("critic", shape(loss.critic.path).body))
    wanted: dict[tuple[Path, bool], tuple[str, str]] = {}
    if loss.kl.loss_coef > 0 or loss.kl.reward_coef > 0:  # one that is renewed shares its directory with nobody
        wanted[Path(loss.kl.reference or policy).resolve(), loss.kl.reference_every > 0] = ("reference", loss.kl.reference)
    if loss.distillation.coef > 0:
        wanted.setdefault((Path(loss.distillation.teacher).resolve(), False), ("teacher", loss.distillation.teacher))
    return Models(trained, [(what, shape(path)) for what, path in wanted.values()])


def rank_memory(config: Config, models: Models, *, gpu_bytes: int, compiled: bool) -> RankMemory:
    """What a rank holds, and what a token takes in the forward and backward pass of the model that takes most, with no layer kept.

    Args:
        config: the whole tree.
        models: the trainer's.
        gpu_bytes: memory of the GPU, by which `trainer.gather = "auto"` goes.
        compiled: whether the layers are.
    """
    trainer, itemsize, shards = config.trainer, itemsize_of(config), config.trainer.shards
    (_, policy), *_ = models.trained
    if trainer.backend == "megatron":
        return _megatron_memory(config, models, compiled=compiled)
    part = -(-policy.parameters // shards)
    lasting = [(f"to train the {what}", training_bytes(shape.parameters, itemsize, shards)) for what, shape in models.trained]
    lasting += [(f"for the {what}", itemsize * -(-shape.parameters // shards)) for what, shape in models.frozen]
    if shards > 1:
        gathered = sum(
            gathered_bytes(shape, itemsize, once=gathers_once(trainer.gather, shape.parameters * (itemsize + 4), gpu_bytes))
            for _, shape in models.trained
        )
        lasting.append(("gathered", gathered + max((looked_at_bytes(shape, itemsize) for _, shape in models.frozen), default=0)))
    lasting.append(("of versions to publish (weights.ring)", config.weights.buffers * itemsize * part))
    weights = config.weights
    if (weights.transport == "bus" or weights.also_on_bus) and weights.anchor_every > 1:
        lasting.append(("to compare versions (weights.anchor_every)", COMPARED_BYTES))
    if trainer.check_logprobs:
        versions = config.tasks.max_staleness + 1
        each = (versions + 1) * 4 if shards > 1 else versions * itemsize  # see `Recheck`
        lasting.append(("of versions for trainer.check_logprobs", each * part))
    if trainer.gradient_cosine:
        lasting.append(("of the last gradient (trainer.gradient_cosine)", 4 * part))
    token = max(pass_bytes(shape, itemsize=itemsize, compiled=compiled, context=trainer.context) for _, shape in models.trained)
    making = itemsize * max(shape.parameters for _, shape in [*models.trained, *models.frozen])
    growing = sum(GROWING * -(-shape.parameters // shards) for _, shape in models.trained)
    return RankMemory(lasting, token, growing, making)


def _megatron_memory(config: Config, models: Models, *, compiled: bool) -> RankMemory:
    """Of the rank that has most: float32 leaves, gradients and moments beside the parameters that it computes with.

    Of the layers that are run again in the backward pass, with `trainer.activations = "auto"` all, one is run at a time. The first of
    several stages has as many rows on their way as there are stages.

    Example, 8 layers in 2 stages on 2 tensor ranks each, a head of its own: the first rank has half of each of 4 layers and half of the
    embedding.
    """
    trainer, itemsize, cut, context = config.trainer, itemsize_of(config), config.trainer.tensor, config.trainer.context

    def largest_part(shape: ModelShape) -> int:
        layer = shape.hidden * (2 * shape.queries + 2 * shape.keys + 3 * shape.inner * shape.experts // trainer.experts)
        ends = 1 if shape.tied or trainer.pipeline > 1 else 2
        return -(-(shape.layers // trainer.pipeline * layer + ends * shape.vocab * shape.hidden) // cut)

    def token_bytes(shape: ModelShape) -> int:
        layers, asked = shape.layers // trainer.pipeline, trainer.activations
        kept = layers if asked == "all" else 0 if asked == "auto" else min(asked, layers)
        layer = shape.layer_bytes(itemsize, compiled=compiled, context=context)
        nbytes = trainer.pipeline * (kept * layer + (layers - kept) * shape.hidden * itemsize) + (layer if kept < layers else 0)
        return -(-nbytes // (cut * context))

    (_, policy), *_ = models.trained
    part = largest_part(policy)
    lasting = [(f"to train the {what}", (16 + itemsize) * largest_part(shape)) for what, shape in models.trained]
    renewed = 2 if config.loss.kl.reference_every else 1
    lasting += [
        (f"for the {what}", itemsize * largest_part(shape) * (renewed if what == "reference" else 1)) for what, shape in models.frozen
    ]
    if cut > 1:
        columns = policy.layers // trainer.pipeline * policy.hidden * (policy.queries + policy.inner)
        lasting.append(("of rows to publish of columns", itemsize * columns // cut))
    lasting.append(("of versions to publish (weights.ring)", config.weights.buffers * itemsize * part))
    if trainer.check_logprobs:
        lasting.append(("of versions for trainer.check_logprobs", 4 * (config.tasks.max_staleness + 1) * part))
    if trainer.gradient_cosine:
        lasting.append(("of the last gradient (trainer.gradient_cosine)", 4 * part))
    # Policy and critic go through a micro-batch one after the other.
    growing = sum(GROWING * largest_part(shape) for _, shape in models.trained)
    return RankMemory(lasting, max(token_bytes(shape) for _, shape in models.trained), growing, itemsize * part)
