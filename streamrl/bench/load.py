"""The load: lanes that each keep one request decoding, in a process of their own: `python -m streamrl.bench.load SPEC.json`.

Most lanes take their tokens in one answer at the end; `probes` of them stream, for the gaps that a client sees. (SGLang's HTTP
front end needs tens of milliseconds a step for a hundred streams, so that streaming all of them would hide what is measured.)
Runs until its standard input is closed, then writes what it saw. Needs no torch.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from streamrl.bench.raw import write_requests, write_tokens
from streamrl.bench.records import RequestRecord

_RETRY_S = 0.2
_READ_BYTES = 1 << 24
"""A streamed line of a long answer is longer than aiohttp expects."""


class LoadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the load process is told."""

    url: str
    streams: int
    probes: int
    mean_tokens: int
    prompt_tokens: int
    vocab: int
    out: str
    """Directory for `requests.jsonl` and `tokens.npz`."""


def wanted_tokens(mean: int, lane: int, number: int) -> int:
    """How many tokens a lane's next request asks for: spread evenly over 0.4 to 1.6 times the mean.

    A lane's first request is cut short by a lane's own share, so that the lanes do not end in step.
    """
    spread = (lane * 97 + number * 61) % 101 / 100
    tokens = max(4, round(mean * (0.4 + 1.2 * spread)))
    return tokens if number else max(4, tokens * (1 + lane * 37 % 100) // 100)


class Load:
    """All lanes and what they saw."""

    def __init__(self, spec: LoadSpec, session: aiohttp.ClientSession) -> None:
        self._spec = spec
        self._session = session
        self.requests: list[RequestRecord] = []
        self.chunks: list[tuple[int, int, float, int]] = []

    async def run_lane(self, lane: int) -> None:
        """Request after request, until cancelled."""
        for number in itertools.count():
            asked = wanted_tokens(self._spec.mean_tokens, lane, number)
            start_s = time.monotonic()
            meta: dict[str, Any] = {}
            error = ""
            try:
                meta = await self._ask(lane, number, asked)
            except (aiohttp.ClientError, json.JSONDecodeError) as failure:
                error = repr(failure)
                await asyncio.sleep(_RETRY_S)
            self.requests.append(_record(meta, lane=lane, start_s=start_s, asked=asked, error=error))

    async def _ask(self, lane: int, number: int, asked: int) -> dict[str, Any]:
        prompt = [3 + (lane * 31 + number * 17 + i * 7) % (self._spec.vocab - 3) for i in range(self._spec.prompt_tokens)]
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": asked, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
            "stream": lane < self._spec.probes,
        }
        async with self._session.post(f"{self._spec.url}/generate", json=body) as response:
            response.raise_for_status()
            if not body["stream"]:
                return (await response.json())["meta_info"]
            return await self._read_stream(response, lane, number)

    async def _read_stream(self, response: aiohttp.ClientResponse, lane: int, number: int) -> dict[str, Any]:
        meta: dict[str, Any] = {}
        seen = 0
        versions: list[int] = []
        async for line in response.content:
            if not line.startswith(b"data:") or b"[DONE]" in line:
                continue
            at_s = time.monotonic()
            meta = json.loads(line[5:])["meta_info"]
            made = int(meta["completion_tokens"])
            self.chunks.append((lane, number, at_s, made - seen))
            stamped = meta.get("streamrl_versions") or []
            # With incremental output a chunk carries the versions of its own tokens, otherwise those of all tokens so far.
            versions = list(stamped) if len(stamped) == made else versions + list(stamped)
            seen = made
        return {**meta, "streamrl_versions": versions}


def _record(meta: dict[str, Any], *, lane: int, start_s: float, asked: int, error: str) -> RequestRecord:
    finish = meta.get("finish_reason") or {}
    return RequestRecord(
        lane=lane,
        start_s=start_s,
        end_s=time.monotonic(),
        asked=asked,
        made=int(meta.get("completion_tokens", 0)),
        finish=str(finish.get("type", "none")),
        retractions=int(meta.get("num_retractions") or 0),
        versions=version_runs(meta.get("streamrl_versions") or []),
        error=error,
    )


def version_runs(versions: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of equal neighbours as (value, length)."""
    return [(int(value), len(list(run))) for value, run in itertools.groupby(versions)]


async def _serve(spec: LoadSpec) -> Load:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=_READ_BYTES) as session:
        load = Load(spec, session)
        lanes = [asyncio.create_task(load.run_lane(lane)) for lane in range(spec.streams)]
        closed = asyncio.create_task(asyncio.to_thread(sys.stdin.buffer.read))
        done, _ = await asyncio.wait([closed, *lanes], return_when=asyncio.FIRST_COMPLETED)
        for lane in lanes:
            lane.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
        for task in done - {closed}:
            task.result()
        return load


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load of the specification file that the one argument names."""
    (path,) = sys.argv[1:] if argv is None else argv
    spec = msgspec.json.decode(Path(path).read_bytes(), type=LoadSpec)
    load = asyncio.run(_serve(spec))
    out = Path(spec.out)
    write_requests(out, load.requests)
    write_tokens(out, load.chunks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
