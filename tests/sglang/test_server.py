"""The server process: what is said when it does not start, that it dies with its worker, and what happens when it dies."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from streamrl.config.engines import EngineConfig
from streamrl.config.recording import Recording
from streamrl.data.characters import write_tokenizer
from streamrl.engines.protocol import GenerateRequest
from streamrl.engines.sglang.engine import SglangEngine
from streamrl.engines.sglang.server import FOLDER, SglangServer, remove_left_behind
from streamrl.engines.texts import Texts
from streamrl.errors import EngineError
from streamrl.schemas.samples import LogprobMode
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from tests.sglang.conftest import engine_over
from tests.sglang.cpu import MAX_LEN, ROOT, SLOTS, cpu_config, write_model
from tests.support import models
from tests.support.models import ask, build
from tests.support.processes import command_of, group_of
from tests.support.publishing import load, publish

pytestmark = pytest.mark.process

PROMPT = (5, 9, 11, 7)


def server_of(config: EngineConfig, folder: Path) -> SglangServer:
    return SglangServer(config, write_model("qwen3", folder / "model"), name="e", max_len=MAX_LEN, dtype="float32")


@pytest.mark.parametrize(
    ("python", "hint"),
    [(sys.executable, "SGLang is not installed there"), ("/no/such/python", "make an environment with SGLang")],
)
async def test_an_interpreter_without_sglang_is_named_with_a_hint(tmp_path: Path, python: str, hint: str):
    server = server_of(cpu_config(python), tmp_path)
    with pytest.raises(EngineError) as caught:
        await server.start()
    assert hint in caught.value.hint
    await server.stop()
    assert not server.directory.exists()


USAGE = "usage: launch_server.py [-h]\nlaunch_server.py: error: unrecognized arguments: --atention-backend x\n"
TRACE = "Traceback (most recent call last):\n  File ...\nImportError: no kernel for sm_90\n" + "killing a child\n" * 20 + "EOFError\n"


@pytest.mark.parametrize(
    ("told", "code", "said", "hint"),
    [
        (USAGE, 2, "--atention-backend", "engine.sglang.flags"),
        (TRACE, 3, r"code 3\. First error: ImportError: no kernel for sm_90\. ", ""),
    ],
)
async def test_a_server_that_ends_at_its_start_is_shown_with_its_own_words(told: str, code: int, said: str, hint: str, tmp_path: Path):
    """The first error is named where the end of the log does not say it."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat <<'END'\n{told}END\nexit {code}\n")
    python.chmod(0o755)
    server = server_of(cpu_config(str(python)), tmp_path)
    with pytest.raises(EngineError, match=said) as caught:
        await server.start()
    assert hint in caught.value.hint
    await server.stop()


def test_no_process_outlives_a_killed_worker(sglang_python: str, tmp_path: Path):
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from tests.sglang.cpu import cpu_config\n"
        "from tests.sglang.test_server import server_of\n"
        f"server = server_of(cpu_config({sglang_python!r}), Path({str(tmp_path)!r}))\n"
        "async def main():\n"
        "    start = asyncio.create_task(server.start())\n"
        "    while server.pid is None: await asyncio.sleep(0.01)\n"
        "    print(server.pid, flush=True)\n"
        "    await start\n"
        "asyncio.run(main())\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environ, cwd=ROOT)
    assert worker.stdout is not None
    pid = int(worker.stdout.readline())
    assert group_of(pid)
    worker.kill()
    worker.wait()
    deadline = time.monotonic() + 30
    while group_of(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group_of(pid) == set()
    worker.stdout.close()
    left = list(Path(tempfile.gettempdir()).glob(f"{FOLDER}{worker.pid}-*"))
    own = tmp_path / f"{FOLDER}{os.getpid()}-x"
    own.mkdir()
    remove_left_behind(left[0].parent)
    remove_left_behind(tmp_path)
    assert left and not any(path.exists() for path in left) and own.exists()


def test_shared_memory_of_a_killed_worker_goes_with_its_folder(tmp_path: Path):
    worker = subprocess.Popen([sys.executable, "-c", ""])
    worker.wait()
    left = tmp_path / f"{FOLDER}{worker.pid}-x"
    left.mkdir()
    memory = tmp_path / "sglang_loads_x"
    memory.touch()
    (left / "shared-memory").write_text(f"{memory}\n{tmp_path / 'gone'}\n")
    remove_left_behind(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_servers_shared_memory_is_known(shared_server: SglangServer):
    noted = (shared_server.directory / "shared-memory").read_text().split()
    assert noted and all(Path(path).exists() for path in noted)


async def test_the_key_is_asked_for_and_stands_in_no_command_line(sglang_server: SglangServer):
    import aiohttp

    async with aiohttp.ClientSession() as session, session.get(sglang_server.client.address + "/server_info") as response:
        assert response.status == 401
    lines = [command_of(pid) for pid in group_of(sglang_server.pid or 0)]
    assert lines and not any(sglang_server.key.encode() in line for line in lines)
    assert (sglang_server.directory / "server.yaml").stat().st_mode & 0o777 == 0o600
    assert sglang_server.directory.stat().st_mode & 0o777 == 0o700


async def test_truncated_sampling_gives_the_log_probs_of_what_was_drawn_from(
    sglang_server: SglangServer, sglang_config: EngineConfig, epochs
):
    """Against the definition of the other engines (streamrl.engines.table.sampling): the kept set, renormalised."""
    model = build("qwen3", seed=5)
    sampling = Sampling(max_new_tokens=24, ignore_eos=True, temperature=0.8, top_p=0.7, top_k=9)
    request = GenerateRequest(request_id="t", prompt_ids=PROMPT, seeds=(1, 2, 3), sampling=sampling)
    for stream, recording in ((False, Recording()), (False, Recording(support=True)), (True, Recording(support=True))):
        async with engine_over(sglang_server, sglang_config, recording=recording) as engine:
            await load(engine, publish(models.tensors(model), Version(next(epochs), 0)))
            answers = await ask(engine, msgspec.structs.replace(request, stream=stream))
            # SGLang does not say what top-p alone kept: these are from before it, and marked so.
            alone = msgspec.structs.replace(request, request_id="u", sampling=msgspec.structs.replace(sampling, top_k=-1))
            chunks = [chunk async for chunk in engine.generate(alone)]
        for answer in answers:
            expected = truncated(model, answer.ids, sampling)
            assert max(abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True)) < 2e-5
            assert ("candidates" in answer.extras) is recording.support
            if recording.support:
                sets = answer.extras["candidates"].sets()
                kept = np.isfinite(distributions(model, answer.ids, sampling))
                assert sets.counts.tolist() == kept.sum(1).tolist() and sets.ids.tolist() == np.nonzero(kept)[1].tolist()
        for chunk in chunks:
            assert chunk.logprob_mode is LogprobMode.TEMPERATURE
            expected = truncated(model, list(chunk.token_ids), Sampling(temperature=0.8))
            assert max(abs(a - b) for a, b in zip(chunk.logprobs, expected, strict=True)) < 2e-5


@pytest.mark.parametrize("stream", [False, True])
async def test_the_likeliest_are_those_of_what_was_drawn_from(
    sglang_server: SglangServer, sglang_config: EngineConfig, epochs, stream: bool
):
    model = build("qwen3", seed=5)
    sampling = Sampling(max_new_tokens=24, ignore_eos=True, temperature=0.8, logit_bias={7: 2.0})
    request = GenerateRequest(request_id="k", prompt_ids=PROMPT, seeds=(1, 2), sampling=sampling, stream=stream)
    async with engine_over(sglang_server, sglang_config, recording=Recording(top=4)) as engine:
        await load(engine, publish(models.tensors(model), Version(next(epochs), 0)))
        answers = await ask(engine, request)
    for answer in answers:
        expected = distributions(model, answer.ids, sampling)
        sets = answer.extras["candidates"].sets()
        for place, (first, end) in enumerate(zip(sets.bounds, sets.bounds[1:], strict=False)):
            ids = sets.ids[first:end].tolist()
            assert set(ids) == {*np.argsort(-expected[place])[:4].tolist(), answer.ids[place]}
            assert np.abs(sets.logprobs[first:end] - expected[place, ids]).max() < 2e-5
            assert sets.logprobs[first + ids.index(answer.ids[place])] == np.float32(answer.logprobs[place])


async def test_biases_and_min_p_are_those_of_the_other_engines(sglang_engine: SglangEngine, epochs):
    model = build("qwen3", seed=6)
    await load(sglang_engine, publish(models.tensors(model), Version(next(epochs), 0)))
    for cut in ({}, {"min_p": 0.05, "top_k": 40}, {"min_p": 0.3, "top_k": 64, "top_p": 0.8}):
        sampling = Sampling(max_new_tokens=24, ignore_eos=True, temperature=0.8, logit_bias={7: 2.0, 9: -100.0}, **cut)
        for answer in await ask(sglang_engine, GenerateRequest(request_id="b", prompt_ids=PROMPT, seeds=(1, 2), sampling=sampling)):
            expected = truncated(model, answer.ids, sampling)
            assert max(abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True)) < 2e-5
            assert 9 not in answer.ids


async def test_a_penalty_is_that_of_the_other_engines_one_token_later(sglang_engine: SglangEngine, epochs):
    """SGLang launches a pass before it has read the token of the one before: it counts the prompt's last token in place of the first.

    Of one completion alone: where another's prompt is computed in between, it has read it, and so passes over a token.
    """
    model = build("qwen3", seed=6)
    await load(sglang_engine, publish(models.tensors(model), Version(next(epochs), 0)))
    penalties: list[dict[str, Any]] = [{"presence_penalty": 1.5}, {"frequency_penalty": 0.75}, {"repetition_penalty": 1.3}]
    for asked in penalties:
        sampling = Sampling(max_new_tokens=24, ignore_eos=True, **asked)
        [answer] = await ask(sglang_engine, GenerateRequest(request_id="p", prompt_ids=PROMPT, seeds=(1,), sampling=sampling))
        expected = truncated(model, answer.ids, sampling, [PROMPT[-1], *answer.ids[:-1]])
        assert max(abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True)) < 2e-5


async def test_of_completions_asked_for_together_each_can_be_aborted_also_one_that_waits_for_a_slot(sglang_engine: SglangEngine, epochs):
    await load(sglang_engine, publish(models.tensors(build("qwen3", seed=6)), Version(next(epochs), 0)))
    limit, waits = 400, SLOTS + 1
    request = GenerateRequest(
        request_id="group", prompt_ids=PROMPT, seeds=tuple(range(SLOTS + 2)), sampling=Sampling(max_new_tokens=limit, ignore_eos=True)
    )
    asking = asyncio.create_task(ask(sglang_engine, request))
    async with asyncio.timeout(60):
        while not (await sglang_engine.info()).waiting:
            await asyncio.sleep(0)
    for index in (0, waits):
        await sglang_engine.abort(f"group.{index}")
    answers = await asking
    assert {index for index, answer in enumerate(answers) if answer.reason == "abort"} == {0, waits}
    assert [len(answer.ids) for answer in answers[1:waits]] == [limit] * SLOTS
    assert len(answers[0].ids) < limit and not answers[waits].ids
    info = await sglang_engine.info()
    assert (info.running, info.waiting) == (0, 0)


async def test_a_stop_string_ends_a_completion_that_the_server_would_go_on_with(sglang_engine: SglangEngine, epochs, tmp_path):
    write_tokenizer(tmp_path)
    sglang_engine.texts = Texts(tmp_path, engine="e")
    await load(sglang_engine, publish(models.tensors(build("qwen3", seed=6)), Version(next(epochs), 0)))
    sampling = Sampling(max_new_tokens=200, ignore_eos=True, logit_bias={20: 60.0, 21: 60.0}, stop=("-,-",))
    assert sglang_engine.texts.decode([20, 21]) == ",-"
    for answer in await ask(sglang_engine, GenerateRequest(request_id="s", prompt_ids=PROMPT, seeds=(1, 2), sampling=sampling)):
        assert answer.reason == "stop" and sglang_engine.texts.decode(answer.ids).endswith("-,-")
        assert answer.extras["matched"] == "-,-"


def truncated(model, ids: list[int], sampling: Sampling, counted: Sequence[int] | None = None) -> list[float]:
    return distributions(model, ids, sampling, counted)[np.arange(len(ids)), ids].tolist()


def distributions(model, ids: list[int], sampling: Sampling, counted: Sequence[int] | None = None) -> np.ndarray:
    import torch

    from streamrl.engines.batching.edits import Editor
    from streamrl.engines.batching.model import Draws
    from streamrl.engines.table.sampling import distribution

    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*PROMPT, *ids]]), use_cache=False).logits[0, len(PROMPT) - 1 : -1].numpy()
    n, editor, edits = len(ids), Editor(sampling, None, None), {}
    for place, token in enumerate(ids if counted is None else counted):
        edits[place] = msgspec.structs.replace(edit := editor.edit(), seen=edit.seen.copy())  # what the editor holds grows along
        editor.take(token)
    draws = Draws(
        temperature=np.full(n, sampling.temperature, np.float32),
        top_p=np.full(n, sampling.top_p, np.float32),
        top_k=np.full(n, sampling.top_k, np.int64),
        min_p=np.full(n, sampling.min_p, np.float32),
        uniform=np.zeros(n),
        edits=edits,
    )
    return distribution(logits, draws)


async def test_cached_prefixes_are_counted_and_kept_apart_by_version(sglang_engine: SglangEngine, epochs):
    epoch = next(epochs)
    prompt = tuple(3 + k % 50 for k in range(200))

    async def cached(name: str) -> int:
        request = GenerateRequest(request_id=name, prompt_ids=prompt, seeds=(1,), sampling=Sampling(max_new_tokens=2, ignore_eos=True))
        (chunk,) = [chunk async for chunk in sglang_engine.generate(request)]
        return chunk.extras.get("cached_tokens", 0)

    await load(sglang_engine, publish(models.tensors(build("qwen3", seed=1)), Version(epoch, 0)))
    assert await cached("a") == 0
    assert await cached("b") > 150, "the same version computed it"
    await load(sglang_engine, publish(models.tensors(build("qwen3", seed=2)), Version(epoch, 1)))
    assert await cached("c") == 0, "other weights computed it"
    counters = (await sglang_engine.info()).counters
    assert counters["engine/prompt_tokens_total"] == 600 and 150 < counters["engine/cached_tokens_total"] < 200
