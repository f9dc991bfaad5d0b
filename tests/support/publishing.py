"""Versions for engines under test: tensors to a manifest and its bytes, handed over in parts that cut across tensors."""

from collections.abc import AsyncIterator, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest, PartRef, TensorSpec
from streamrl.tensors.digest import combine, digest_text, tensor_digest
from streamrl.weights.protocol import Commit, Part, WeightHost

ALIGNMENT = 64
"""Bytes, as in streamrl.weights.manifest."""


class Published(msgspec.Struct, frozen=True):
    manifest: Manifest
    data: bytes

    async def parts(self, count: int = 3) -> AsyncIterator[Part]:
        size = -(-len(self.data) // count)
        for start in range(0, len(self.data), size):
            yield Part(start, memoryview(self.data)[start : start + size])


def publish(tensors: Mapping[str, npt.NDArray[np.float32]], version: Version) -> Published:
    specs: list[TensorSpec] = []
    data = b""
    digests: dict[str, int] = {}
    for name, tensor in tensors.items():
        data += bytes(-len(data) % ALIGNMENT)
        raw = np.ascontiguousarray(tensor).tobytes()
        digests[name] = tensor_digest(np.frombuffer(raw, np.uint8), tensor.itemsize)
        specs.append(TensorSpec(name, str(tensor.dtype), tensor.shape, len(data), len(raw), digest_text(digests[name])))
        data += raw
    manifest = Manifest(
        run="r",
        policy="policy",
        version=version,
        tensors=tuple(specs),
        parts=(PartRef("blob", 0, len(data)),),
        transport="bus",
        digest=combine(digests),
        nbytes=len(data),
    )
    return Published(manifest, data)


async def load(host: WeightHost, published: Published) -> Commit:
    host.wants(published.manifest)
    assert await host.stage(published.manifest, published.parts()) == published.manifest.digest
    return await host.commit(published.manifest.version)
