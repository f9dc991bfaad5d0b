from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from streamrl.config.tree import DataConfig
from streamrl.core.seeds import rollout_seed
from streamrl.data.characters import write_tokenizer
from streamrl.data.problems import load_problems
from streamrl.data.tokenizer import Tokenizer, load_tokenizer
from streamrl.engines.extras import INEXACT
from streamrl.engines.protocol import Chunk, GenerateRequest
from streamrl.engines.table.engine import TableEngine
from streamrl.errors import EngineError, SchemaError
from streamrl.producers.chat_format import ChatFormat
from streamrl.producers.episode import Episode, Segment, samples_of
from streamrl.producers.functions import FunctionProducer
from streamrl.producers.protocol import Failure
from streamrl.producers.rollout_engine import RolloutEngine
from streamrl.producers.single_turn import SingleTurn
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.samples import Status
from streamrl.schemas.tasks import RolloutTask
from tests.support.rolling import PROMPT, context_of, engine_of, task_of

# Every prompt, and a bare digit 7 (no template).
ANSWERS = {(0, "<|assistant|>"): "?", (1, "?"): "!", (0, "7"): "7"}


async def test_two_turns_keep_the_models_tokens_and_mask_the_tools(engine: TableEngine, tokenizer: Tokenizer) -> None:
    task = task_of(tokenizer)
    chat = engine_of(context_of(engine, tokenizer, task)).chat(task)
    first = await chat.generate()
    assert (first.text, first.finish_reason) == ("?!", "stop")
    chat.tool("7")
    second = await chat.generate()
    episode = chat.episode()
    # The conversation as the template would render it whole: nothing is missing between the turns and nothing is there twice.
    whole = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "3+4"},
            {"role": "assistant", "content": first.text},
            {"role": "tool", "content": "7"},
            {"role": "assistant", "content": second.text},
        ],
        add_generation_prompt=False,
    )
    assert list(chat.token_ids) == tokenizer.encode(whole)
    assert [segment.is_model for segment in episode.segments] == [False, True, False, True]
    assert tuple(episode.segments[1].token_ids) == first.token_ids
    assert tuple(episode.segments[3].token_ids) == second.token_ids
    assert tokenizer.decode(episode.segments[2].token_ids) == "<|tool|>7<|end|><|assistant|>"
    assert episode.turns == ("?!", second.text)


async def test_a_turn_cut_by_length_is_closed_before_the_tool_speaks(engine: TableEngine, tokenizer: Tokenizer) -> None:
    task = task_of(tokenizer, max_new_tokens=1)
    chat = engine_of(context_of(engine, tokenizer, task)).chat(task)
    turn = await chat.generate()
    assert (turn.text, turn.finish_reason) == ("?", "length")
    chat.tool("7")
    await chat.generate()
    assert tokenizer.decode(chat.episode().segments[2].token_ids) == "<|end|><|tool|>7<|end|><|assistant|>"
    assert chat.episode().status is Status.TRUNCATED


async def test_without_a_template_a_reply_is_the_text_itself(engine: TableEngine, tokenizer: Tokenizer) -> None:
    task = task_of(tokenizer, prompt="3+4=", max_new_tokens=1)
    chat = engine_of(context_of(engine, tokenizer, task, chat_template=False)).chat(task)
    await chat.generate()
    chat.tool("7")
    turn = await chat.generate()
    assert turn.text == "7"
    assert tokenizer.decode(chat.episode().segments[2].token_ids) == "7"


def test_without_a_template_a_text_begins_as_a_row_does(tmp_path: Path) -> None:
    """Gemma is useless without the token that begins a text."""
    write_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="<|pad|> $A", special_tokens=[("<|pad|>", 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "3+4=", "label": "7"}')
    tokenizer = load_tokenizer(tmp_path)
    [row] = load_problems(str(tmp_path / "rows.jsonl"), DataConfig(chat_template=False), tokenizer).problems
    chat = ChatFormat(tokenizer, chat_template=False)
    assert row.prompt_ids[0] == 0
    assert chat.text_prompt("3+4=") == chat.opening([{"role": "user", "content": "3+4="}]) == list(row.prompt_ids)


async def test_one_turn_of_a_chat_equals_the_built_in_producer(engine: TableEngine, tokenizer: Tokenizer) -> None:
    task = task_of(tokenizer, num_rollouts=4)
    context = context_of(engine, tokenizer, task)
    ours = await FunctionProducer(one_turn).rollout(task, context)
    built_in = await SingleTurn().rollout(task, context)
    tokens = [
        [[msgspec.structs.replace(s, origin=None) for s in e.segments] for e in made if isinstance(e, Episode)] for made in (ours, built_in)
    ]
    assert tokens[0] == tokens[1]
    assert [(e.rollout, e.seed) for e in ours if isinstance(e, Episode)] == [(k, rollout_seed(11, k)) for k in range(4)]


@pytest.mark.parametrize("how", ["tool", "user", "append"])
async def test_a_message_that_does_not_fit_ends_the_chat_as_truncated(engine: TableEngine, tokenizer: Tokenizer, how: str) -> None:
    task = task_of(tokenizer)
    longest = len(task.prompt_ids) + 12
    chat = engine_of(context_of(engine, tokenizer, task, max_len=longest)).chat(task)
    for _ in range(5):  # a loop that knows nothing of lengths
        turn = await chat.generate()
        chat.append([7] * 30) if how == "append" else getattr(chat, how)("3+4" * 9)
    assert (turn.token_ids, turn.finish_reason, chat.is_full, len(chat.turns)) == ((), "length", True, 1)
    before = chat.token_ids
    chat.append([7])
    episode = chat.episode()
    assert (episode.status, episode.finish_reason, chat.token_ids) == (Status.TRUNCATED, "length", before)
    assert episode.num_tokens <= longest and [segment.is_model for segment in episode.segments] == [False, True]


async def test_a_loop_of_turns_never_grows_beyond_the_longest_sequence(engine: TableEngine, tokenizer: Tokenizer) -> None:
    task = task_of(tokenizer)
    for longest in range(len(task.prompt_ids) + 1, len(task.prompt_ids) + 30):
        chat = engine_of(context_of(engine, tokenizer, task, max_len=longest)).chat(task)
        for _ in range(9):
            await chat.generate()
            chat.tool("7")
        episode = chat.episode()
        assert episode.num_tokens <= longest and chat.is_full and episode.status is Status.TRUNCATED


async def test_a_long_chat_is_not_counted_again_for_each_of_its_messages(engine: TableEngine, tokenizer: Tokenizer) -> None:
    class Counted(list[Segment]):
        seen = 0

        def __iter__(self) -> Iterator[Segment]:
            for segment in super().__iter__():
                Counted.seen += 1
                yield segment

    task = task_of(tokenizer, max_new_tokens=8)
    chat = engine_of(context_of(engine, tokenizer, task, max_len=0x400)).chat(task)
    chat._segments = Counted(chat._segments)
    for _ in range(2000):
        chat.append([5])
    assert chat.is_full and len(chat.token_ids) == 0x400
    assert Counted.seen <= 0x400, "by token_ids, once"


async def test_a_turn_that_the_engine_has_no_room_for_ends_the_chat_as_truncated(engine: TableEngine, tokenizer: Tokenizer) -> None:
    """As a pool answers when all its engines have shorter sequences than the run."""

    class Short:
        asked = 0

        async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
            self.asked += 1
            if self.asked > 1:
                yield Chunk(completion=0, token_ids=(), logprobs=(), spans=(), finish_reason="length")
                return
            async for chunk in engine.generate(request):
                yield chunk

    task, short = task_of(tokenizer), Short()
    chat = engine_of(context_of(short, tokenizer, task)).chat(task)
    for _ in range(4):
        await chat.generate()
        chat.tool("7")
    assert short.asked == 2 and chat.is_full
    assert (chat.episode().status, len(chat.turns)) == (Status.TRUNCATED, 1)


async def one_turn(task: RolloutTask, engine: RolloutEngine) -> Episode:
    chat = engine.chat(task)
    await chat.generate()
    return chat.episode()


async def two_turns(task: RolloutTask, engine: RolloutEngine) -> Episode:
    chat = engine.chat(task)
    await chat.generate()
    chat.tool("7")
    await chat.generate()
    return chat.episode()


@pytest.mark.parametrize("producer", [FunctionProducer(two_turns), SingleTurn()], ids=["chat", "single_turn"])
async def test_what_an_engine_says_of_a_completion_reaches_the_sample(engine: TableEngine, tokenizer: Tokenizer, producer: Any) -> None:
    """Guessed versions, here of the second completion of all; cached tokens, and drafts with the passes that verified them."""
    task, chats = task_of(tokenizer, num_rollouts=3), not isinstance(producer, SingleTurn)

    class Telling:
        asked = 0

        async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
            async for chunk in engine.generate(request):
                self.asked += len(request.seeds) == 1
                counts = {"cached_tokens": len(request.prompt_ids) // 2, "spec_verify_ct": 3 + chunk.completion, "began_s": 5.0}
                guessed = {INEXACT: True} if chunk.completion == 1 or self.asked == 2 else {}
                yield chunk if chunk.finish_reason is None else msgspec.structs.replace(chunk, extras={**counts, **guessed})

    made = await producer.rollout(task, context_of(Telling(), tokenizer, task))
    rows = decode_samples(encode_samples(samples_of(task, [e for e in made if isinstance(e, Episode)], producer="p"))).rows()
    flags = [[turn.inexact for turn in row.turns] for row in rows]
    assert sorted(map(len, flags)) == ([2, 2, 2] if chats else [0, 0, 1]) and sum(map(sum, flags)) == 1
    for row in rows:
        times = [time_s for turn in row.turns for time_s in (turn.asked_s, turn.finished_s)]
        assert times == sorted(times) and all(time_s > 0 for time_s in times)
        for turn in row.turns:
            assert row.loss_mask[turn.start : turn.start + turn.length].all() and not row.loss_mask[turn.start - 1]
        before = [turn.start for turn in row.turns] or [len(task.prompt_ids)]
        verified = 3 + 3 if chats else 3 + row.rollout
        assert row.counters == {"cached_tokens": sum(start // 2 for start in before), "spec_verify_ct": verified}


async def test_sub_agents_take_texts_messages_and_ids_and_misuse_is_refused(engine: TableEngine, tokenizer: Tokenizer) -> None:
    task = task_of(tokenizer)
    rollout = engine_of(context_of(engine, tokenizer, task))
    assert rollout.chat("3+4").token_ids == tuple(tokenizer.encode(PROMPT))
    assert rollout.chat([{"role": "user", "content": "3+4"}]).token_ids == tuple(tokenizer.encode(PROMPT))
    assert rollout.chat([9, 10]).token_ids == (9, 10)
    chat = rollout.chat(task)
    with pytest.raises(SchemaError, match="follows a turn"):
        chat.tool("7")
    with pytest.raises(SchemaError, match="nothing to train on"):
        chat.episode()
    with pytest.raises(SchemaError, match="at least one token"):
        rollout.chat([])
    parts = {"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text", "text": "7"}
    for messages in ([{"role": "user", "content": [*parts]}], ({"role": "user", "content": parts},)):
        with pytest.raises(SchemaError, match="got an image"):
            rollout.chat(messages)


async def test_an_error_fails_its_rollout_alone(engine: TableEngine, tokenizer: Tokenizer) -> None:
    async def fragile(task: RolloutTask, engine: RolloutEngine) -> Episode | list[Episode] | Failure | str | None:
        chat = engine.chat(task)
        await chat.generate()
        match engine.context.rollout_index:
            case 0:
                other = engine.chat(task)
                await other.generate()
                return [chat.episode(reward=1.0), other.episode(reward=0.5)]
            case 1:
                raise ValueError("broken tool")
            case 2:
                return None
            case 3:
                return Failure(0, "filtered", "too easy")
            case _:
                return "not an episode"

    task = task_of(tokenizer, num_rollouts=5)
    given = await FunctionProducer(fragile).rollout(task, context_of(engine, tokenizer, task))  # type: ignore[arg-type]
    assert [item.rollout for item in given] == [0, 0, 1, 2, 3, 4]
    raised, nothing, given_up, text = given[2:]
    assert isinstance(raised, Failure) and (raised.reason, raised.detail[:23]) == ("failed", "ValueError: broken tool")
    assert raised.detail.endswith(f" in test_chat.py:{fragile.__code__.co_firstlineno + 9}")
    assert isinstance(nothing, Failure) and nothing.reason == "failed"
    assert given_up == Failure(3, "filtered", "too easy")
    assert isinstance(text, Failure) and "expected an Episode" in text.detail


async def test_an_engine_that_goes_away_gives_the_whole_task_back(engine: TableEngine, tokenizer: Tokenizer) -> None:
    async def stubborn(task: RolloutTask, rollout: RolloutEngine) -> Episode:
        chat = rollout.chat(task)
        if rollout.context.rollout_index == 1:
            await engine.stop()
        await chat.generate()
        return chat.episode()

    task = task_of(tokenizer, num_rollouts=2)
    with pytest.raises(EngineError):
        await FunctionProducer(stubborn).rollout(task, context_of(engine, tokenizer, task))
