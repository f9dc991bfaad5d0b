"""Other ways to serve: experts on two tensor-parallel ranks, and bfloat16 weights that are copied into place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import torch
import transformers

from streamrl.config.engines import EngineConfig
from streamrl.engines.sglang.server import SglangServer
from tests.sglang.cpu import MAX_LEN, cpu_config
from tests.sglang.updates import Updates, ask, ask_many, replay
from tests.support import models


def experts(seed: int) -> transformers.PreTrainedModel:
    config = models.config("qwen3").to_dict() | {
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    }
    config = {key: value for key, value in config.items() if key not in ("model_type", "architectures", "layer_types")}
    torch.manual_seed(seed)
    model = transformers.Qwen3MoeForCausalLM._from_config(transformers.Qwen3MoeConfig(**config), attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def started(config: EngineConfig, model: transformers.PreTrainedModel, folder: Path, dtype: str) -> SglangServer:
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    server = SglangServer(config, folder, name="other", max_len=MAX_LEN, dtype=dtype)

    async def start() -> None:
        await server.start()
        await server.detach()

    asyncio.run(start())
    return server


@pytest.fixture(scope="module")
def two_ranks(sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    config = cpu_config(sglang_python, tensor_parallel=2)
    env = config.sglang.env | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    config = msgspec.structs.replace(config, sglang=msgspec.structs.replace(config.sglang, env=env))
    server = started(config, experts(0), tmp_path_factory.mktemp("experts"), "float32")
    yield server
    asyncio.run(server.stop())


@pytest_asyncio.fixture
async def experts_updates(two_ranks: SglangServer, epochs: Iterator[int], tmp_path: Path) -> AsyncIterator[Updates]:
    two_ranks.attach()
    updates = Updates(two_ranks, tmp_path, ranks=2, epoch=next(epochs))
    try:
        yield updates
    finally:
        await updates.host.close()
        await two_ranks.detach()


@pytest.mark.soak
async def test_two_ranks_flip_experts_before_the_same_forward_pass(experts_updates, two_ranks):
    one, other = experts(1), experts(2)
    await experts_updates.put(one)
    tasks = await ask_many(two_ranks, 8, 150)
    for model in (other, one, other):
        await asyncio.sleep(0.3)
        manifest, _ = await experts_updates.put(model)
        assert await experts_updates.host.served_digest(manifest) == (manifest.version, manifest.digest)
    answers = await asyncio.gather(*tasks)
    assert any(len(set(answer.stamps)) > 1 for answer in answers)
    for answer in answers:
        assert float(replay(experts_updates.models, answer, answer.stamps).max()) < 1e-5
    for done in experts_updates.host.commits:
        assert [one.committed for one in done] == [True, True]
        assert done[0].forward == done[1].forward
    hello = await experts_updates.host.hello()
    assert [(rank.rank, rank.size, rank.swap) for rank in hello] == [(0, 2, "flip"), (1, 2, "flip")]


@pytest.fixture(scope="module")
def copying(sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    config = cpu_config(sglang_python, swap="copy")
    server = started(config, models.build("qwen3-untied", 0), tmp_path_factory.mktemp("copying"), "bfloat16")
    yield server
    asyncio.run(server.stop())


@pytest_asyncio.fixture
async def copying_updates(copying: SglangServer, epochs: Iterator[int], tmp_path: Path) -> AsyncIterator[Updates]:
    copying.attach()
    updates = Updates(copying, tmp_path, epoch=next(epochs))
    try:
        yield updates
    finally:
        await updates.host.close()
        await copying.detach()


@pytest.mark.soak
async def test_bfloat16_weights_are_copied_into_place(copying_updates, copying):
    one, other = (models.build("qwen3-untied", seed).bfloat16() for seed in (1, 2))
    assert (await copying_updates.host.hello())[0].swap == "copy"
    alone = {}
    for model in (one, other):
        manifest, _ = await copying_updates.put(model)
        assert await copying_updates.host.served_digest(manifest) == (manifest.version, manifest.digest)
        alone[max(copying_updates.models)] = await ask(copying, [7, 8, 9], 20)
    assert len({answer.ids for answer in alone.values()}) == 2
    # Back to the first weights under load: what they say alone, they say again.
    tasks = await ask_many(copying, 8, 150)
    await asyncio.sleep(0.3)
    await copying_updates.put(one)
    answers = await asyncio.gather(*tasks)
    again = await ask(copying, [7, 8, 9], 20)
    assert (again.ids, again.logprobs) == (alone[min(alone)].ids, alone[min(alone)].logprobs)
    assert any(len(set(answer.stamps)) > 1 for answer in answers)
    for answer in answers:
        # Two implementations in bfloat16 differ by about 2^-8 of a logit; another version's weights by far more.
        difference = replay(copying_updates.models, answer, answer.stamps)
        assert float(difference.mean()) < 0.05
        wrong = [min(copying_updates.models) + 1 if stamp != min(copying_updates.models) + 1 else stamp - 1 for stamp in answer.stamps]
        assert float(replay(copying_updates.models, answer, wrong).mean()) > 0.5
