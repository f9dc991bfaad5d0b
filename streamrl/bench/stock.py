"""SGLang's own ways to change weights, for comparison: a pause in place, an update, and on.

Without the pause an update waits until every running request has ended, so the pause is stock's best case.
"""

from __future__ import annotations

import base64
import io
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import multiprocessing
from torch.multiprocessing import reductions

from streamrl.engines.sglang.client import SglangClient
from streamrl.errors import EngineError

_TIMEOUT_S = 300.0
_SESSIONS_FROM = (0, 5, 18)
"""SGLang wants begin_weight_update and end_weight_update around updates from tensors since this version."""


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

    async def _post(self, path: str, body: Mapping[str, Any]) -> None:
        answer = await self._client.post(f"/{path}", body, timeout_s=_TIMEOUT_S, expect=object)
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
