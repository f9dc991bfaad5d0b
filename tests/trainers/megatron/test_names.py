"""Every element of a checkpoint has one owner among the ranks, and what ranks hold makes the checkpoint again."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import ConfigError
from streamrl.models.megatron.names import MODEL_TYPES, Architecture, Parameter, Place, architecture, parameters, tensors


@st.composite
def architectures(draw: st.DrawFn) -> tuple[Architecture, int, int]:
    """A small one, and tensor and pipeline ranks that divide it."""
    ranks, stages = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3]))
    groups = ranks * draw(st.integers(1, 2))
    kind = draw(st.sampled_from(MODEL_TYPES))
    arch = Architecture(
        model_type=kind,
        layers=stages * draw(st.integers(1, 2)),
        hidden=draw(st.integers(1, 3)),
        heads=groups * draw(st.integers(1, 3)),
        kv_heads=groups,
        head_dim=draw(st.integers(1, 2)),
        intermediate=ranks * draw(st.integers(1, 2)),
        vocabulary=draw(st.integers(1, 7)),
        tied=draw(st.booleans()),
        experts=4 if kind == "qwen3_moe" else 0,
    )
    return arch, ranks, stages


def checkpoint(arch: Architecture) -> dict[str, np.ndarray]:
    """Each element its own number, from 1 on."""
    found, first = {}, 1
    for name, shape in tensors(arch).items():
        count = math.prod(shape)
        found[name] = np.arange(first, first + count).reshape(shape)
        first += count
    return found


def boxes(parameter: Parameter, value: np.ndarray):
    """Name and strided view of each part, as the docstring of the module says it."""
    for part in parameter.parts:
        view = value.reshape(-1, part.period, *value.shape[1:])[:, part.first : part.first + part.run]
        yield part, view


def load(parameter: Parameter, whole: dict[str, np.ndarray]) -> np.ndarray:
    """The rank's parameter; padding is -1."""
    value = np.full(parameter.shape, -1)
    for part, view in boxes(parameter, value):
        box = tuple(slice(first, first + size) for first, size in zip(part.offset, part.held, strict=True))
        view[...] = whole[part.name][box].reshape(view.shape)
    return value


@settings(max_examples=150, deadline=None)
@given(architectures(), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.integers(0, 3))
def test_each_element_has_one_owner_and_the_ranks_make_the_checkpoint_again(
    made: tuple[Architecture, int, int], replicas: int, expert_parts: int, more: int
) -> None:
    arch, ranks, stages = made
    expert_parts = expert_parts if (replicas * ranks) % expert_parts == 0 else 1
    whole = checkpoint(arch)
    again = {name: np.zeros_like(value) for name, value in whole.items()}
    owners = {name: np.zeros_like(value) for name, value in whole.items()}
    padded = (-(-arch.vocabulary // ranks) + more) * ranks
    for tensor, stage, replica in itertools.product(range(ranks), range(stages), range(replicas)):
        place = Place(tensor=tensor, tensors=ranks, stage=stage, stages=stages, replica=replica, expert_parts=expert_parts)
        for parameter in parameters(arch, place, padded):
            value = load(parameter, whole)
            seen = np.zeros(parameter.shape, dtype=int)
            for part, view in boxes(parameter, value):
                box = tuple(slice(first, first + size) for first, size in zip(part.offset, part.held, strict=True))
                assert part.shape == whole[part.name].shape
                np.testing.assert_array_equal(view.reshape(part.held), whole[part.name][box])
                if part.owner:
                    again[part.name][box] = view.reshape(part.held)
                    owners[part.name][box] += 1
                next(one for held, one in boxes(parameter, seen) if held == part)[...] += 1
            padding = (value == -1).reshape(len(value), -1)
            assert seen.max() <= 1  # no row is of two tensors
            assert (padding.all(axis=1) == padding.any(axis=1)).all()
            assert not padding.any() or "vocab" in parameter.name or parameter.name.startswith(("embedding.", "output_layer."))
    for name, value in whole.items():
        np.testing.assert_array_equal(again[name], value)
        assert (owners[name] == 1).all(), name


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
QWEN3 = {"model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 8, "intermediate_size": 6, "vocab_size": 10, **HEADS}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "mixtral"}, "mixtral"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"model_type": "qwen3_moe"}, "moe_intermediate_size"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1]}, "mlp_only_layers"),
    ],
)
def test_what_is_not_known_is_refused_by_name(change: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        architecture({**QWEN3, **change}, "/m/config.json")
    assert caught.value.message.startswith("/m/config.json: expected")


@pytest.mark.parametrize(
    ("place", "padded", "word"),
    [
        (Place(tensors=4), 0, "num_key_value_heads"),
        (Place(stages=3), 0, "num_hidden_layers"),
        (Place(tensors=2), 9, "vocabulary"),
        (Place(tensors=2), 11, "vocabulary"),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_refused(place: Place, padded: int, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        list(parameters(architecture(QWEN3, "config.json"), place, padded))


def test_heads_and_groups_are_as_megatron_has_them() -> None:
    sizes = {"layers": 1, "hidden": 1, "heads": 4, "kv_heads": 2, "head_dim": 2, "intermediate": 2, "vocabulary": 3}
    arch = Architecture(model_type="qwen3", tied=False, **sizes)
    whole = checkpoint(arch)
    held = {one.name: load(one, whole).ravel().tolist() for one in parameters(arch, Place(tensor=1, tensors=2), 4)}
    layer = "model.layers.0."
    q, k, v = (whole[f"{layer}self_attn.{name}_proj.weight"].ravel().tolist() for name in "qkv")
    assert held["decoder.layers.0.self_attention.linear_qkv.weight"] == q[4:] + k[2:] + v[2:]
    gate, up = (whole[f"{layer}mlp.{name}_proj.weight"].ravel().tolist() for name in ("gate", "up"))
    assert held["decoder.layers.0.mlp.linear_fc1.weight"] == [gate[1], up[1]]
    assert held["decoder.layers.0.self_attention.linear_proj.weight"] == whole[f"{layer}self_attn.o_proj.weight"].ravel().tolist()[4:]
    assert held["output_layer.weight"] == [whole["lm_head.weight"].ravel().tolist()[2], -1]
    sizes = {"layers": 2, "hidden": 1, "heads": 1, "kv_heads": 1, "head_dim": 1, "intermediate": 1, "vocabulary": 3}
    arch = Architecture(model_type="llama", tied=True, **sizes)
    assert not any(one.name == "output_layer.weight" for one in parameters(arch, Place()))
    last = list(parameters(arch, Place(stage=1, stages=2)))[-1]
    assert (last.name, last.parts[0].name, last.parts[0].owner) == ("output_layer.weight", "model.embed_tokens.weight", False)
    plain = {key: value for key, value in QWEN3.items() if key not in ("num_key_value_heads", "head_dim")}
    found = architecture({**plain, "model_type": "llama"}, "config.json")
    assert (found.kv_heads, found.head_dim, found.tied) == (4, 2, False)
