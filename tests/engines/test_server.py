"""The HTTP subset as it is on the wire: SGLang's names and shapes, batches, streams, errors. Engine: `table`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp.web_protocol import RequestHandler

from streamrl.config.tree import EngineConfig
from streamrl.engines.batching.delays import TokenDelay
from streamrl.engines.server import EngineServer, serve
from streamrl.engines.table.engine import TableEngine
from streamrl.schemas.versions import Version
from tests.support.models import started
from tests.support.publishing import Published, load, publish


def table(number: int) -> Published:
    logits = np.random.default_rng(number).normal(size=(3, 16, 16)).astype(np.float32)
    return publish({"logits": logits}, Version(0, number))


@pytest.fixture
async def bare(tmp_path: Path) -> AsyncIterator[TableEngine]:
    (tmp_path / "table.json").write_text('{"vocab": 16, "max_position": 3, "eos": 1}')
    delay = TokenDelay(mean_s=0.0005, sigma=0.0)
    async with started(TableEngine(tmp_path, EngineConfig(slots=4), engine_id="e-0", policy="actor", delay=delay)) as engine:
        yield engine


@pytest.fixture
async def server(bare: TableEngine) -> AsyncIterator[EngineServer]:
    server = await serve(bare)
    yield server
    await server.stop()


class Client:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def post(self, path: str, body: Any, status: int = 200) -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(path, data=data) as response:
            text = await response.text()
            assert response.status == status, text
            return json.loads(text)

    async def get(self, path: str, status: int = 200) -> Any:
        async with self.session.get(path) as response:
            text = await response.text()
            assert response.status == status, text
            return json.loads(text)

    async def events(self, body: Any) -> list[Any]:
        async with self.session.post("/generate", json=body) as response:
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.fixture
async def client(server: EngineServer) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(server.address) as session:
        yield Client(session)


@pytest.fixture
async def served(client: Client, bare: TableEngine) -> Client:
    await load(bare, table(3))
    return client


PARAMS = {"max_new_tokens": 4, "ignore_eos": True, "sampling_seed": 5}


async def test_one_prompt_gives_one_object_with_sglangs_names(served: Client):
    body = {"input_ids": [3, 4], "sampling_params": PARAMS, "return_logprob": True, "rid": "mine"}
    result = await served.post("/generate", body)
    ids, meta = result["output_ids"], result["meta_info"]
    assert len(ids) == 4
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (2, 4)
    assert [row[1:] for row in meta["output_token_logprobs"]] == [[token, None] for token in ids]
    assert all(row[0] < 0 for row in meta["output_token_logprobs"])
    assert meta["weight_version"] == "0.3"
    assert meta["weight_versions"] == [{"version": "0.3", "start": 0, "end": 4}]
    again = await served.post("/generate", body | {"rid": "mine"})
    assert again["output_ids"] == ids
    plain = await served.post("/generate", {"input_ids": [3, 4], "sampling_params": PARAMS | {"stop_token_ids": [ids[1]]}})
    assert "output_token_logprobs" not in plain["meta_info"], "log-probs are given when asked for"
    assert plain["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[1]}


async def test_a_batch_gives_a_list_in_its_order(served: Client):
    params = [PARAMS | {"sampling_seed": seed, "max_new_tokens": 2 + seed % 3} for seed in range(6)]
    prompts = [[3], [3], [4, 5], [3], [6], [6]]
    results = await served.post("/generate", {"input_ids": prompts, "sampling_params": params, "rid": [f"q{k}" for k in range(6)]})
    assert [result["meta_info"]["id"] for result in results] == [f"q{k}" for k in range(6)]
    assert [len(result["output_ids"]) for result in results] == [2, 3, 4, 2, 3, 4]
    assert [result["meta_info"]["prompt_tokens"] for result in results] == [1, 1, 2, 1, 1, 1]
    for prompt, one, result in zip(prompts, params, results, strict=True):
        alone = await served.post("/generate", {"input_ids": prompt, "sampling_params": one})
        assert alone["output_ids"] == result["output_ids"]
    (single,) = await served.post("/generate", {"input_ids": [[3]], "sampling_params": PARAMS})
    assert len(single["output_ids"]) == 4
    several = await served.post("/generate", {"input_ids": [3], "sampling_params": PARAMS | {"n": 3, "max_new_tokens": 12}, "rid": "x"})
    assert [result["meta_info"]["id"] for result in several] == ["x.0", "x.1", "x.2"]
    assert len({tuple(result["output_ids"]) for result in several}) == 3
    params = {"max_new_tokens": 30, "ignore_eos": True}
    first, second = [await served.post("/generate", {"input_ids": [3], "sampling_params": params}) for _ in range(2)]
    assert first["output_ids"] != second["output_ids"], "without a seed every request is another draw"


async def test_a_stream_repeats_all_tokens_so_far_as_sglang_does(served: Client):
    whole = await served.post("/generate", {"input_ids": [3], "sampling_params": PARAMS, "return_logprob": True})
    events = await served.events({"input_ids": [3], "sampling_params": PARAMS, "return_logprob": True, "stream": True})
    assert [event["output_ids"] for event in events] == [whole["output_ids"][: k + 1] for k in range(4)]
    assert [event["meta_info"].get("finish_reason") for event in events] == [None] * 3 + [{"type": "length", "length": 4}]
    assert events[-1]["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"]


async def test_an_incremental_stream_of_a_batch_says_whose_tokens_it_brings(served: Client):
    body = {"input_ids": [[3], [4]], "sampling_params": PARAMS, "stream": True, "incremental": True}
    whole = await served.post("/generate", body | {"stream": False, "incremental": False})
    got: list[list[int]] = [[], []]
    for event in await served.events(body):
        assert len(event["output_ids"]) == 1
        got[event.get("index", 0)] += event["output_ids"]
    assert got == [result["output_ids"] for result in whole]


BAD: list[tuple[Any, str]] = [
    (b"{", "expected a /generate body"),
    ({"sampling_params": {}}, "input_ids"),
    ({"input_ids": "text"}, "expected a /generate body"),
    ({"input_ids": []}, "at least one prompt token"),
    ({"input_ids": [[1], []]}, "at least one prompt token"),
    ({"input_ids": [16]}, "0 .. 15, got 16"),
    ({"input_ids": [3], "text": "hello"}, "text"),
    ({"input_ids": [3], "sampling_params": {"min_p": 1.5}}, "min_p"),
    ({"input_ids": [3], "sampling_params": {"ebnf": "x"}}, "ebnf"),
    ({"input_ids": [3], "sampling_params": {"logit_bias": {"99": 1}}}, "got 99"),
    ({"input_ids": [3], "sampling_params": {"stop": [3]}}, "stop"),
    ({"input_ids": [3], "sampling_params": {"regex": "a"}}, "knows no grammars"),
    ({"input_ids": [3], "sampling_params": {"presence_penalty": 3}}, "presence_penalty"),
    ({"input_ids": [3], "sampling_params": {"temperature": -1}}, "temperature"),
    ({"input_ids": [3], "sampling_params": {"n": 0}}, "n in 1"),
    ({"input_ids": [[3], [4]], "sampling_params": [{}]}, "for 2 prompts, got 1"),
    ({"input_ids": [[3], [4]], "rid": ["a", "a"]}, "different rids"),
    ({"input_ids": [3], "policy": "critic"}, "'critic'"),
    ({"input_ids": [3], "stream": True, "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
    ({"input_ids": [99], "stream": True}, "got 99"),
]


async def test_bad_bodies_are_refused_as_json_with_status_400(served: Client):
    for body, says in BAD:
        answer = await served.post("/generate", body, status=400)
        assert says in answer["error"]["message"], body
        assert set(answer["error"]) == {"message", "hint"}
    for path in ("/generate", "/abort_request"):
        for shape in ("[", '{"input_ids":'):
            answer = await served.post(path, (shape * 50_000).encode(), status=400)
            assert answer["error"]["message"], "JSON that is nested without end"


async def test_a_running_rid_is_refused_and_an_abort_by_rid_ends_it(served: Client, bare: TableEngine):
    body = {"input_ids": [[3], [3]], "rid": ["long.0", "long.1"], "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}
    running = asyncio.ensure_future(served.post("/generate", body))
    async with asyncio.timeout(30):
        while (await served.get("/server_info"))["running"] != 2:
            await asyncio.sleep(0.005)
    refused = await served.post("/generate", {"input_ids": [3], "rid": "long.1"}, status=400)
    assert "running" in refused["error"]["message"]
    await served.post("/abort_request", {"rid": "long"})
    results = await running
    assert [result["meta_info"]["finish_reason"]["type"] for result in results] == ["abort", "abort"]
    assert all(0 < len(result["output_ids"]) < 3000 for result in results)
    await served.post("/abort_request", {"rid": 5}, status=400)
    await served.post("/abort_request", b"nonsense", status=400)


async def test_health_and_info(client: Client, bare: TableEngine):
    await client.get("/health")
    refused = await client.get("/health_generate", status=503)
    assert "no weights" in refused["error"]["message"]
    assert (await client.get("/get_model_info"))["weight_version"] is None
    await load(bare, table(3))
    await client.get("/health_generate")
    info = await client.get("/get_server_info")
    assert (info["engine"], info["policy"], info["serving"], info["slots"]) == ("e-0", "actor", "0.3", 4)
    model = await client.get("/get_model_info")
    assert model == {"model_path": "actor", "is_generation": True, "weight_version": "0.3"}
    await bare.stop()
    await client.get("/health", status=503)
    await client.post("/generate", {"input_ids": [3]}, status=503)


SENT = [b"", b"GET /health HTTP/1.1\r\nHost:", b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"]


async def test_a_connection_that_brings_no_whole_request_is_closed(bare: TableEngine, monkeypatch: pytest.MonkeyPatch):
    defaults = RequestHandler.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "lingering_time", 0.1)
    server = await serve(bare, silence_s=0.5)

    async def answer_to(sent: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.address.rsplit(":", 1)[1]))
        writer.write(sent)
        async with asyncio.timeout(60):
            answer = await reader.read()
        writer.close()
        return answer

    try:
        for answer in await asyncio.gather(*map(answer_to, SENT)):
            assert not answer or b" 408 " in answer.splitlines()[0]
    finally:
        await server.stop()


async def test_a_connection_that_has_asked_may_stay_silent(bare: TableEngine):
    server = await serve(bare, silence_s=0.2)
    try:
        async with aiohttp.ClientSession(server.address, connector=aiohttp.TCPConnector(limit=1)) as session:
            for _ in range(2):
                async with session.get("/health") as response:
                    assert response.status == 200
                connections = set(session.connector._conns) if session.connector else set()  # pyright: ignore[reportPrivateUsage]
                assert connections
                await asyncio.sleep(0.4)
    finally:
        await server.stop()
