"""What a dead server means for its requests. The last file of this folder: the server that the tests share is gone afterwards."""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec
import pytest

from streamrl.engines.protocol import GenerateRequest
from streamrl.engines.sglang.engine import SglangEngine
from streamrl.engines.sglang.server import SglangServer
from streamrl.errors import EngineDied, EngineError
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from tests.sglang.test_server import PROMPT
from tests.support import models
from tests.support.models import ask, build
from tests.support.processes import command_of, group_of
from tests.support.publishing import load, publish


async def test_a_server_that_dies_fails_its_requests_and_says_so(shared_server: SglangServer, sglang_engine: SglangEngine, epochs):
    await load(sglang_engine, publish(models.tensors(build("qwen3", seed=1)), Version(next(epochs), 0)))
    request = GenerateRequest(
        request_id="r", prompt_ids=PROMPT, seeds=(1,), sampling=Sampling(max_new_tokens=1000, ignore_eos=True), stream=True
    )
    chunks = sglang_engine.generate(request)
    await anext(chunks)
    pid = shared_server.pid or 0
    (scheduler,) = [one for one in group_of(pid) if b"sglang::scheduler" in command_of(one)]
    os.kill(scheduler, signal.SIGKILL)
    with pytest.raises(EngineError):
        async with asyncio.timeout(60):
            async for _ in chunks:
                pass
    async with asyncio.timeout(60):
        while True:
            try:
                await sglang_engine.info()
            except EngineDied:
                break
            await asyncio.sleep(0.05)
    with pytest.raises(EngineError):
        await ask(sglang_engine, msgspec.structs.replace(request, request_id="next"))
    async with asyncio.timeout(30):
        while group_of(pid):
            await asyncio.sleep(0.05)
