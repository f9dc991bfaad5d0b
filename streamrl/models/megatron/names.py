"""Which elements of a Hugging Face checkpoint each parameter of a Megatron-core `GPTModel` is, on any rank. Arithmetic on shapes alone.

```text
GPTModel (local spec)                 rows on a rank                        tensors of a checkpoint
embedding.word_embeddings.weight      vocabulary, padded                    model.embed_tokens.weight
...self_attention.linear_qkv.weight   of each group: queries, key, value    q_proj, k_proj, v_proj
...self_attention.linear_proj.weight  (columns are cut)                     o_proj
...mlp.linear_fc1.weight              gate, then up                         gate_proj, up_proj
...mlp.linear_fc2.weight              (columns are cut)                     down_proj
...mlp.experts.local_experts.J....    as linear_fc1, linear_fc2, uncut      experts.E.gate_proj, up_proj, down_proj
output_layer.weight                   vocabulary, padded                    lm_head.weight, or embed_tokens where they are tied
```
A tensor is one box on a rank (`Part`), and its rows recur in the parameter with one period, so a rank moves it by one strided view:
`parameter.unflatten(0, (-1, part.period))[:, part.first : part.first + part.run]` has the elements of the box, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from streamrl.errors import ConfigError
from streamrl.tensors.names import ARCHITECTURES

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""`model_type` of the configurations that are known here."""


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that decide names and shapes of a model's parameters; they are of the whole model."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """Also called groups: each has a key, a value and heads / kv_heads queries."""
    head_dim: int
    intermediate: int
    """Rows of the gate; of a mixture of experts, of one expert's."""
    vocabulary: int
    """Rows of the embedding in the checkpoint, without what Megatron pads."""
    tied: bool
    """True where the output layer is the embedding."""
    experts: int = 0
    """Number in each layer; 0: dense."""

    @property
    def qk_norm(self) -> bool:
        """True where queries and keys are normed head by head."""
        return self.model_type.startswith("qwen3")

    @property
    def qkv_bias(self) -> bool:
        """True where queries, keys and values have a bias."""
        return self.model_type == "qwen2"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank stands; ranks count as Megatron does: tensor fastest, then replica, then stage. The default holds the whole model."""

    tensor: int = 0
    tensors: int = 1
    """Tensor parallel: parts that each matrix is cut into, outside experts."""
    stage: int = 0
    stages: int = 1
    """Pipeline parallel: equally many layers each."""
    replica: int = 0
    """Data parallel."""
    expert_parts: int = 1
    """Expert parallel: parts that the experts of a layer are divided into, over tensors and replicas of a stage. Experts are not cut."""

    @property
    def expert_part(self) -> int:
        """Which part of the experts this rank holds."""
        return (self.replica * self.tensors + self.tensor) % self.expert_parts


class Part(NamedTuple):
    """A box of a checkpoint's tensor, and the rows of a rank's parameter that hold it."""

    name: str
    """Name of the tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """Index of the box's first element in each dimension."""
    held: tuple[int, ...]
    """Shape of the box; without rows where the rank's part of the vocabulary is padding alone."""
    first: int
    """First row of the parameter that is of the box ..."""
    run: int
    """... how many follow each other ..."""
    period: int
    """... and after how many the next run begins. The parameter's rows are whole periods."""
    owner: bool
    """True where this rank speaks for the box: of all ranks that hold an element exactly one does."""


class Parameter(NamedTuple):
    """A parameter of the `GPTModel` on a rank. Rows that no part covers are padding."""

    name: str
    """On this rank: layers and experts count from 0 on each."""
    shape: tuple[int, ...]
    """On this rank."""
    parts: tuple[Part, ...]
    layer: int | None = None
    """Which layer of the whole model; None: it is in none."""
    expert: int | None = None
    """Which expert of the whole layer; None: it is in none."""


def architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """Read it from a Hugging Face config.json.

    Args:
        config: the file's object.
        where: its path, for errors.

    Raises:
        ConfigError: an architecture that is not known here, a variant of one with other parameters, or a size that is missing.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise _refused(where, f"model_type one of {', '.join(MODEL_TYPES)}", f"{kind!r}")
    variants: list[tuple[str, object, bool]] = [
        ("hidden_act", "silu", config.get("hidden_act", "silu") == "silu"),
        ("attention_bias", False, kind == "qwen2" or not config.get("attention_bias")),
        ("mlp_bias", False, not config.get("mlp_bias")),
        ("mlp_only_layers", [], not config.get("mlp_only_layers")),
        ("decoder_sparse_step", 1, config.get("decoder_sparse_step", 1) == 1),
        ("quantization_config", None, config.get("quantization_config") is None),
    ]
    for key, expected, fits in variants:
        if not fits:
            raise _refused(where, f"{key} {expected!r}", f"{config[key]!r}")
    mixture = kind == "qwen3_moe"
    heads, hidden = _size(config, "num_attention_heads", where), _size(config, "hidden_size", where)
    return Architecture(
        model_type=kind,
        layers=_size(config, "num_hidden_layers", where),
        hidden=hidden,
        heads=heads,
        kv_heads=_size({"num_key_value_heads": heads, **config}, "num_key_value_heads", where),
        head_dim=_size({**config, "head_dim": config.get("head_dim") or hidden // heads}, "head_dim", where),
        intermediate=_size(config, "moe_intermediate_size" if mixture else "intermediate_size", where),
        vocabulary=_size(config, "vocab_size", where),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=_size({"num_experts": config.get("num_local_experts"), **config}, "num_experts", where) if mixture else 0,
    )


def check_mesh(arch: Architecture, place: Place) -> None:
    """Raise ConfigError unless the mesh of `place` divides what it cuts."""
    cuts = [
        ("num_attention_heads", arch.heads, "tensor parallel", place.tensors),
        ("num_key_value_heads", arch.kv_heads, "tensor parallel", place.tensors),
        ("num_hidden_layers", arch.layers, "pipeline parallel", place.stages),
    ]
    cuts += [("num_experts", arch.experts, "expert parallel", place.expert_parts)]
    if not arch.experts:
        cuts += [("intermediate_size", arch.intermediate, "tensor parallel", place.tensors)]
    for what, size, which, parts in cuts:
        if parts < 1 or size % parts:
            raise ConfigError(
                f"{which} {parts}: expected a divisor of {what} = {size}, got {size} / {parts} = {size / max(parts, 1):g}",
                hint="choose a mesh that divides the model",
                what=what,
                size=size,
                parts=parts,
            )


def parameters(arch: Architecture, place: Place, vocabulary: int = 0, *, headless: bool = False) -> Iterator[Parameter]:
    """The parameters of the `GPTModel` on the rank at `place`, in the order of the model.

    Args:
        arch: of the whole model.
        place: of the rank.
        vocabulary: rows of embedding and output layer over all tensor ranks, padding included; 0: the fewest that tensor ranks divide.
        headless: without an output layer.

    Raises:
        ConfigError: the mesh does not divide the model, or the padded vocabulary is too small or not divided.

    Example, two groups of two queries, a head_dim of one element: of each four rows 0 and 1 are queries, 2 is the key and 3 the value:

        >>> sizes = {"layers": 1, "hidden": 2, "heads": 4, "kv_heads": 2, "head_dim": 1, "intermediate": 1, "vocabulary": 3}
        >>> tiny = Architecture(model_type="llama", tied=True, **sizes)
        >>> qkv = next(one for one in parameters(tiny, Place()) if "qkv" in one.name)
        >>> [(part.name[-13:], part.first, part.run, part.period) for part in qkv.parts]
        [('q_proj.weight', 0, 2, 4), ('k_proj.weight', 2, 1, 4), ('v_proj.weight', 3, 1, 4)]
    """
    check_mesh(arch, place)
    padded = vocabulary or -(-arch.vocabulary // place.tensors) * place.tensors
    if padded < arch.vocabulary or padded % place.tensors:
        raise ConfigError(
            f"vocabulary padded to {padded}: expected {arch.vocabulary} at least and a multiple of the {place.tensors} tensor ranks",
            hint="pad it to a multiple of 128 times the tensor ranks",
            vocabulary=arch.vocabulary,
            padded=padded,
        )
    count = arch.layers // place.stages
    last = place.stage == place.stages - 1
    if place.stage == 0:
        yield _vocabulary(arch, place, padded, "embedding.word_embeddings.weight", "model.embed_tokens.weight", owned=True)
    for local in range(count):
        yield from _layer(arch, place, local, place.stage * count + local)
    if last:
        yield _whole(place, "decoder.final_layernorm.weight", "model.norm.weight", (arch.hidden,))
    if last and not headless and (not arch.tied or place.stages > 1):
        tensor = "model.embed_tokens.weight" if arch.tied else "lm_head.weight"
        yield _vocabulary(arch, place, padded, "output_layer.weight", tensor, owned=not arch.tied)


def tensors(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a whole checkpoint, in the order of the model."""
    return {part.name: part.shape for one in parameters(arch, Place()) for part in one.parts}


def _layer(arch: Architecture, place: Place, local: int, layer: int) -> Iterator[Parameter]:
    inside, outside = f"decoder.layers.{local}.", f"model.layers.{layer}."
    width, queries = arch.hidden, arch.heads // arch.kv_heads
    norms = [("input_layernorm", "input_layernorm", width), ("pre_mlp_layernorm", "post_attention_layernorm", width)]
    if arch.qk_norm:
        heads = [("self_attention.q_layernorm", "self_attn.q_norm"), ("self_attention.k_layernorm", "self_attn.k_norm")]
        norms[1:1] = [(mine, theirs, arch.head_dim) for mine, theirs in heads]
    for mine, theirs, size in norms:
        yield _whole(place, f"{inside}{mine}.weight", f"{outside}{theirs}.weight", (size,), layer)
    # Of each group: `queries` queries, a key, a value, head_dim rows each; a rank has whole groups.
    shares = (("q_proj", queries), ("k_proj", 1), ("v_proj", 1))
    for kind, rest in (("weight", (width,)), ("bias", ())):
        if kind == "weight" or arch.qkv_bias:
            fused = [(f"{outside}self_attn.{name}.{kind}", share * arch.head_dim) for name, share in shares]
            yield _fused(place, f"{inside}self_attention.linear_qkv.{kind}", fused, arch.kv_heads // place.tensors, rest, layer)
    yield _columns(
        place, f"{inside}self_attention.linear_proj.weight", f"{outside}self_attn.o_proj.weight", (width, arch.heads * arch.head_dim), layer
    )
    if arch.experts:
        yield _whole(place, f"{inside}mlp.router.weight", f"{outside}mlp.gate.weight", (arch.experts, width), layer)
        yield from _experts(arch, place, inside, outside, layer)
        return
    size = arch.intermediate // place.tensors
    gated = [(f"{outside}mlp.gate_proj.weight", size), (f"{outside}mlp.up_proj.weight", size)]
    yield _fused(place, f"{inside}mlp.linear_fc1.weight", gated, 1, (width,), layer)
    yield _columns(place, f"{inside}mlp.linear_fc2.weight", f"{outside}mlp.down_proj.weight", (width, arch.intermediate), layer)


def _experts(arch: Architecture, place: Place, inside: str, outside: str, layer: int) -> Iterator[Parameter]:
    table, count = ARCHITECTURES[arch.model_type], arch.experts // place.expert_parts
    # They are divided over tensor ranks and replicas alike, and the first ranks have one of each part.
    alone = Place(replica=(place.replica * place.tensors + place.tensor) // place.expert_parts)
    for local in range(count):
        expert = place.expert_part * count + local
        mine, theirs = f"{inside}mlp.experts.local_experts.{local}.", f"{outside}mlp.experts.{expert}."
        gated = [(f"{theirs}{name}.weight", arch.intermediate) for name in (table.gate, table.up)]
        first = _fused(alone, f"{mine}linear_fc1.weight", gated, 1, (arch.hidden,), layer)
        second = _columns(alone, f"{mine}linear_fc2.weight", f"{theirs}{table.down}.weight", (arch.hidden, arch.intermediate), layer)
        yield first._replace(expert=expert)
        yield second._replace(expert=expert)


def _whole(place: Place, name: str, tensor: str, shape: tuple[int, ...], layer: int | None = None) -> Parameter:
    """Make a parameter that every tensor rank holds whole."""
    zero, rows = tuple(0 for _ in shape), shape[0]
    return Parameter(name, shape, (Part(tensor, shape, zero, shape, 0, rows, rows, place.tensor == 0 and place.replica == 0),), layer)


def _columns(place: Place, name: str, tensor: str, shape: tuple[int, int], layer: int) -> Parameter:
    """Make a parameter that is cut in dimension 1."""
    rows, held = shape[0], (shape[0], shape[1] // place.tensors)
    return Parameter(name, held, (Part(tensor, shape, (0, place.tensor * held[1]), held, 0, rows, rows, place.replica == 0),), layer)


def _fused(place: Place, name: str, shares: list[tuple[str, int]], periods: int, rest: tuple[int, ...], layer: int) -> Parameter:
    """Make a parameter that has, `periods` times on this rank, some rows of each of several tensors, which are cut over the tensor ranks.

    Example, of tensor rank 1 of 2 with two groups (periods) of two query heads, head_dim 1: q_proj has 8 rows, of which it holds 4 .. 7.
    Its parameter has 8 rows, q4 q5 k2 v2 q6 q7 k3 v3: the box of q_proj is first 0, run 2, period 4; that of k_proj first 2, run 1.
    """
    period, first = sum(run for _, run in shares), 0
    parts: list[Part] = []
    for tensor, run in shares:
        rows = run * periods
        shape, offset = (rows * place.tensors, *rest), (rows * place.tensor, *(0 for _ in rest))
        parts.append(Part(tensor, shape, offset, (rows, *rest), first, run, period, place.replica == 0))
        first += run
    return Parameter(name, (period * periods, *rest), tuple(parts), layer)


def _vocabulary(arch: Architecture, place: Place, padded: int, name: str, tensor: str, *, owned: bool) -> Parameter:
    """Make a parameter with a row for each token; example: of 5 tokens padded to 8, rank 1 of 2 holds row 4 and three of padding."""
    rows = padded // place.tensors
    start = min(place.tensor * rows, arch.vocabulary)
    run = min((place.tensor + 1) * rows, arch.vocabulary) - start
    part = Part(tensor, (arch.vocabulary, arch.hidden), (start, 0), (run, arch.hidden), 0, run, rows, owned and place.replica == 0)
    return Parameter(name, (rows, arch.hidden), (part,))


def _size(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refused(where, f"{key} a whole number above 0", f"{value!r}")
    return value


def _refused(where: str, expected: str, got: str) -> ConfigError:
    hint = "models of " + ", ".join(MODEL_TYPES) + " are known to Megatron-core here; the backend `torch` trains what transformers can"
    return ConfigError(f"{where}: expected {expected}, got {got}", hint=hint, path=where)
