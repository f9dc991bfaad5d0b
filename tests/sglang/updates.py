"""Versions for a real SGLang under test, and what transformers says about the tokens that it made of them."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel

from streamrl.engines.live_swap.control import commit_body
from streamrl.engines.live_swap.messages import VERSIONS_KEY, Pace
from streamrl.engines.sglang.host import ServerHost
from streamrl.engines.sglang.server import SglangServer
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from streamrl.weights import manifest as manifests
from streamrl.weights.protocol import Commit, FileSource, Shard


class Image(msgspec.Struct, frozen=True):
    """A version's bytes as a file."""

    manifest: Manifest
    source: FileSource


def image(model: PreTrainedModel, version: Version, folder: Path, *, also: Mapping[str, torch.Tensor] | None = None) -> Image:
    named = dict(model.named_parameters()) | dict(also or {})
    shards = [
        Shard(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            global_shape=tuple(tensor.shape),
            shape=tuple(tensor.shape),
            data=tensor.detach().contiguous().view(-1).view(torch.uint8).numpy(),
        )
        for name, tensor in named.items()
    ]
    content = manifests.Content(iter(shards))
    data = np.zeros(content.nbytes, np.uint8)
    content.fill(0, data)
    path = folder / f"{version}.image"
    data.tofile(path)
    return Image(manifests.build(content, run="r", policy="policy", version=version, parts=(), transport="shm"), FileSource(str(path)))


class Updates:
    """Stages and commits versions of a server, which are remembered for replays.

    Args:
        server: that runs.
        folder: for the images.
        ranks: of the server.
        epoch: of all versions: their numbers count from 1.
    """

    def __init__(self, server: SglangServer, folder: Path, *, ranks: int = 1, epoch: int = 0, pace: Pace | None = None) -> None:
        self.server = server
        self._folder = folder
        self._epoch = epoch
        self._number = 0
        self.models: dict[int, PreTrainedModel] = {}
        """By stamp."""
        self.host = ServerHost(str(server.directory), ranks, self.commit_unseen, pace=pace)

    async def commit_unseen(self, version: Version) -> None:
        """Ask the server itself, past the host that keeps the books."""
        await self.server.client.command("/set_internal_state", commit_body(version), timeout_s=60.0)

    def next(self, model: PreTrainedModel, **named: Any) -> Image:
        self._number += 1
        version = Version(self._epoch, self._number)
        self.models[(version.epoch << 32) | version.number] = model
        return image(model, version, self._folder, **named)

    async def put(self, model: PreTrainedModel) -> tuple[Manifest, Commit]:
        one = self.next(model)
        assert await self.host.stage_from(one.manifest, one.source) == one.manifest.digest
        done = await self.host.commit(one.manifest.version)
        assert done.committed
        return one.manifest, done


class Answer(msgspec.Struct, frozen=True):
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stamps: tuple[int, ...]
    meta: dict[str, Any]


async def ask(server: SglangServer, prompt: Sequence[int], tokens: int, **more: Any) -> Answer:
    """One greedy answer of exactly `tokens` tokens; from the prefix cache it takes only what requests with its `extra_key` left there."""
    more.setdefault("extra_key", secrets.token_hex(8))
    sampling = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True, **more}
    meta = (await server.client.post("/generate", body, timeout_s=120.0, expect=dict[str, Any]))["meta_info"]
    rows = meta["output_token_logprobs"]
    assert meta["finish_reason"]["type"] == "length"
    assert len(rows) == len(meta[VERSIONS_KEY]) == tokens
    return Answer(tuple(prompt), tuple(row[1] for row in rows), tuple(row[0] for row in rows), tuple(meta[VERSIONS_KEY]), meta)


async def ask_many(server: SglangServer, count: int, tokens: int) -> list[asyncio.Task[Answer]]:
    """`count` requests under way at once."""
    tasks = [asyncio.create_task(ask(server, [3 + i, 40 - i, 7, 9, 11, 20 + i, 30], tokens)) for i in range(count)]
    await asyncio.sleep(0)
    return tasks


@torch.no_grad()
def replay(
    models: Mapping[int, PreTrainedModel], answer: Answer, stamps: Sequence[int], *, reused: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """|log-prob differences| [tokens] to a forward pass for each token by the model that its stamp names; keys and values stay.

    `reused`: so many tokens of the prompt were processed by the model of that stamp, long before.
    """
    past = None
    done = 0
    if reused[0]:
        done = reused[0]
        past = models[reused[1]](torch.tensor([answer.prompt[:done]]), use_cache=True).past_key_values
    found = []
    begin = 0
    for stamp, group in itertools.groupby(stamps):
        # Passes of one version in a row are one pass over several tokens.
        end = begin + len(list(group))
        fed = [*(answer.prompt[done:] if begin == 0 else answer.ids[begin - 1 : begin]), *answer.ids[begin : end - 1]]
        output = models[stamp](torch.tensor([fed]), past_key_values=past, use_cache=True)
        past = output.past_key_values
        logprobs = output.logits[0, begin - end :].float().log_softmax(-1)
        found.append(logprobs[torch.arange(end - begin), torch.tensor(answer.ids[begin:end])])
        begin = end
    return (torch.cat(found) - torch.tensor(answer.logprobs)).abs()
