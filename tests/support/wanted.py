"""What a reader asks of a transport, and the bytes of versions."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from streamrl.errors import WeightSyncError
from streamrl.schemas.weights import Manifest
from streamrl.tensors.concatenation import aligned
from streamrl.weights.manifest import Content
from streamrl.weights.protocol import HostBytes, Shard, Slice, WeightTransport
from streamrl.weights.ranks import RankContent


def slices(manifest: Manifest, names: Iterable[str] | None = None) -> tuple[Slice, ...]:
    """Byte ranges of the named tensors (None: all), in order; neighbours are joined over their padding.

    Raises:
        WeightSyncError: a name that the manifest does not have.
    """
    chosen = {spec.name for spec in manifest.tensors} if names is None else set(names)
    unknown = chosen - {spec.name for spec in manifest.tensors}
    if unknown:
        raise WeightSyncError(
            f"tensor {min(unknown)!r}: expected in the manifest of {manifest.policy} {manifest.version}, got none of that name"
        )
    joined: list[Slice] = []
    for spec in sorted(manifest.tensors, key=lambda spec: spec.offset):
        if spec.name not in chosen or spec.nbytes == 0:
            continue
        if joined and aligned(joined[-1].start + joined[-1].nbytes) == spec.offset:
            start = joined.pop().start
            joined.append(Slice(start, spec.offset + spec.nbytes - start))
        else:
            joined.append(Slice(spec.offset, spec.nbytes))
    return tuple(joined)


def host(shard: Shard) -> HostBytes:
    """The bytes of a slice that lies on the host."""
    assert isinstance(shard.data, np.ndarray)
    return shard.data


async def fetched(transport: WeightTransport, manifest: Manifest) -> npt.NDArray[np.uint8]:
    """Fetch a whole version."""
    data = np.zeros(manifest.nbytes, np.uint8)
    async for part in transport.fetch(manifest, slices(manifest)):
        data[part.start : part.start + len(part.data)] = np.frombuffer(part.data, np.uint8)
    return data


def filled(content: Content | RankContent) -> npt.NDArray[np.uint8]:
    """Return the bytes that a publisher would store."""
    data = np.zeros(content.nbytes, np.uint8)
    content.fill(0, data)
    return data
