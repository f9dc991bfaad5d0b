"""CPU time of an engine worker in front of SGLang, a token: `python scripts/engine_worker_cpu.py [--streams 128] [--tokens 256] ...`.

Three processes: a stub that streams tokens as SGLang 0.5.23 does (server-sent events with log-probs and the plugin's versions, one event
a token and stream, all streams in one beat), the worker's data path (our server, `SglangEngine`'s jobs, its client), and a producer that
keeps `--streams` completions open. Measured is the second one: user and system time between its first and last whole round of groups.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from aiohttp import web

from streamrl.config.tree import EngineConfig
from streamrl.engines.channel import ChannelEngine
from streamrl.engines.http import HttpEngine
from streamrl.engines.protocol import GenerateRequest
from streamrl.engines.server import serve
from streamrl.engines.sglang.answers import Style
from streamrl.engines.sglang.client import SglangClient
from streamrl.engines.sglang.engine import SglangEngine
from streamrl.producers.completions import complete
from streamrl.runtime.collection import collect_rarely, keep_all
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version

GROUP = 8
PROMPT = tuple(range(1, 513))


def _listening(runner: web.AppRunner) -> None:
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)


async def stub(beat_s: float) -> None:
    """SGLang's half of `POST /generate`: an event a beat, or one answer after as many beats as it has tokens."""
    waiting: list[asyncio.Future[None]] = []

    async def beats() -> None:
        while True:
            await asyncio.sleep(beat_s)
            for future in waiting:
                if not future.done():
                    future.set_result(None)
            waiting.clear()

    def result(rid: str, start: int, end: int, last: int) -> bytes:
        ids = [7 + at % 1000 for at in range(start, end)]
        meta = {
            "id": rid,
            "finish_reason": {"type": "length", "length": last} if end == last else None,
            "prompt_tokens": len(PROMPT),
            "weight_version": "default",
            "total_retractions": 0,
            "output_token_logprobs": [[-0.6931471824645996, token, None] for token in ids],
            "streamrl_versions": [17] * len(ids),
            "completion_tokens": end,
            "cached_tokens": 0,
            "e2e_latency": 1.2345678,
        }
        return json.dumps({"text": "", "output_ids": ids, "meta_info": meta}).encode()

    async def generate(request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        last, rid = body["sampling_params"]["max_new_tokens"], body["rid"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream" if body["stream"] else "application/json"})
        await response.prepare(request)
        for at in range(last):
            future = asyncio.get_running_loop().create_future()
            waiting.append(future)
            await future
            if body["stream"]:
                await response.write(b"data: " + result(rid, at, at + 1, last) + b"\n\n")
        await response.write(b"data: [DONE]\n\n" if body["stream"] else result(rid, 0, last, last))
        await response.write_eof()
        return response

    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    _listening(runner)
    await beats()


class _Server:
    """The part of `SglangServer` that an answered request needs."""

    load: dict[str, float] = {}  # noqa: RUF012

    def __init__(self, address: str) -> None:
        self.client = SglangClient(address, "key", name="e")


class _Fronting(SglangEngine):
    """The engine as it is once its server runs and serves a version."""

    async def start(self) -> None:
        self._style = Style(engine=self.engine_id, seeded=True, isolate=True)
        self._ended, self._serving = None, Version(0, 17)


def _engine(address: str) -> _Fronting:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text('{"vocab_size": 2000}')
        config = EngineConfig(kind="sglang", slots=128)
        behind: Any = _Server(address)
        return _Fronting(config, Path(directory), behind, engine_id="e", policy="policy", max_len=1 << 16, owned=False)


async def worker(address: str) -> None:
    """The engine worker's half, for as long as it is asked for its CPU time."""
    collect_rarely()
    engine = _engine(address)
    await engine.start()
    server = await serve(engine)
    keep_all()
    print(server.address, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(time.process_time(), flush=True)


async def measure(address: str, cpu: Any, *, streams: int, tokens: int, rounds: int, answers: str, hop: str) -> dict[str, Any]:
    """Tokens and the worker's CPU time over `rounds` rounds of all groups, the first one left out."""
    engine = ChannelEngine(address) if hop == "channel" else HttpEngine(address)
    # A stop token beside ignore_eos makes the worker stream from SGLang, to cut there: the producer gets whole answers all the same.
    cut = {"ignore_eos": True, "stop_token_ids": (1999,)} if answers == "streamed to the worker" else {}
    sampling = Sampling(max_new_tokens=tokens, **cut)
    stream = answers == "streamed"

    async def group(number: int, round_: int) -> int:
        request = GenerateRequest(
            request_id=f"{answers}-{hop}-{round_}-{number}", prompt_ids=PROMPT, sampling=sampling, seeds=range(GROUP), stream=stream
        )
        return sum(len(one.token_ids) for one in await complete(engine, request))

    made, began_cpu, began_s = 0, 0.0, 0.0
    for round_ in range(rounds + 1):
        if round_ == 1:
            made, began_cpu, began_s = 0, cpu(), time.perf_counter()
        made += sum(await asyncio.gather(*(group(number, round_) for number in range(streams // GROUP))))
    used, seconds = cpu() - began_cpu, time.perf_counter() - began_s
    await engine.close()
    return {
        "producer_asks_over": hop,
        "answers": answers,
        "streams": streams,
        "tokens_per_s": round(made / seconds),
        "cpu_us_a_token": round(1e6 * used / made, 1),
        "cores": round(used / seconds, 2),
    }


async def main() -> None:
    """Start the other two and be the producer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beat-ms", type=float, default=50.0)
    parser.add_argument("--half", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.half:
        return await (stub(given.beat_ms / 1e3) if given.half[0] == "stub" else worker(given.half[1]))

    def start(*half: str) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, __file__, "--beat-ms", str(given.beat_ms), "--half", *half]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        return child, child.stdout.readline().strip()

    fake, behind = start("stub")
    ours, address = start("worker", behind)

    def cpu() -> float:
        assert ours.stdin is not None and ours.stdout is not None
        ours.stdin.write("cpu\n")
        ours.stdin.flush()
        return float(ours.stdout.readline())

    try:
        for answers in ("streamed", "streamed to the worker", "whole"):
            for hop in ("channel", "http"):
                sizes = {"streams": given.streams, "tokens": given.tokens, "rounds": given.rounds}
                print(json.dumps(await measure(address, cpu, **sizes, answers=answers, hop=hop)), flush=True)
    finally:
        for child in (ours, fake):
            child.kill()
            child.wait()


if __name__ == "__main__":
    asyncio.run(main())
