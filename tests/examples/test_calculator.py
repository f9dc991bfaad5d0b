"""The calculator agent of the example with a pretrained model: its rows and reward, and that both of its ways make the same rollouts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from msgspec.structs import replace

from streamrl.config.load import load
from streamrl.config.tree import RewardConfig
from streamrl.data.tokenizer import Tokenizer
from streamrl.engines.protocol import Chunk, EngineInfo, GenerateRequest
from streamrl.producers.chat_format import ChatFormat
from streamrl.producers.rollouts import main
from streamrl.schemas.codec import encode
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.tasks import RolloutTask, Sampling
from streamrl.schemas.versions import Version
from tests.examples.runs import EXAMPLES
from tests.support.gateways import gateway
from tests.support.producing import Loop, memory_loop, samples_in, with_producer

EXAMPLE = EXAMPLES / "smollm2"
RESULT = "the result"
"""A turn that repeats what the tool has said."""
SAID = {
    "What is 345 * 678?": ["calc(345 * 678)", RESULT],
    "What is 345 * 678 - 400?": ["calc(345 * 678 - 400)", "calc(233910 - 400)", RESULT],
    "What is 345 * 678 + 400?": ["calc(345 * 678)", "calc(233910 + 400)", RESULT],
    "What is 10 + 11?": ["calc(10 + 11)"] * 9,
    "What is 2 * 600?": ["calc(2 * 600)", "It is 1200."],
    "What is 300 * 300?": ["calc(300 x 300)"],
}
"""The text that the model says to each question, turn by turn."""
TURNS_AND_REWARDS = [(2, 1.0), (3, 1.0), (3, 1.0), (5, 0.0), (2, 0.0), (1, 0.0)]


class Speaker:
    """An engine whose model says what stands in `SAID`, by what it has been asked and how often it has spoken since."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        question, *rest = self._tokenizer.decode(request.prompt_ids).rpartition("<|user|>")[2].split("<|end|>")
        turns = [part for part in rest if part.startswith("<|assistant|>")]
        text = SAID[question][len(turns) - 1]
        if text == RESULT:
            text = rest[-2].removeprefix("<|tool|>")
        ids = (*self._tokenizer.encode(text), self._tokenizer.stop_ids[0])
        spans = (VersionSpan(len(ids), Version(0, 0)),)
        for completion, _ in enumerate(request.seeds):
            yield Chunk(completion=completion, token_ids=ids, logprobs=(-0.5,) * len(ids), spans=spans, finish_reason="stop", engine="e")

    async def abort(self, request_id: str) -> None:
        return

    async def info(self) -> EngineInfo:
        return EngineInfo(engine="e", policy="policy", serving=Version(0, 0), running=0, waiting=0, slots=64, max_len=512)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of the example, whose folder is no package."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return importlib.import_module


def test_each_calculation_is_what_its_steps_give(module: Any) -> None:
    calculator = module("calculator")
    train, heldout = calculator.split()
    expressions = [row["prompt"][-1]["content"].removeprefix("What is ").removesuffix("?") for row in train + heldout]
    assert len(set(expressions)) == len(expressions) == 1200 + 200
    assert [len(one.split()) // 2 for one in expressions[1200:]] == [1] * 40 + [2] * 80 + [3] * 80
    assert [str(eval(one)) for one in expressions] == [row["label"] for row in train + heldout]


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("calc(12 * -7)", "-84"),
        (" calc(1 - 3)\n", "-2"),
        ("calc(1 + 2 + 3)", "3 + 3"),
        ("calc(7 - 2 * 3)", "7 - 6"),
        ("calc(5 - -2 - 1)", "7 - 1"),
        ("calc(1/2)", None),
        ("calc(12)", None),
        ("calc((1 + 2) * 3)", None),
        ("It is calc(1 + 2)", None),
    ],
)
def test_a_turn_is_a_call_or_the_answer(module: Any, text: str, result: str | None) -> None:
    assert module("calculator").result_of(text) == result


@pytest.mark.parametrize(
    ("text", "reward"), [("12", 1.0), (" 12\n", 1.0), ("calc(3 * 4)", 0.0), ("It is 12", 0.0), ("1 12", 0.0), ("", 0.0)]
)
def test_the_answer_is_the_last_turn_and_nothing_else(module: Any, text: str, reward: float) -> None:
    assert module("calculator").score(SimpleNamespace(label="12"), SimpleNamespace(completion=text)) == reward


async def issue(loop: Loop, calculator: Any) -> None:
    """Publish a task of two rollouts for each question, behind the worked examples."""
    for question in SAID:
        messages = [*calculator.EXAMPLES, {"role": "user", "content": question}]
        task = RolloutTask(
            run=loop.config.run.name,
            index=loop.num_tasks,
            source="main",
            prompt=messages,
            prompt_ids=tuple(ChatFormat(loop.tokenizer, chat_template=True).prompt(messages)),
            label=str(eval(question.removeprefix("What is ").removesuffix("?"))),
            num_rollouts=2,
            sampling=Sampling(max_new_tokens=28),
        )
        await loop.bus.publish(loop.subjects.tasks("main"), encode(task), expect_last=loop.num_tasks)
        loop.num_tasks += 1


@pytest.mark.process  # user code runs in a child, and the SDK asks `uname` for the machine
async def test_the_agent_on_openais_sdk_makes_the_rollouts_that_the_producer_makes(tmp_path: Path, run_id: str, module: Any) -> None:
    calculator, guest = module("calculator"), module("calculator_openai")
    loop = await memory_loop(tmp_path, run_id)
    config = with_producer(loop.config, f"{EXAMPLE / 'calculator.py'}:agent")
    loop.config = replace(config, model=replace(config.model, max_len=512), reward=RewardConfig(kind=f"{EXAMPLE / 'calculator.py'}:score"))
    async with loop.announced(Speaker(loop.tokenizer), "e"):
        await issue(loop, calculator)
        async with loop.serving(main, loop.worker()):
            await loop.records(len(SAID))
            await loop.queue_is_empty()
        await issue(loop, calculator)
        async with gateway(loop, engine=False) as gate, openai.AsyncOpenAI(base_url=gate.url, api_key=gate.key, max_retries=0) as sdk:
            for _ in range(2 * len(SAID)):
                await guest.session(sdk)
            samples = samples_in(await loop.records(2 * len(SAID)))
    samples.sort(key=lambda one: (one.task, one.rollout))
    made = [(one.tokens.tolist(), one.loss_mask.tolist(), one.reward, one.status, one.finish_reason) for one in samples]
    half = 2 * len(SAID)
    assert made[:half] == made[half:] and len(made) == 2 * half
    ends = [one.tokens[one.loss_mask == 1].tolist().count(loop.tokenizer.stop_ids[0]) for one in samples]
    assert list(zip(ends, [one.reward for one in samples], strict=True))[:half:2] == TURNS_AND_REWARDS
    await loop.bus.close()


@pytest.mark.parametrize("overrides", [[], ["producer.workers=0", "gateway.workers=1"]])
def test_the_files_are_taken_with_either_agent(tmp_path: Path, module: Any, overrides: list[str]) -> None:
    for name in ("calculator.toml", "calculator-cpu.toml", "calculator.py"):
        (tmp_path / name).write_bytes((EXAMPLE / name).read_bytes())
    for name in ("calculator.jsonl", "calculator-heldout.jsonl"):
        (tmp_path / name).write_text('{"prompt": "a", "label": "b"}\n')
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    (tmp_path / "sglang" / "bin").mkdir(parents=True)
    (tmp_path / "sglang" / "bin" / "python").symlink_to(sys.executable)
    gpu, cpu = (load(tmp_path / name, overrides) for name in ("calculator.toml", "calculator-cpu.toml"))
    assert (gpu.engine.kind, cpu.engine.kind, gpu.gateway.port) == ("sglang", "local", cpu.gateway.port)
    parts = list(module("calculator").HELD_OUT.values())
    ends = [sum(parts[: index + 1]) for index in range(len(parts))]
    slices = [one.path.rpartition("@")[2] for one in gpu.evaluation.sets]
    assert slices == [f"[{end - part}:{end}]" for end, part in zip(ends, parts, strict=True)]
    assert gpu.evaluation.num_problems == ends[-1]
