"""Names, shapes and order of a version's tensors: those of the architecture's checkpoints, whatever transformers makes of them.

Some versions of transformers keep the experts of a layer in two parameters, and rename what is around them; a checkpoint has a matrix for
each expert. Here a parameter is the tensors of the checkpoint whose elements follow each other in its memory, so a range of its rows is a
range of theirs, and nothing is copied:

```text
...mlp.experts.gate_up_proj [E, 2 I, H]     experts.0.gate_proj.weight [I, H], experts.0.up_proj.weight [I, H], experts.1.gate_...
...mlp.experts.down_proj    [E, H, I]       experts.0.down_proj.weight [H, I], experts.1.down_proj.weight [H, I], ...
```
A parameter that the table does not know is the tensor of its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple


class Experts(NamedTuple):
    """How the checkpoints of an architecture name the experts of a layer."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of the names around them: in the module, in the checkpoint."""


class Named(NamedTuple):
    """A tensor of a checkpoint, or rows of one, within a parameter or rows of one."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """Index of the first element in each dimension."""
    held: tuple[int, ...]
    """Shape of the rows."""
    first: int
    """Index of the first element within what was asked about."""

    @property
    def numel(self) -> int:
        """Elements of the rows."""
        return math.prod(self.held)


_PLAIN = Experts()
_MIXTRAL = Experts("w1", "w3", "w2", ((".mlp.experts.", ".block_sparse_moe.experts."), (".mlp.gate.", ".block_sparse_moe.gate.")))
ARCHITECTURES: Mapping[str, Experts] = {
    "deepseek_v2": _PLAIN,
    "deepseek_v3": _PLAIN,
    "glm4_moe": _PLAIN,
    "mixtral": _MIXTRAL,
    "olmoe": _PLAIN,
    "qwen2_moe": _PLAIN,
    "qwen3_moe": _PLAIN,
    "qwen3_next": _PLAIN,
}
"""By `model_type` of the configuration. Another architecture's tensors have the names that its module gives them."""
KEPT = (".e_score_correction_bias", ".expert_bias")
"""Ends the names of tensors that checkpoints have and no trainer trains, biases of a mixture's routers: they stay as the initial policy
has them, and no version carries them."""
_FUSED = re.compile(r"^(?P<before>.*\.experts\.)(?P<what>gate_up_proj|down_proj)$")


def named(model_type: str, name: str, shape: Sequence[int], rows: range | None = None) -> Iterator[Named]:
    """The checkpoint's tensors that rows of a module's parameter are, in the order of its elements, also those of which no row is held.

    Args:
        model_type: of the configuration.
        name: of the parameter.
        shape: of the parameter.
        rows: those that are held (dimension 0); None: all.

    Example, of the second of two experts, whose gate and up have a row of three elements each:

        >>> found = named("qwen3_moe", "mlp.experts.gate_up_proj", (2, 2, 3), range(1, 2))
        >>> [(one.name, one.offset, one.first) for one in found if one.numel]
        [('mlp.experts.1.gate_proj.weight', (0, 0), 0), ('mlp.experts.1.up_proj.weight', (0, 0), 3)]
    """
    width = math.prod(shape[1:])
    low, high = (0, math.prod(shape)) if rows is None else (rows.start * width, rows.stop * width)
    begin = 0
    for one, whole in _tensors(model_type, name, tuple(shape)):
        count, row = math.prod(whole), math.prod(whole[1:])
        first, end = (min(max(edge - begin, 0), count) for edge in (low, high))
        if whole and row:
            offset, held = (first // row, *(0 for _ in whole[1:])), ((end - first) // row, *whole[1:])
        else:
            offset, held = tuple(0 for _ in whole), whole
        yield Named(one, whole, offset, held, begin + first - low if first < end else 0)
        begin += count


def unlisted(model_type: str, names: Iterable[str]) -> str:
    """The first parameter that keeps experts in one tensor, of an architecture that `ARCHITECTURES` does not know; empty: there is none.

    It is published and digested under that name, which another version of transformers, or the checkpoint, may not have.
    """
    return "" if model_type in ARCHITECTURES else next((name for name in names if _FUSED.match(name)), "")


def _tensors(model_type: str, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    table = ARCHITECTURES.get(model_type)
    if table is None:
        yield name, shape
        return
    fused = _FUSED.match(name)
    for old, new in table.renamed:
        name = name.replace(old, new)
    if fused is None or len(shape) != 3:
        yield name, shape
        return
    before = name.removesuffix(fused["what"])
    experts, height, width = shape
    for expert in range(experts):
        if fused["what"] == "down_proj":
            yield f"{before}{expert}.{table.down}.weight", (height, width)
        else:
            yield f"{before}{expert}.{table.gate}.weight", (height // 2, width)
            yield f"{before}{expert}.{table.up}.weight", (height // 2, width)
