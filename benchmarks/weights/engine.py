"""One SGLang server, started and given weights by the product's own code, and asked what only a benchmark wants to know."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.weights.records import Forwards, UpdateRecord
from streamrl.config.engines import EngineConfig
from streamrl.engines.live_swap.control import RankClient, commit_body
from streamrl.engines.live_swap.messages import Committed, Forward, Pace, Rank, Staged
from streamrl.engines.sglang.client import SglangClient
from streamrl.engines.sglang.host import ServerHost
from streamrl.engines.sglang.server import SglangServer
from streamrl.errors import EngineError
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from streamrl.weights.protocol import CudaSource, FileSource

_CONTROL_S = 60.0


class BenchEngine:
    """A server with its weight host; made by `started`."""

    def __init__(self, server: SglangServer, ranks: Sequence[Rank], *, max_gap_ms: float) -> None:
        self._server = server
        self.ranks = ranks
        self.tensor_parallel = len(ranks)
        self.device = torch.device(ranks[0].device)
        """Of the first rank."""
        self._copy = False
        self._pace = Pace(max_gap_ms=max_gap_ms)
        self._host = ServerHost(str(server.directory), len(ranks), self._send_commit)
        self._channels = [RankClient(str(server.directory), rank) for rank in range(len(ranks))]
        self._recorded: list[list[Forward]] = [[] for _ in ranks]
        self._asked = 0

    @staticmethod
    @asynccontextmanager
    async def started(
        config: EngineConfig, model_dir: Path, *, max_len: int, dtype: str, max_gap_ms: float, log_path: Path
    ) -> AsyncGenerator[BenchEngine]:
        """Start a server; it is stopped when the context is left.

        Raises:
            EngineError: it did not start, or the plugin in it cannot swap as it was told.
        """
        server = SglangServer(config, model_dir, name="bench", max_len=max_len, dtype=dtype, log_path=log_path)
        try:
            await server.start()
            first = RankClient(str(server.directory), 0)
            ranks = [await first.hello()]
            await first.close()
            for rank in range(1, ranks[0].size):
                other = RankClient(str(server.directory), rank)
                ranks.append(await other.hello())
                await other.close()
            for rank in ranks:
                if rank.swap != config.sglang.swap:
                    raise EngineError(f"rank {rank.rank}: expected it to swap by {config.sglang.swap}, got {rank.swap}: {rank.why}")
            engine = BenchEngine(server, ranks, max_gap_ms=max_gap_ms)
            try:
                yield engine
            finally:
                await engine.close()
        finally:
            await server.stop()

    @property
    def client(self) -> SglangClient:
        """HTTP with the server."""
        return self._server.client

    @property
    def key(self) -> str:
        """The server's api key, for the load process."""
        return self._server.key

    @property
    def sglang(self) -> str:
        """SGLang's version."""
        return self.ranks[0].sglang

    @property
    def start_s(self) -> float:
        """Seconds until the server answered."""
        return self._server.start_s

    async def close(self) -> None:
        """Let go of the plugin."""
        await self._host.close()
        for channel in self._channels:
            await channel.close()

    def check(self) -> None:
        """Raise EngineError when the server has died."""
        if not self._server.running:
            raise EngineError("the server died during the benchmark", hint="the end of server.log says why")

    async def stage(self, manifest: Manifest, source: FileSource | CudaSource, *, paced: bool) -> tuple[Staged, ...]:
        """Bring a version into every rank's idle buffer and compare its digest; see `ServerHost.stage_timed`."""
        self._host.pace = self._pace if paced else Pace()
        return (await self._host.stage_timed(manifest, source)).ranks

    async def commit(self, version: Version, *, copy: bool) -> tuple[Committed, ...]:
        """Serve it; what every rank did. With `copy` it is copied over the served buffer instead of flipping to the idle one."""
        self._copy = copy
        await self._host.commit(version)
        return self._host.commits[-1]

    async def served_digest(self, manifest: Manifest) -> str:
        """Digest of what is served, from all ranks' memory. Raises WeightSyncError when it is not the manifest's."""
        _, digest = await self._host.served_digest(manifest)
        return digest

    async def with_device_times(self, records: Sequence[UpdateRecord]) -> list[UpdateRecord]:
        """The records with the time that each rank's copy took on its device, which is known only once it is over."""
        logs = [await channel.commits() for channel in self._channels]
        taken = {
            str(done.version): [
                one.device_ms for log in logs for one in log.commits if one.version == done.version and one.device_ms is not None
            ]
            for done in logs[0].commits
        }
        return [msgspec.structs.replace(record, device_ms=taken.get(record.version, [])) for record in records]

    async def greedy(self, num_tokens: int) -> list[int]:
        """Tokens of highest probability after a fixed prompt, whose keys and values come from no cache."""
        self._asked += 1
        body: dict[str, Any] = {
            "input_ids": list(range(10, 40)),
            "sampling_params": {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True},
            "extra_key": f"greedy-{self._asked}",
        }
        return (await self.client.generate(body)).output_ids

    async def fetch_forwards(self) -> None:
        """Take the recorded forward passes of every rank."""
        for recorded, channel in zip(self._recorded, self._channels, strict=True):
            recorded.extend((await channel.forwards()).forwards)

    @property
    def forwards(self) -> list[Forwards]:
        """What was fetched, by rank."""
        return [_columns(recorded) for recorded in self._recorded]

    async def _send_commit(self, version: Version) -> None:
        body = commit_body(version, copy=self._copy)
        await self.client.post("/set_internal_state", body, timeout_s=_CONTROL_S, expect=object)


def _columns(forwards: Sequence[Forward]) -> Forwards:
    return Forwards(
        host_s=np.array([one.launched_s for one in forwards], np.float64),
        gpu_ms=np.array([one.done_ms for one in forwards], np.float64),
        rows=np.array([one.batch for one in forwards], np.int64),
        extend=np.array([one.extend for one in forwards], np.bool_),
        version=np.array([one.version for one in forwards], np.int64),
    )
