"""How many layers keep their activations: more memory keeps more, never more than there are, and the arithmetic is told."""

from typing import Any

from streamrl.trainers import activations
from streamrl.trainers.activations import GIB, Cut, Estimate, ModelShape

HEADS = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
QWEN_4B: dict[str, Any] = {"hidden_size": 2560, "intermediate_size": 9728, "vocab_size": 151_936, "tie_word_embeddings": True, **HEADS}
SHAPE = ModelShape(36, 2560, 4096, 1024, 9728, 151_936, tied=True)


def estimate(free_gib: float, tokens: int = 8192, *, compiled: bool = True, needed: int = 40 * GIB) -> Estimate:
    return activations.kept_layers(SHAPE, free_bytes=int(free_gib * GIB), needed_bytes=needed, tokens=tokens, itemsize=2, compiled=compiled)


def test_the_shape_is_read_from_a_models_configuration() -> None:
    assert activations.model_shape(QWEN_4B) == activations.model_shape({"text_config": QWEN_4B, "vision_config": {}}) == SHAPE
    assert 4.0e9 < SHAPE.parameters < 4.05e9
    mixture = activations.model_shape(QWEN_4B | {"moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128})
    assert mixture is not None and (mixture.inner, mixture.experts) == (6144, 16)
    for broken in ({}, {"hidden_size": 8}, QWEN_4B | {"num_attention_heads": None}, QWEN_4B | {"num_attention_heads": 0, "head_dim": 0}):
        assert activations.model_shape(broken) is None


def test_bytes_of_a_parameter_before_the_first_step_and_while_training() -> None:
    assert [activations.training_bytes(10, itemsize) for itemsize in (2, 4)] == [180, 160]
    for itemsize, shards, held in ((2, 1, 6), (4, 1, 4), (2, 2, 2), (4, 4, 1)):
        assert activations.held_bytes(100, itemsize, shards) == 100 * held
        assert activations.training_bytes(100, itemsize, shards) >= activations.held_bytes(100, itemsize, shards)


def test_more_memory_keeps_more_layers_and_the_arithmetic_is_told() -> None:
    found = [estimate(gib).kept for gib in (20, 60, 75, 90, 200)]
    assert found == sorted(found) and found[0] == 0 and found[-1] == 36 and 0 < found[2] < 36
    assert estimate(80, 16_384).kept < estimate(80).kept
    assert estimate(80, compiled=False).kept < estimate(80).kept
    assert not estimate(20).fits and estimate(90).fits
    found = estimate(75)
    layer = 8192 * SHAPE.layer_bytes(2, compiled=True) / GIB
    assert found.text.startswith(f"{found.kept} of 36 layers ") and "95% of 75.0 GiB" in found.text
    assert found.text.endswith(f"= {layer:.2f}")


def test_of_two_models_the_one_with_room_for_the_fewest_layers_counts() -> None:
    small, large = SHAPE._replace(layers=8), SHAPE._replace(layers=64)

    def found(gib: float, *shapes: ModelShape) -> Estimate:
        return activations.least_kept(shapes, free_bytes=int(gib * GIB), needed_bytes=40 * GIB, tokens=8192, itemsize=2, compiled=True)

    alone = found(75, small)
    assert alone.all_kept and alone.kept == 8, "the policy's few layers fit"
    both = found(75, small, large)
    assert not both.all_kept and 0 < both.kept < 64 and "of 64 layers" in both.text, "the critic's many do not"
    assert found(500, small, large).all_kept
    assert found(58, small).fits and not found(58, small, large._replace(layers=4000)).fits
    assert found(75, small, large).kept > found(75, large, small).kept, "a critic has no head"


def test_parts_take_their_part_and_what_is_gathered() -> None:
    assert [activations.training_bytes(101, itemsize, 2) for itemsize in (2, 4)] == [16 * 51] * 2
    assert activations.gathered_bytes(SHAPE, 2, once=True) == 6 * SHAPE.parameters
    ends = 151_936 * 2560
    assert activations.gathered_bytes(SHAPE, 2, once=False) == 4 * ends + 8 * (SHAPE.parameters - ends) // 36
    assert (
        activations.gathered_bytes(SHAPE._replace(tied=False), 2, once=False) - activations.gathered_bytes(SHAPE, 2, once=False) == 4 * ends
    )
    assert 2 * activations.looked_at_bytes(SHAPE, 2) == activations.gathered_bytes(SHAPE, 2, once=False)
    assert SHAPE.body == SHAPE and SHAPE._replace(tied=False).body == SHAPE, "what is tied has one matrix already"


def test_tensor_ranks_and_stages_have_room_for_their_parts() -> None:
    """Each has half of the layers; the first stage two rows on their way and no head, the last one a row and the head."""
    same: dict[str, Any] = {"needed_bytes": 10 * GIB, "itemsize": 2, "compiled": True}

    def kept(cut: Cut, free_gib: float) -> Estimate:
        return cut.least_kept([SHAPE], tokens=8192, free_bytes=int(free_gib * GIB), **same)

    def alone(free_gib: float, tokens: int, **parts: int) -> Estimate:
        return activations.least_kept([SHAPE._replace(**parts)], tokens=tokens, free_bytes=int(free_gib * GIB), **same)

    assert kept(Cut(), 40) == alone(40, 8192)
    assert kept(Cut(tensors=2), 25) == alone(25, 4096, vocab=151_936 // 2)
    for free in range(24, 60, 4):
        first, last = alone(free, 2 * 8192, layers=18, vocab=0), alone(free, 8192, layers=18)
        assert kept(Cut(stages=2), free).kept == min(first.kept, last.kept)
        assert kept(Cut(stages=2), free).fits == (first.fits and last.fits)
    assert kept(Cut(stages=2), 80).all_kept and not kept(Cut(stages=2), 12).fits
