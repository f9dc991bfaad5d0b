"""The digest that a model's parameters must have."""

from collections.abc import Iterable

from torch import Tensor

from streamrl.models.tensor_files import host_bytes
from streamrl.tensors.digest import combine, tensor_digest
from streamrl.tensors.names import named


def digest_of(parameters: Iterable[tuple[str, Tensor]], model_type: str) -> str:
    """Digest of a model's parameters, 16 hex digits: by the names of checkpoints."""
    sums: dict[str, int] = {}
    for name, parameter in parameters:
        data, item = host_bytes(parameter), parameter.element_size()
        for one in named(model_type, name, parameter.shape):
            sums[one.name] = tensor_digest(data[one.first * item : (one.first + one.numel) * item], item)
    return combine(sums)
