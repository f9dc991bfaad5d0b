"""The load: lanes that each keep one request decoding, in a process of their own: `python -m benchmarks.weights.load SPEC.json`.

Most lanes take their tokens in one answer at the end; `probes` of them stream, for the gaps that a client sees. (SGLang's HTTP
front end needs tens of milliseconds a step for a hundred streams, so that streaming all of them would hide what is measured.)
Runs until its standard input is closed, then writes what it saw. Needs no torch.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from benchmarks.processes import child
from benchmarks.raw import append
from benchmarks.weights.records import RequestRecord, Tokens
from streamrl.engines.sglang.client import SglangClient
from streamrl.engines.wire import MetaInfo
from streamrl.errors import EngineError, LaunchError

_RETRY_S = 0.2
_STOP_S = 60.0


class LoadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the load process is told."""

    address: str
    key: str
    streams: int
    probes: int
    mean_tokens: int
    prompt_tokens: int
    vocab: int
    out: str
    """Directory of the raw file."""


def wanted_tokens(mean: int, lane: int, number: int) -> int:
    """How many tokens a lane's next request asks for: spread evenly over 0.4 to 1.6 times the mean.

    A lane's first request is cut short by a lane's own share, so that the lanes do not end in step.
    """
    spread = (lane * 97 + number * 61) % 101 / 100
    tokens = max(4, round(mean * (0.4 + 1.2 * spread)))
    return tokens if number else max(4, tokens * (1 + lane * 37 % 100) // 100)


class Load:
    """All lanes and what they saw."""

    def __init__(self, spec: LoadSpec, client: SglangClient) -> None:
        self._spec = spec
        self._client = client
        self.requests: list[RequestRecord] = []
        self.chunks: list[tuple[int, int, float, int]] = []

    async def run_lane(self, lane: int) -> None:
        """Request after request, until cancelled."""
        for number in itertools.count():
            asked = wanted_tokens(self._spec.mean_tokens, lane, number)
            start_s = time.monotonic()
            try:
                meta, versions = await self._ask(lane, number, asked)
                record = _record(meta, versions, lane=lane, start_s=start_s, asked=asked)
            except EngineError as failure:
                record = RequestRecord(
                    lane=lane,
                    start_s=start_s,
                    end_s=time.monotonic(),
                    asked=asked,
                    made=0,
                    finish="none",
                    retractions=0,
                    error=str(failure),
                )
                await asyncio.sleep(_RETRY_S)
            self.requests.append(record)

    async def _ask(self, lane: int, number: int, asked: int) -> tuple[MetaInfo, list[int]]:
        """The result's last part, and the version of every token."""
        prompt = [3 + (lane * 31 + number * 17 + i * 7) % (self._spec.vocab - 3) for i in range(self._spec.prompt_tokens)]
        body: dict[str, Any] = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": asked, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
        }
        if lane >= self._spec.probes:
            meta = (await self._client.generate(body)).meta_info
            return meta, list(meta.streamrl_versions or [])
        meta = MetaInfo()
        versions: list[int] = []
        async for part in self._client.stream({**body, "stream": True}):
            made = part.meta_info.completion_tokens
            self.chunks.append((lane, number, time.monotonic(), made - meta.completion_tokens))
            versions += part.meta_info.streamrl_versions or []
            meta = part.meta_info
        return meta, versions


def _record(meta: MetaInfo, versions: Sequence[int], *, lane: int, start_s: float, asked: int) -> RequestRecord:
    return RequestRecord(
        lane=lane,
        start_s=start_s,
        end_s=time.monotonic(),
        asked=asked,
        made=meta.completion_tokens,
        finish=str((meta.finish_reason or {}).get("type", "none")),
        retractions=meta.num_retractions,
        versions=version_runs(versions),
    )


def version_runs(versions: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of equal neighbours as (value, length)."""
    return [(int(value), len(list(run))) for value, run in itertools.groupby(versions)]


class LoadProcess:
    """Runs this module from entering to leaving the context; it has written its records when that is left without an error."""

    def __init__(self, spec: LoadSpec) -> None:
        self._spec = spec
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> LoadProcess:
        path = Path(self._spec.out) / "load.json"
        path.write_bytes(msgspec.json.encode(self._spec))
        command = child("benchmarks.weights.load", path)
        self._process = await asyncio.create_subprocess_exec(*command["args"], env=command["env"], stdin=asyncio.subprocess.PIPE)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        process = self._process
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_S):
                code = await process.wait()
        except TimeoutError:
            process.kill()
            code = await process.wait()
        (Path(self._spec.out) / "load.json").unlink(missing_ok=True)
        if code and kind is None:
            raise LaunchError(f"the load process: expected exit code 0, got {code}", hint="its error stands above")

    def check(self) -> None:
        """Raise LaunchError when the process has ended."""
        code = None if self._process is None else self._process.returncode
        if code is not None:
            raise LaunchError(f"the load process ended with exit code {code} while it was needed", hint="its error stands above")


async def _serve(spec: LoadSpec) -> Load:
    client = SglangClient(spec.address, spec.key, name="bench")
    load = Load(spec, client)
    lanes = [asyncio.create_task(load.run_lane(lane)) for lane in range(spec.streams)]
    closed = asyncio.create_task(asyncio.to_thread(sys.stdin.buffer.read))
    done, _ = await asyncio.wait([closed, *lanes], return_when=asyncio.FIRST_COMPLETED)
    for lane in lanes:
        lane.cancel()
    await asyncio.gather(*lanes, return_exceptions=True)
    await client.close()
    for task in done - {closed}:
        task.result()
    return load


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load of the specification file that the one argument names."""
    (path,) = sys.argv[1:] if argv is None else argv
    spec = msgspec.json.decode(Path(path).read_bytes(), type=LoadSpec)
    load = asyncio.run(_serve(spec))
    lane, request, at_s, count = np.array(load.chunks, np.float64).reshape(-1, 4).T
    tokens = Tokens(lane=lane.astype(np.int64), request=request.astype(np.int64), at_s=at_s, count=count.astype(np.int64))
    append(Path(spec.out), [*load.requests, tokens])
    return 0


if __name__ == "__main__":
    sys.exit(main())
