"""Stop strings, biases, penalties and grammars through running engines: what they draw, what they say of it, and that it repeats."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from msgspec.structs import replace

from streamrl.config.tree import EngineConfig
from streamrl.core.seeds import uniform
from streamrl.data.byte_pairs import write_byte_pairs
from streamrl.data.characters import END, SPECIALS
from streamrl.engines.http import HttpEngine
from streamrl.engines.local.engine import LocalEngine
from streamrl.engines.protocol import Chunk, GenerateRequest
from streamrl.engines.server import serve
from streamrl.engines.table.engine import TableEngine
from streamrl.errors import EngineError
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from tests.support import models
from tests.support.errors import raises
from tests.support.models import ask, started
from tests.support.publishing import publish

TEXTS = ["the answer is 42", "über die Straße", "</answer>", "🙂🙃"] * 3
VOCAB, EOS, POSITIONS = 288, SPECIALS.index(END), 32
PROMPT = (SPECIALS.index("<|user|>"),)
SAID = "die Straße 🙂 is </answer> 42 and on and on"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a tokenizer of bytes, for a table and for a small Qwen3."""
    directory = tmp_path_factory.mktemp("model")
    assert write_byte_pairs(directory, TEXTS, vocab_size=VOCAB) <= VOCAB
    (directory / "table.json").write_text(json.dumps({"vocab": VOCAB, "max_position": POSITIONS, "eos": EOS}))
    shape: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    transformers.Qwen3Config(**shape, eos_token_id=EOS, bos_token_id=None).save_pretrained(directory)
    return directory


def table(directory: Path, logits: np.ndarray) -> AbstractAsyncContextManager[TableEngine]:
    engine = TableEngine(directory, EngineConfig(slots=8), engine_id="t", policy="policy", max_len=256)
    return started(engine, publish({"logits": logits.astype(np.float32)}, Version(0, 0)))


@pytest.fixture
async def spoken(directory: Path) -> AsyncIterator[TableEngine]:
    """Says SAID, whatever it is asked, and then ends."""
    ids = tokenizer(directory).encode(SAID).ids
    assert len(ids) < POSITIONS
    logits = np.zeros((POSITIONS, VOCAB, VOCAB))
    for place in range(POSITIONS):
        logits[place, :, ids[place] if place < len(ids) else EOS] = 60
    async with table(directory, logits) as engine:
        yield engine


def tokenizer(directory: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


def request(name: str, sampling: Sampling, seeds: tuple[int, ...] = (1,), **more: Any) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_ids=PROMPT, sampling=sampling, seeds=seeds, **more)


@pytest.mark.parametrize("stop", ["🙂", "aße", "Straße 🙂 is", "swer>", "4"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_a_completion_and_its_tokens_stay_as_they_are(
    spoken: TableEngine, directory: Path, stop: str, stream: bool
) -> None:
    [answer] = await ask(spoken, request("r", Sampling(stop=(stop, "never")), stream=stream))
    whole = tokenizer(directory).encode(SAID).ids
    assert answer.ids == whole[: len(answer.ids)] and answer.reason == "stop" and answer.extras["matched"] == stop
    assert stop in tokenizer(directory).decode(answer.ids) and stop not in tokenizer(directory).decode(answer.ids[:-1])
    assert answer.chunks == (len(answer.ids) if stream else 1)


async def test_a_stop_string_that_does_not_come_changes_nothing(spoken: TableEngine, directory: Path) -> None:
    [plain] = await ask(spoken, request("a", Sampling()))
    [watched] = await ask(spoken, request("b", Sampling(stop=("</answer>!",)), stream=True))
    assert (watched.ids, watched.logprobs, watched.reason) == (plain.ids, plain.logprobs, "stop")
    assert watched.ids[-1] == EOS and "matched" not in watched.extras
    [short] = await ask(spoken, request("c", Sampling(stop=("</answer>!",), max_new_tokens=4)))
    assert (short.ids, short.reason) == (plain.ids[:4], "length")


async def test_what_ended_a_completion_is_said_over_http_too(spoken: TableEngine) -> None:
    server = await serve(spoken)
    client = HttpEngine(server.address)
    try:
        [direct] = await ask(spoken, request("a", Sampling(stop=("aße",))))
        for stream in (False, True):
            [answer] = await ask(client, request("b", Sampling(stop=("aße",), logit_bias={3: -1.0}, min_p=0.01), stream=stream))
            assert (answer.ids, answer.reason, answer.extras["matched"]) == (direct.ids, "stop", "aße")
    finally:
        await client.close()
        await server.stop()


PENALTIES = replace(
    Sampling(max_new_tokens=40, ignore_eos=True, temperature=0.8, min_p=0.02, logit_bias={20: 3.0, 21: -100.0}),
    **{"presence_penalty": 0.5, "frequency_penalty": 0.75, "repetition_penalty": 1.2},
)


def by_definition(logits: np.ndarray, seed: int, sampling: Sampling) -> tuple[list[int], list[float]]:
    """One completion of a table in float64, one token after the other."""
    ids: list[int] = []
    logprobs: list[float] = []
    for place in range(sampling.max_new_tokens):
        z = logits[min(place, POSITIONS - 1), ids[-1] if ids else PROMPT[-1]].astype(np.float64)
        for token in set(ids):
            z[token] -= sampling.presence_penalty + sampling.frequency_penalty * ids.count(token)
            z[token] = z[token] * sampling.repetition_penalty if z[token] < 0 else z[token] / sampling.repetition_penalty
        for token, value in sampling.logit_bias.items():
            z[token] += value
        p = np.exp(z / np.float32(sampling.temperature))
        p /= p.sum()
        p[p < np.float32(sampling.min_p) * p.max()] = 0
        p /= p.sum()
        u = uniform(np.array([seed], np.uint64), np.array([place]))[0]
        ids.append(int(np.searchsorted(p.cumsum(), u * p.sum(), side="right")))
        logprobs.append(float(np.log(p[ids[-1]])))
    return ids, logprobs


async def test_penalties_count_what_each_completion_has_wherever_its_row_moves(directory: Path) -> None:
    logits = (2 * np.random.default_rng(0).normal(size=(POSITIONS, VOCAB, VOCAB))).astype(np.float32)
    async with table(directory, logits) as engine:
        # More completions than slots, of which others, without penalties, end early: rows are taken again and moved.
        seeds = tuple(range(20))
        answers = await ask(engine, request("r", PENALTIES, seeds))
        for seed, answer in zip(seeds, answers, strict=True):
            ids, logprobs = by_definition(logits, seed, PENALTIES)
            assert answer.ids == ids
            np.testing.assert_allclose(answer.logprobs, logprobs, atol=1e-5)
        assert [one.ids for one in await ask(engine, request("s", PENALTIES, seeds))] == [one.ids for one in answers]
        assert not any(21 in answer.ids for answer in answers)


async def test_a_table_knows_no_grammar_and_no_token_beyond_its_vocabulary(spoken: TableEngine) -> None:
    for name, sampling in (("regex", Sampling(regex="a")), ("json_schema", Sampling(json_schema="{}"))):
        with raises(EngineError, key=f"sampling.{name}"):
            await ask(spoken, request("r", sampling))
    with pytest.raises(EngineError, match=f"got {VOCAB} in request 'r'"):
        await ask(spoken, request("r", Sampling(logit_bias={3: 1.0, VOCAB: 1.0})))


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 120}, "w": {"enum": ["x", "ü", "🙂"]}, "ok": {"type": "boolean"}},
        "required": ["n", "w", "ok"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)


@pytest.fixture
async def local(directory: Path) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(directory, EngineConfig(slots=16, deterministic=True), engine_id="l", policy="policy", max_len=128)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(directory))
    async with started(engine, publish(models.tensors(model), Version(0, 0))):
        yield engine


async def test_every_completion_obeys_its_schema_and_comes_again(local: LocalEngine, directory: Path) -> None:
    seeds = tuple(range(50))
    answers = await ask(local, request("r", Sampling(json_schema=SCHEMA, max_new_tokens=80), seeds))
    decoded = tokenizer(directory)
    seen = set()
    for answer in answers:
        assert answer.reason == "stop" and answer.ids[-1] == EOS and np.isfinite(answer.logprobs).all()
        value = json.loads(decoded.decode(answer.ids[:-1]))
        assert value.keys() == {"n", "w", "ok"} and value["n"] in range(121) and value["w"] in ("x", "ü", "🙂")
        assert isinstance(value["n"], int) and isinstance(value["ok"], bool)
        seen.add(value["w"])
    assert len(seen) > 1, "the grammar leaves the choice to the model"
    again = await ask(local, request("s", Sampling(json_schema=SCHEMA, max_new_tokens=80), seeds[::-1]))
    assert [(one.ids, one.logprobs) for one in again[::-1]] == [(one.ids, one.logprobs) for one in answers]


async def test_a_regular_expression_holds_for_the_whole_text_beside_all_else(local: LocalEngine, directory: Path) -> None:
    sampling = Sampling(regex="[ab]{2,5}(ü|🙂)?", temperature=1.5, top_k=40, presence_penalty=0.5, max_new_tokens=40)
    for answer in await ask(local, request("r", sampling, tuple(range(12)))):
        assert re.fullmatch("[ab]{2,5}(ü|🙂)?", tokenizer(directory).decode(answer.ids[:-1])) and answer.reason == "stop"
    [cut] = await ask(local, request("s", Sampling(regex="(ab)+", stop=("bab",), max_new_tokens=40, logit_bias={EOS: -100.0})))
    assert cut.reason == "stop" and tokenizer(directory).decode(cut.ids).endswith("bab")


@pytest.mark.parametrize(
    "sampling",
    [
        *(Sampling(regex="("), Sampling(regex="(?=a)b"), Sampling(json_schema='{"type":"foo"}'), Sampling(json_schema='{"$ref":"#"}')),
        Sampling(json_schema='{"$ref":"http://10.0.0.1/schema"}'),
    ],
    ids=str,
)
async def test_what_is_no_grammar_fails_its_request_alone(local: LocalEngine, sampling: Sampling) -> None:
    with pytest.raises(EngineError, match="expected a grammar"):
        await ask(local, request("r", sampling))
    [answer] = await ask(local, request("r", Sampling(regex="a", max_new_tokens=8)))
    assert answer.reason == "stop"


async def test_a_grammar_cut_short_by_its_length_says_so(local: LocalEngine) -> None:
    chunks: list[Chunk] = [chunk async for chunk in local.generate(request("r", Sampling(regex="a{50}", max_new_tokens=3), stream=True))]
    assert chunks[-1].finish_reason == "length" and sum(len(chunk.token_ids) for chunk in chunks) == 3
