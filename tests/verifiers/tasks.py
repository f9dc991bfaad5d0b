"""A taskset of every kind of behaviour, by a task's `mode`; loaded in the environment with verifiers, so it imports nothing of ours."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from streamrl_chat import StreamrlChat
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["Forking", "Modes"]
MODES = ("right", "fork", "nan", "raises", "silent", "hangs", "dies", "dies_once", "blocks_once")


def _first(mark: Path) -> bool:
    """Whether nobody was here before."""
    before = mark.exists()
    mark.touch()
    return not before


class ModeData(vf.TaskData):
    mode: str
    folder: str


class ModeTask(vf.Task[ModeData, vf.State, vf.TaskConfig]):
    @property
    def key(self) -> str:
        return f"task of {self.data.mode}"

    @vf.reward
    async def worth(self, task: ModeData, trace: vf.Trace) -> float | dict[str, float]:
        if task.mode == "raises":
            raise RuntimeError("the grader is broken")
        if task.mode == "silent":
            return {}
        return float("nan") if task.mode == "nan" else float((trace.last_reply or "").strip() == "7")

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        mode = self.data.mode
        if mode == "hangs" or (mode == "waits_once" and _first(Path(self.data.folder, mode))):
            await asyncio.sleep(3600)
        if mode == "dies":
            os.kill(os.getpid(), 9)
        if mode in ("dies_once", "blocks_once") and _first(Path(self.data.folder, mode)):
            if mode == "dies_once":
                os.kill(os.getpid(), 9)
            time.sleep(3600)  # noqa: ASYNC251 - it is to block


class ModesConfig(vf.TasksetConfig):
    folder: str = ""
    modes: tuple[str, ...] = MODES


class Modes(vf.Taskset[ModeTask, ModesConfig]):
    def load(self) -> Iterator[ModeTask]:
        for mode in self.config.modes:
            yield ModeTask(ModeData(prompt="3+4", mode=mode, folder=self.config.folder), self.config.task)


class Forking(StreamrlChat):
    """Where the task is `fork` it goes back behind its first turn after its third one, so that its trace has two branches."""

    async def launch(self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any) -> vf.ProgramResult:
        if data.mode != "fork":
            return await super().launch(ctx, trace, runtime, endpoint, secret, mcp_urls, data)
        client = self._http.with_options(base_url=endpoint, api_key=secret)
        messages: list[Any] = [message_to_wire(vf.UserMessage(content=data.prompt))]
        await self._turn(client, ctx.model, messages, [])
        left = [*messages, {"role": "user", "content": "8"}]
        for said in ("9", "1"):
            messages.append({"role": "user", "content": said})
            await self._turn(client, ctx.model, messages, [])
        await self._turn(client, ctx.model, left, [])
        return vf.ProgramResult(0, "", "")
