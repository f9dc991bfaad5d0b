"""Plans as plain numbers: whatever the shapes and cuts, every element goes where it should, once."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.engines.live_swap.moves import moves
from streamrl.engines.live_swap.plan import DEVICE_WINDOW_BYTES, Copy, apart, canonical, cut, merge, windows
from streamrl.tensors.concatenation import lay_out
from streamrl.tensors.names import named


@st.composite
def copies(draw: st.DrawFn) -> tuple[int, Copy]:
    """Elements of the source, and a copy of a rectangle of it into a 12 x 12 parameter, transposed or not."""
    height, width = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    top, left = draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
    rows, cols = draw(st.integers(1, height - top)), draw(st.integers(1, width - left))
    target = draw(st.integers(0, 2)) * 12 + draw(st.integers(0, 2))
    strides = draw(st.sampled_from([(12, 1), (1, 12)]))
    copy = canonical(0, 0, (rows, cols), (top * width + left, (width, 1)), (target, strides))
    assert copy is not None
    expected = {target + i * strides[0] + j * strides[1]: (top + i) * width + left + j for i in range(rows) for j in range(cols)}
    assert written(copy) == expected
    return height * width, copy


def written(copy: Copy) -> dict[int, int]:
    """Source element by target element."""
    return {
        copy.target + i * copy.target_stride + j * copy.target_step: copy.start + i * copy.stride + j
        for i in range(copy.rows)
        for j in range(copy.cols)
    }


@settings(max_examples=100, deadline=None)
@given(copies(), st.lists(st.integers(0, 63), max_size=3), st.sampled_from([2, 6, 20, 1000]), st.integers(1, 4))
def test_windows_bring_every_element_once(one, cuts, window_bytes, window_copies):
    elements, copy = one
    edges = sorted({0, elements, *(edge for edge in cuts if edge < elements)})
    sources = [(64 + 2 * a, 64 + 2 * b) for a, b in pairwise(edges)]
    found: dict[int, int] = {}
    last = 0
    for window in windows([copy], [64], [2], sources, window_bytes, window_copies):
        assert last <= window.first_byte
        last = window.first_byte
        assert len(window.pieces) <= window_copies
        assert window.end_byte - window.first_byte <= window_bytes
        for piece in window.pieces:
            assert window.first_byte <= piece.first_byte < piece.end_byte <= window.end_byte
            assert sources[piece.source][0] <= piece.first_byte
            assert piece.end_byte <= sources[piece.source][1]
            part = written(piece.copy)
            assert not part.keys() & found.keys()
            found |= part
    assert found == written(copy)


@settings(max_examples=100, deadline=None)
@given(copies(), st.integers(0, 70), st.integers(0, 70))
def test_cut_takes_what_lies_between(one, first, end):
    _, copy = one
    found: dict[int, int] = {}
    for part in cut(copy, first, end):
        found |= written(part)
    assert found == {target: source for target, source in written(copy).items() if first <= source < end}


@settings(max_examples=100, deadline=None)
@given(copies(), copies())
def test_apart_is_never_wrong(one, other):
    if apart(one[1], other[1]):
        assert not written(one[1]).keys() & written(other[1]).keys()


def test_neighbours_become_one_copy():
    gate = Copy(3, 0, 8, 1, 8, 5, 100, 8)
    up = Copy(3, 8, 8, 1, 8, 5, 108, 8)
    elsewhere = Copy(3, 16, 8, 1, 8, 5, 200, 8)
    assert merge([elsewhere, up, gate]) == [Copy(3, 0, 16, 1, 16, 5, 100, 16), elsewhere]


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.booleans()), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
    window_bytes=st.sampled_from([40, 200, 10_000]),
    cuts=st.lists(st.integers(0, 100), max_size=4),
)
def test_moves_bring_what_the_pieces_would(sizes, order, window_bytes, cuts):
    """Tensors one after the other, in any order beside each other in one of two parameters, some of them as every second column."""
    targets = list(range(len(sizes)))
    order.shuffle(targets)
    copies_of, offsets = [], []
    end = 0
    for tensor, (rows, cols, apart_) in enumerate(sizes):
        parameter, place = targets[tensor] % 2, targets[tensor] // 2 * 40
        copies_of.append(Copy(tensor, 0, cols, 1, rows * cols, parameter, place, rows * cols))
        if apart_ and rows > 1:
            copies_of[-1] = Copy(tensor, 0, cols, rows, cols, parameter, place, 2 * cols)
        offsets.append(end)
        end += -(-2 * rows * cols // 8) * 8
    edges = sorted({0, end, *(2 * edge for edge in cuts if 2 * edge < end)})
    sources = list(pairwise(edges))
    for window in windows(copies_of, offsets, [2] * len(sizes), sources, window_bytes):
        expected = {
            (piece.copy.parameter, target): offsets[piece.copy.tensor] // 2 + source
            for piece in window.pieces
            for target, source in written(piece.copy).items()
        }
        found: dict[tuple[int, int], int] = {}
        for move in moves(window.pieces):
            first = move.first
            base = first.first_byte // 2 - first.copy.start
            for indices in product(*(range(one.times) for one in move.recurs)):
                step = sum(index * one.step for index, one in zip(indices, move.recurs, strict=True))
                target_step = sum(index * one.target_step for index, one in zip(indices, move.recurs, strict=True))
                for target, source in written(first.copy).items():
                    place = (first.copy.parameter, target + target_step)
                    assert place not in found
                    found[place] = base + source + step
                    # Another source lies elsewhere in memory.
                    assert sources[first.source][0] <= 2 * found[place] < sources[first.source][1]
        assert found == expected


def plan_of_experts(tensors: dict[str, tuple[int, ...]], ranks: int) -> tuple[list[Copy], list[int], int]:
    """How SGLang's rank 0 takes bfloat16 tensors: experts into one parameter for gate and up and one for down, of which it has columns."""
    starts, nbytes = lay_out({name: 2 * prod(shape) for name, shape in tensors.items()})
    parameters: dict[str, int] = {}
    found = []
    for tensor, (name, shape) in enumerate(tensors.items()):
        before, _, after = name.partition(".experts.")
        rows, cols = shape if len(shape) == 2 else (1, shape[0])
        target = 0
        if after:
            expert, kind = int(after.split(".")[0]), after.split(".")[1]
            parameter = parameters.setdefault(f"{before}.{'w2' if kind == 'down_proj' else 'w13'}", len(parameters))
            whole = rows * cols // ranks
            target = expert * whole if kind == "down_proj" else (2 * expert + (kind == "up_proj")) * whole
        else:
            parameter = parameters.setdefault(name, len(parameters))
        if "down_proj" in name and ranks > 1:
            found.append(Copy(tensor, 0, cols, rows, cols // ranks, parameter, target, cols // ranks))
        else:
            count = rows * cols // (ranks if "_proj" in name else 1)
            found.append(Copy(tensor, 0, count, 1, count, parameter, target, count))
    return found, [starts[name] for name in tensors], nbytes


def number_of_moves(tensors: dict[str, tuple[int, ...]], ranks: int, sources: int = 1) -> int:
    plan, offsets, nbytes = plan_of_experts(tensors, ranks)
    edges = [nbytes * index // sources // 64 * 64 for index in range(sources)] + [nbytes]
    cut_ = windows(plan, offsets, [2] * len(offsets), list(pairwise(edges)), DEVICE_WINDOW_BYTES)
    assert sum(window.nbytes for window in cut_) == 2 * sum(copy.count for copy in plan)
    return sum(len(moves(window.pieces)) for window in cut_)


def mixture(layers: int, experts: int, hidden: int, inner: int, heads: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a Qwen3-MoE, with the names that its checkpoints have."""
    found: dict[str, tuple[int, ...]] = {"lm_head.weight": (151_936, hidden), "model.embed_tokens.weight": (151_936, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes = {"q_proj": (heads, hidden), "k_proj": (heads // 8, hidden), "v_proj": (heads // 8, hidden), "o_proj": (hidden, heads)}
        found |= {f"{at}.self_attn.{name}.weight": shape for name, shape in shapes.items()}
        found |= {f"{at}.self_attn.{name}.weight": (128,) for name in ("q_norm", "k_norm")}
        found |= {f"{at}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            fused = f"{at}.mlp.experts.{'down_proj' if name == 'down' else 'gate_up_proj'}"
            height = shape[0] * (1 if name == "down" else 2)
            found |= {one.name: one.shape for one in named("qwen3_moe", fused, (experts, height, shape[1]))}
        found[f"{at}.mlp.gate.weight"] = (experts, hidden)
    return found | {"model.norm.weight": (hidden,)}


def test_a_mixture_of_experts_is_few_and_large_moves():
    """Of Qwen3-30B-A3B there were 18,867 copies; a layer's experts lie in windows of 512 MB, and all of a kind in a window are one move."""
    small = mixture(layers=2, experts=12, hidden=64, inner=16, heads=64)
    assert len(small) == 2 * (3 * 12 + 9) + 3
    assert number_of_moves(small, 1) == 2 * (2 + 9) + 3
    assert number_of_moves(small, 2) == 2 * (2 + 9) + 3
    large = mixture(layers=48, experts=128, hidden=2048, inner=768, heads=4096)
    assert len(large) == 18_867
    assert number_of_moves(large, 1) <= 900
    assert number_of_moves(large, 2) <= 900


def test_rows_of_two_ranks_are_no_more_windows_than_those_of_one():
    """Which lie in turn, tensor by tensor: of Qwen3-8B there were 802 windows where one rank has 33, and a call for each."""
    shapes: dict[str, tuple[int, ...]] = {"lm_head.weight": (151_936, 4096), "model.embed_tokens.weight": (151_936, 4096)}
    of_layer = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096), "norm": (4096,)}
    of_layer |= {"gate": (12288, 4096), "up": (12288, 4096), "down": (4096, 12288), "norm_2": (4096,)}
    shapes |= {f"model.layers.{layer}.{name}": shape for layer in range(36) for name, shape in of_layer.items()}
    plan, offsets, nbytes = plan_of_experts(shapes, 1)
    sizes = [2 * prod(shape) for shape in shapes.values()]
    halves = sorted((start, start + size // 2) for start, size in zip(offsets, sizes, strict=True))
    others = sorted((start + size // 2, start + size) for start, size in zip(offsets, sizes, strict=True))
    items = [2] * len(plan)
    one = windows(plan, offsets, items, [(0, nbytes)], DEVICE_WINDOW_BYTES)
    two = windows(plan, offsets, items, sorted([*halves, *others]), DEVICE_WINDOW_BYTES)
    assert sum(window.nbytes for window in two) == sum(window.nbytes for window in one) == sum(sizes)
    assert len(one) <= len(two) <= len(one) + 2
    # Each waits for what it reads of each rank, and for no more.
    assert all(end <= window.end_byte for window in two for _, end in window.reads)


def test_what_is_no_rows_of_elements_is_refused():
    assert canonical(0, 0, (2, 2, 2), (0, (100, 10, 1)), (0, (4, 2, 1))) is None
    assert canonical(0, 0, (4,), (0, (0,)), (0, (1,))) is None
