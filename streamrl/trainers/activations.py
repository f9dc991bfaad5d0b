"""How many layers keep their activations for the backward pass, reckoned from the memory that is there and the model's shape.

A layer that keeps none is run again in the backward pass, from its input, which all keep. Letters as in a model's config.json: `H` hidden
size, `Q` and `K` width of the queries and of the keys, `I` inner width of the feed-forward part, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

GIB = 1 << 30
SPARE = 0.95
"""Part of the free memory that is reckoned with; the rest is lost between the allocator's blocks."""
EAGER = 1.6
"""Times as much as compiled layers keep: norms and rotations in float32, each product of two activations by itself."""
HEAD_BYTES = 10
"""A logit of the head's chunk in its backward pass: in float32, its slope, and that in the states' type."""
CHUNK_TOKENS = 4096
KEPT_BYTES = 5 << 30
"""Both as `streamrl.algorithms.chunked_head` has them."""


class ModelShape(NamedTuple):
    """Sizes of a decoder."""

    layers: int
    hidden: int
    queries: int
    keys: int
    inner: int
    """Of a mixture of experts that of the experts which a token meets."""
    vocab: int
    tied: bool = False
    """Whether the embedding serves as head, too."""
    experts: int = 1
    """All, for each that a token meets: of the inner width there is as much in memory."""
    met: int = 0
    """Experts that a token meets, each of which is given a copy of its state; 0: no mixture."""

    @property
    def body(self) -> ModelShape:
        """Without a head, as a critic's model is."""
        return self._replace(tied=True)

    @property
    def parameters(self) -> int:
        """Numbers in the matrices."""
        layer = self.hidden * (2 * self.queries + 2 * self.keys + 3 * self.inner * self.experts)
        return self.layers * layer + (1 if self.tied else 2) * self.vocab * self.hidden

    def layer_bytes(self, itemsize: int, *, compiled: bool, context: int = 1) -> int:
        """Bytes a token that one layer keeps: ((4 + met) H + 3 Q + 4 K + 3 I) numbers, times `EAGER` where it is not compiled.

        Where `context` ranks share a row, 2 K numbers more for each of its tokens, which is `context` of them for one of a rank's own.
        """
        numbers = (4 + self.met) * self.hidden + 3 * self.queries + 4 * self.keys + 3 * self.inner
        gathered = 2 * self.keys * context if context > 1 else 0
        return int(itemsize * (numbers * (1.0 if compiled else EAGER) + gathered))


class Cut(NamedTuple):
    """How the matrices of a layer, and the layers, are spread over ranks that have the same rows."""

    tensors: int = 1
    stages: int = 1

    def least_kept(self, shapes: Sequence[ModelShape], *, tokens: int, **same: Any) -> Estimate:
        """`least_kept` of the rank that has room for the fewest.

        The first of several stages has as many rows on their way as there are stages, and the last one the head. A row's positions, and
        within attention and MLP its widths, are divided by the tensor ranks.
        """
        own = [one._replace(layers=one.layers // self.stages, vocab=-(-one.vocab // self.tensors)) for one in shapes]
        found = [least_kept(own, tokens=-(-tokens // self.tensors), **same)]
        if self.stages > 1:
            first = [one._replace(vocab=0) for one in own]
            found.append(least_kept(first, tokens=-(-tokens * self.stages // self.tensors), **same))
        return min(found, key=lambda one: (one.all_kept, one.kept))._replace(fits=all(one.fits for one in found))


class Estimate(NamedTuple):
    """What the memory is enough for."""

    kept: int
    """Layers that keep their activations."""
    text: str
    """The arithmetic, for people."""
    fits: bool
    """False: not even without any kept."""
    all_kept: bool
    """Whether there is no layer that does not."""


def model_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """From a config.json; None where it does not tell the sizes in the usual words."""
    text: Mapping[str, Any] = config.get("text_config") or config
    try:
        heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
        width = int(text.get("head_dim") or hidden // heads)
        inner, experts, met = int(text["intermediate_size"]), 1, 0
        if text.get("moe_intermediate_size") and text.get("num_experts_per_tok"):
            met = int(text["num_experts_per_tok"])
            inner, experts = int(text["moe_intermediate_size"]) * met, int(text.get("num_experts") or met) // met
        tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings")))
        keys = int(text.get("num_key_value_heads") or heads) * width
        return ModelShape(int(text["num_hidden_layers"]), hidden, heads * width, keys, inner, int(text["vocab_size"]), tied, experts, met)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def training_bytes(parameters: int, itemsize: int, shards: int = 1) -> int:
    """Parameters, summed gradient, moments and, below float32, masters: a gradient of less than float32 is added to the sum at once.

    Of a model cut into `shards` it is one part, all in float32.
    """
    if shards > 1:
        return 16 * -(-parameters // shards)
    return parameters * (12 + (4 + itemsize if itemsize < 4 else 4))


def held_bytes(parameters: int, itemsize: int, shards: int = 1) -> int:
    """Of `training_bytes` what is there before the first step: parameters and masters."""
    if shards > 1:
        return 4 * -(-parameters // shards)
    return parameters * (itemsize + (4 if itemsize < 4 else 0))


def gathered_bytes(shape: ModelShape, itemsize: int, *, once: bool) -> int:
    """What a rank holds of the whole of a model that is cut into parts, while it is run.

    Args:
        shape: of the model.
        itemsize: bytes of a number that is gathered.
        once: all stays for an optimizer step, with its gradient in float32. Else what is in no layer, and two layers, with the gradients.
    """
    if once:
        return shape.parameters * (itemsize + 4)
    return 2 * looked_at_bytes(shape, itemsize)


def looked_at_bytes(shape: ModelShape, itemsize: int) -> int:
    """What a rank holds of the whole of a model that is cut and never trained, while it is run: what is in no layer, and two layers."""
    ends = (1 if shape.tied else 2) * shape.vocab * shape.hidden
    return itemsize * (ends + 2 * (shape.parameters - ends) // max(1, shape.layers))


def least_kept(
    shapes: Sequence[ModelShape], *, free_bytes: int, needed_bytes: int, tokens: int, itemsize: int, compiled: bool, context: int = 1
) -> Estimate:
    """`kept_layers` of models that are trained one behind the other and keep as many layers: of the one that has room for the fewest.

    `shapes`: the policy's, then those of models without a head, as a critic's is.
    """
    headless = [shape._replace(vocab=0) for shape in shapes[1:]]
    found = [
        kept_layers(
            shape,
            free_bytes=free_bytes,
            needed_bytes=needed_bytes,
            tokens=tokens,
            itemsize=itemsize,
            compiled=compiled,
            context=context,
        )
        for shape in [*shapes[:1], *headless]
    ]
    least = min(found, key=lambda one: (one.all_kept, 0 if one.all_kept else one.kept))
    return least._replace(fits=all(one.fits for one in found))


def pass_bytes(shape: ModelShape, *, itemsize: int, compiled: bool, context: int = 1) -> int:
    """What a forward and backward pass takes at the very least, a token of a row that `context` ranks share.

    That is the layers' inputs, and what one layer computes.
    """
    return -(-(shape.layers * shape.hidden * itemsize + shape.layer_bytes(itemsize, compiled=compiled, context=context)) // context)


def kept_layers(
    shape: ModelShape, *, free_bytes: int, needed_bytes: int, tokens: int, itemsize: int, compiled: bool, context: int = 1
) -> Estimate:
    """As many layers as there is room for.

    Args:
        shape: of the model.
        free_bytes: of the device's memory.
        needed_bytes: of those, what gradients, moments and the like will take.
        tokens: of one forward and backward pass, of one rank.
        itemsize: bytes of a parameter.
        compiled: whether the layers are.
        context: ranks that share a row.
    """
    head = HEAD_BYTES * CHUNK_TOKENS * shape.vocab + 8 * shape.vocab * shape.hidden
    if compiled:  # it goes by the trained tokens, of which a row has fewer than positions
        head += min(tokens * shape.vocab * itemsize, KEPT_BYTES)
    layer = tokens * shape.layer_bytes(itemsize, compiled=compiled, context=context)
    # The inputs of all, and of the layer whose backward pass is under way what it keeps and as much again of gradients.
    inputs = tokens * shape.layers * shape.hidden * itemsize
    left = int(SPARE * free_bytes) - needed_bytes - head - inputs - 2 * layer
    kept = max(0, min(shape.layers, left // layer))
    text = (
        f"{kept} of {shape.layers} layers keep their activations: {SPARE:.0%} of {free_bytes / GIB:.1f} GiB free, less "
        f"{needed_bytes / GIB:.1f} of gradients, moments and copies, {head / GIB:.1f} of the head, {inputs / GIB:.1f} of the layers' "
        f"inputs and {2 * layer / GIB:.1f} of one layer's backward pass, leaves {left / GIB:.1f}; a layer takes {tokens} tokens x "
        f"{layer / tokens / 1024:.0f} KiB = {layer / GIB:.2f}"
    )
    return Estimate(kept, text, left >= 0, kept >= shape.layers)
