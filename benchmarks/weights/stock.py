"""SGLang's own ways to change weights, for comparison: a pause in place, an update, and on.

Without the pause an update waits until every running request has ended, so the pause is stock's best case.
"""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import shutil
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import multiprocessing
from torch.multiprocessing import reductions

from benchmarks.weights.trainer_group import TrainerGroup, buckets_of
from streamrl.engines.sglang.client import SglangClient
from streamrl.errors import EngineError

logger = logging.getLogger(__name__)

_TIMEOUT_S = 300.0
_GROUP_TIMEOUT_S = 60.0
"""For anything that a group's ranks do together: making it, a bucket, leaving it."""
_GROUP = "streamrl-bench"
_SESSIONS_FROM = (0, 5, 18)
"""SGLang wants begin_weight_update and end_weight_update around updates since this version."""


class Paused(msgspec.Struct, frozen=True, kw_only=True):
    """When generation stood still; seconds of the monotonic clock."""

    pause_s: float
    paused_s: float
    continued_s: float


class StockEngine:
    """The update endpoints of one SGLang server."""

    def __init__(self, client: SglangClient, *, sglang: str, tensor_parallel: int) -> None:
        self._client = client
        self._tensor_parallel = tensor_parallel
        self._sessions = _numbers(sglang) >= _SESSIONS_FROM
        self._group: TrainerGroup | None = None
        self._why_no_group = "it was not asked for"

    @asynccontextmanager
    async def group(self, device: torch.device, tensors: Mapping[str, torch.Tensor]) -> AsyncGenerator[None]:
        """Make the group for `update_from_distributed`, and leave it when the context is left.

        One update with `tensors` is made at once: the group's first broadcast takes seconds, which are not an update's. When any of it
        fails, the updates do, and say why.
        """
        group = TrainerGroup(device, ranks=self._tensor_parallel, name=_GROUP)
        host, port = group.address
        place = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": group.size}
        try:
            await self._together("init_weights_update_group", {**place, "group_name": _GROUP, "backend": group.backend}, group, group.join)
            self._group = group
            await self.update_from_distributed(tensors)
        except (EngineError, RuntimeError) as error:
            logger.warning("event=bench_group_failed backend=%s error=%s", group.backend, error)
            self._group, self._why_no_group = None, str(error)
        try:
            yield
        finally:
            if self._group is not None:
                await self._leave(self._group)

    async def update_from_tensor(self, payload: str) -> Paused:
        """Load tensors that `tensor_payload` described; every rank reads all of them."""
        body = {"serialized_named_tensors": [payload] * self._tensor_parallel, "flush_cache": False}

        async def update() -> None:
            if self._sessions:
                await self._post("begin_weight_update", {})
            await self._post("update_weights_from_tensor", body)
            if self._sessions:
                await self._post("end_weight_update", {})

        return await self._in_pause(update)

    async def update_from_distributed(self, tensors: Mapping[str, torch.Tensor]) -> Paused:
        """Broadcast tensors from where they are to the ranks, in buckets. Raises EngineError outside of `group`, or when that failed."""
        group = self._group
        if group is None:
            raise EngineError(f"update_weights_from_distributed: expected a group with the engine's ranks, got none: {self._why_no_group}")

        async def update() -> None:
            if self._sessions:
                await self._post("begin_weight_update", {})
            for names in buckets_of(tensors):
                chosen = [tensors[name] for name in names]
                body = {
                    "names": names,
                    "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in chosen],
                    "shapes": [list(tensor.shape) for tensor in chosen],
                    "group_name": _GROUP,
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                }
                await self._together("update_weights_from_distributed", body, group, group.send, chosen)
            if self._sessions:
                await self._post("end_weight_update", {})

        return await self._in_pause(update)

    async def update_from_disk(self, directory: Path) -> Paused:
        """Load the safetensors of a model directory."""
        body = {"model_path": str(directory), "load_format": "auto", "flush_cache": False}

        async def update() -> None:
            await self._post("update_weights_from_disk", body)

        return await self._in_pause(update)

    async def _in_pause(self, update: Callable[[], Awaitable[None]]) -> Paused:
        pause_s = time.monotonic()
        await self._post("pause_generation", {"mode": "in_place"})
        paused_s = time.monotonic()
        try:
            await update()
        finally:
            await self._post("continue_generation", {"torch_empty_cache": False})
        return Paused(pause_s=pause_s, paused_s=paused_s, continued_s=time.monotonic())

    async def _leave(self, group: TrainerGroup) -> None:
        self._group = None
        try:
            await self._together("destroy_weights_update_group", {"group_name": _GROUP}, group, group.close)
        except (EngineError, RuntimeError) as error:
            logger.warning("event=bench_group_left_behind error=%s", error)

    async def _together(self, path: str, body: Mapping[str, Any], group: TrainerGroup, ours: Callable[..., None], *args: Any) -> None:
        """Ask the engine's ranks for something that this rank must do at the same time."""
        both = (
            asyncio.create_task(asyncio.to_thread(ours, *args)),
            asyncio.create_task(self._post(path, body, timeout_s=_GROUP_TIMEOUT_S)),
        )
        try:
            await asyncio.gather(*both)
        except BaseException as error:
            self._group, self._why_no_group = None, f"{path} failed: {error}"
            # Otherwise this rank waits for the others for good.
            group.abort()
            await asyncio.wait(both, timeout=_GROUP_TIMEOUT_S)
            raise

    async def _post(self, path: str, body: Mapping[str, Any], *, timeout_s: float = _TIMEOUT_S) -> None:
        answer = await self._client.post(f"/{path}", body, timeout_s=timeout_s, expect=object)
        if isinstance(answer, dict) and answer.get("success", True) is not True:
            raise EngineError(f"{path}: expected success from SGLang, got {str(answer)[:300]}")


def tensor_payload(tensors: Mapping[str, torch.Tensor]) -> str:
    """What update_weights_from_tensor takes: handles of the tensors' memory as a base64 pickle, which is SGLang's format, not ours.

    The tensors must stay where they are until the update is over.
    """
    reductions.init_reductions()
    if any(tensor.device.type == "cpu" for tensor in tensors.values()):
        # Otherwise they travel as file descriptors over a socket of this process, at which SGLang's schedulers die.
        multiprocessing.set_sharing_strategy("file_system")
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(list(tensors.items()))
    return base64.b64encode(buffer.getvalue()).decode()


def write_checkpoint(directory: Path, config: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A model directory with these weights in one safetensors file."""
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(config, directory / "config.json")
    save_file(dict(tensors), directory / "model.safetensors")


def _numbers(version: str) -> tuple[int, ...]:
    """`0.5.17.post1` as (0, 5, 17)."""
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
