"""Weights through SGLang's own API, for servers without our plugin: pause in place, load from shared memory, go on.

It is the second choice, and the engine says so in its log, its events and its metrics. All streams stand still while SGLang reads the
new weights (requests and their keys and values stay), and nothing says exactly which tokens came before: `meta_info` of 0.5.17
names the newest version only, the spans of later releases begin one token early for requests with a pass under way. A
completion during which nothing was committed has exact versions; the others are marked `inexact_versions`.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from streamrl.engines.live_swap.images import MappedVersion, collected, memory_folder
from streamrl.engines.sglang.client import SglangClient
from streamrl.errors import EngineDied, EngineError, WeightSyncError
from streamrl.models.tensor_files import WEIGHTS_FILE, NewTensors
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from streamrl.tensors.concatenation import ITEM_BYTES
from streamrl.tensors.digest import combine, tensor_digest
from streamrl.weights.protocol import Commit, CudaSource, FileSource, Part, Slice

CONTROL_S = 60.0
LOAD_S = 1800.0
_READ = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8")
"""Types that SGLang reads from a file."""


class StockHost:
    """`WeightHost` and `SourceHost` over the update endpoints of a server.

    Args:
        client: of the server.
        model_dir: where its configuration is.
        engine: id, for errors.
    """

    def __init__(self, client: SglangClient, model_dir: Path, *, engine: str) -> None:
        self._client = client
        self._model_dir = model_dir
        self._engine = engine
        self._staged: tuple[Version, Path] | None = None
        self.serving: Version | None = None
        self.broken = False
        """An update failed half-way: the server holds mixed weights, and has not gone on."""

    def wants(self, manifest: Manifest) -> Sequence[Slice]:
        """All of a version; raises WeightSyncError for a dtype that SGLang cannot read from a file."""
        for spec in manifest.tensors:
            if spec.dtype not in _READ:
                raise WeightSyncError(
                    f"tensor {spec.name!r} of {manifest.version}: expected a dtype of {', '.join(_READ)}, got {spec.dtype}",
                    hint="publish the policy in one of them",
                )
        return (Slice(0, manifest.nbytes),)

    async def stage(self, manifest: Manifest, parts: AsyncIterator[Part]) -> str:
        """See `WeightHost.stage`."""
        async with collected(manifest, parts, engine=self._engine) as source:
            return await self.stage_from(manifest, source)

    async def stage_from(self, manifest: Manifest, source: FileSource | CudaSource) -> str:
        """Write the version as a model directory in shared memory, and check its digest there."""
        self.wants(manifest)
        if not isinstance(source, FileSource):
            raise WeightSyncError(
                f"expected version {manifest.version} in a file, got it on a device: engine {self._engine} has no plugin in its server",
                hint="set weights.transport to shm or bus, or weights.also_on_bus = true",
            )
        self._drop()
        folder = Path(tempfile.mkdtemp(prefix="streamrl-stock-", dir=memory_folder()))
        try:
            digest = await asyncio.to_thread(_write, manifest, MappedVersion(source, manifest.nbytes), self._model_dir, folder)
            if digest != manifest.digest:
                raise WeightSyncError(
                    f"expected digest {manifest.digest} for version {manifest.version}, got {digest} at engine {self._engine}",
                    hint="bytes changed on the way; the next version is taken afresh",
                    expected=manifest.digest,
                    got=digest,
                )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._staged = (manifest.version, folder)
        return digest

    async def commit(self, version: Version) -> Commit:
        """Pause, load, go on; `took_ms` is how long nothing was sampled."""
        if self.serving is not None and version <= self.serving:
            return Commit(version, False, 0.0)
        if self._staged is None or self._staged[0] != version:
            got = None if self._staged is None else self._staged[0]
            raise WeightSyncError(
                f"expected version {version} to be staged, got {got} at engine {self._engine}",
                hint="stage it first",
                version=str(version),
                staged=got,
            )
        body = {
            "model_path": str(self._staged[1]),
            "load_format": "safetensors",
            "weight_version": str(version),
            # The running requests' keys and values stay; a flush would fail beside them.
            "flush_cache": False,
            "abort_all_requests": False,
        }
        started = time.monotonic()
        await self._post("pause_generation", {"mode": "in_place"}, CONTROL_S)
        try:
            self.broken = True
            answer = await self._post("update_weights_from_disk", body, LOAD_S)
            if not answer.get("success"):
                raise EngineError(f"SGLang at engine {self._engine} refused version {version}: {answer.get('message')}")
            self.broken = False
        except EngineError as error:
            raise EngineDied(
                f"engine {self._engine} may hold a mixture of {self.serving} and {version}: {error.message}",
                hint="its server is started anew",
            ) from error
        finally:
            if not self.broken:
                await self._post("continue_generation", {"torch_empty_cache": False}, CONTROL_S)
        self.serving = version
        self._drop()
        return Commit(version, True, (time.monotonic() - started) * 1e3)

    async def close(self) -> None:
        """Remove what was staged."""
        self._drop()

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        return await self._client.post("/" + path, body, timeout_s=timeout_s, expect=dict[str, Any])

    def _drop(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            shutil.rmtree(staged[1], ignore_errors=True)


def _write(manifest: Manifest, version: MappedVersion, model_dir: Path, folder: Path) -> str:
    """Make `folder` a model directory with the version's weights as one safetensors file; returns the digest of what was read."""
    for path in model_dir.iterdir():
        if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja"):
            if path.name.endswith(".index.json"):
                continue
            (folder / path.name).symlink_to(path.resolve())
    made = NewTensors(folder / WEIGHTS_FILE, {spec.name: (spec.dtype, tuple(spec.shape)) for spec in manifest.tensors})
    digests: dict[str, int] = {}
    for spec in manifest.tensors:
        data = version.bytes(spec.offset, spec.nbytes)
        digests[spec.name] = tensor_digest(data, ITEM_BYTES[spec.dtype])
        made.bytes(spec.name)[:] = data
    return combine(digests)
