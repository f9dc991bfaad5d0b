"""`post` as hooks call it: SGLang's words for question and answer, the run's engines behind them."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from streamrl.bridges.slime import session
from streamrl.bridges.slime.args import Args
from streamrl.bridges.slime.flags import ROUTER_HOST
from streamrl.bridges.slime.generate import generate
from streamrl.bridges.slime.sample import Sample
from streamrl.bridges.slime.session import Session, post
from streamrl.bridges.slime.trials import Answering
from streamrl.core.seeds import rollout_seed
from streamrl.data.characters import write_tokenizer
from streamrl.data.tokenizer import load_tokenizer
from streamrl.engines.protocol import Chunk, GenerateRequest
from streamrl.errors import EngineUnavailable, SchemaError
from streamrl.producers.protocol import Context
from streamrl.schemas.tasks import RolloutTask, Sampling

URL = f"http://{ROUTER_HOST}:80/generate"


class Listening(Answering):
    """Keeps what it was asked."""

    requests: list[GenerateRequest]

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        async for chunk in super().generate(request):
            yield chunk


@pytest.fixture
def engine(tmp_path: Path) -> Listening:
    write_tokenizer(tmp_path)
    engine = Listening(load_tokenizer(tmp_path), ("42",))
    engine.requests = []
    return engine


def begun(engine: Any, tmp_path: Path, **fields: Any) -> Session:
    sampling = Sampling(max_new_tokens=8, temperature=0.9)
    task = RolloutTask(run="r", index=3, source="main", prompt_ids=(1, 8), num_rollouts=2, sampling=sampling, seed=5, min_version=4)
    context = Context(engine=engine, tokenizer=load_tokenizer(tmp_path), task=task, seed=5, log=logging.getLogger(), **fields)
    return Session(context.for_rollout(1))


async def test_an_answer_has_sglangs_words_and_the_request_the_rollouts(engine: Listening, tmp_path: Path) -> None:
    found = begun(engine, tmp_path)
    with session.running(found):
        params = {"max_new_tokens": 6, "stop": "4", "stop_token_ids": None, "temperature": 0.5, "skip_special_tokens": False}
        answer = await post(URL, {"input_ids": [1, 8], "sampling_params": params, "return_logprob": True}, max_retries=3)
        await post(URL, {"text": "<|user|>1", "sampling_params": {"no_stop_trim": True}})
    ids = found.context.tokenizer.encode("42<|end|>")
    assert answer["text"] == "" and answer["output_ids"] == ids, "the text ends before the stop string"
    assert answer["meta_info"]["output_token_logprobs"] == [[-0.5, token, None] for token in ids]
    assert (answer["meta_info"]["finish_reason"], answer["meta_info"]["weight_version"]) == ({"type": "stop"}, "7")
    first, second = engine.requests
    assert first.sampling == Sampling(max_new_tokens=6, stop=("4",), temperature=0.5) and first.min_version == 4
    assert second.sampling == Sampling(max_new_tokens=8, temperature=0.9)
    assert second.prompt_ids == tuple(found.context.tokenizer.encode("<|user|>1"))
    own = rollout_seed(5, 1)
    assert (first.seeds, second.seeds) == ((own,), (rollout_seed(own, 1),)), "the first as the built-in producer's"
    assert [request.prompt_ids for request in found.asked] == [first.prompt_ids, second.prompt_ids]


async def test_where_nothing_fits_no_engine_is_asked(engine: Listening, tmp_path: Path) -> None:
    with session.running(begun(engine, tmp_path, max_len=3)):
        one = await post(URL, {"input_ids": [1, 8]})
        none = await post(URL, {"input_ids": [1, 8, 9]})
    assert [request.sampling.max_new_tokens for request in engine.requests] == [1]
    assert [(a["meta_info"]["finish_reason"]["type"], len(a["output_ids"])) for a in (one, none)] == [("length", 1), ("length", 0)]


async def test_a_second_turn_has_what_the_first_left_of_the_response(engine: Listening, tmp_path: Path) -> None:
    found = begun(engine, tmp_path)
    sample, params = Sample(prompt="1+1="), {"max_new_tokens": 5}
    with session.running(found):
        for _ in range(3):  # of 3 tokens, of the 2 that are left, of none
            sample = await generate(Args({}), sample, params)
    assert [request.sampling.max_new_tokens for request in engine.requests] == [5, 2] and params == {"max_new_tokens": 5}
    assert (sample.response_length, sample.status) == (5, Sample.Status.TRUNCATED)


@pytest.mark.parametrize(
    ("url", "payload", "words"),
    [
        (URL, {"input_ids": [1], "image_data": ["x"]}, "got image_data"),
        (URL, {"input_ids": [1], "stream": True}, "without stream"),
        (URL, {"input_ids": [1], "sampling_params": {"n": 2}}, "sampling_params.n = 1, got 2"),
        (URL, {"input_ids": [1], "sampling_params": {"temprature": 1}}, "got \\['temprature'\\]"),
        (URL, {"input_ids": [[1], [2]]}, "one prompt|a list of token ids"),
        (URL, {"input_ids": []}, "a list of token ids"),
        (URL, {}, "a list of token ids"),
        ("http://127.0.0.1:8000/search", {"text": "1"}, "expected a request to"),
        (URL.replace("generate", "flush_cache"), {}, "expected a request to"),
    ],
)
async def test_what_no_engine_takes_is_refused(engine: Listening, tmp_path: Path, url: str, payload: dict[str, Any], words: str) -> None:
    with session.running(begun(engine, tmp_path)), pytest.raises(SchemaError, match=words):
        await post(url, payload)
    assert engine.requests == []


async def test_outside_of_a_rollout_nobody_is_asked() -> None:
    with pytest.raises(SchemaError, match="while a rollout"):
        await post(URL, {"input_ids": [1]})


async def test_an_engine_that_is_away_passes_through(tmp_path: Path) -> None:
    class Away:
        async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
            raise EngineUnavailable("gone")
            yield

    write_tokenizer(tmp_path)
    with session.running(begun(cast(Any, Away()), tmp_path)), pytest.raises(EngineUnavailable):
        await post(URL, {"input_ids": [1]})


async def test_in_a_greedy_rollout_hooks_are_handed_and_get_a_temperature_of_0(engine: Listening, tmp_path: Path) -> None:
    found = begun(engine, tmp_path)
    task = msgspec.structs.replace(found.context.task, greedy_baseline=True)
    found = Session(msgspec.structs.replace(found.context, task=task).for_rollout(1))
    assert session.sampling_params(found.context)["temperature"] == 0.0
    with session.running(found):
        await post(URL, {"input_ids": [1, 8], "sampling_params": {**session.sampling_params(found.context), "temperature": 0.7}})
    assert [(one.sampling.temperature, one.sampling.max_new_tokens) for one in engine.requests] == [(0.0, 8)]
