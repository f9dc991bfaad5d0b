from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import pytest

from streamrl.data.tool_calls import ToolCall
from streamrl.errors import EngineError, SchemaError, ToolError
from streamrl.producers import tool_runs
from streamrl.producers.chat import Chat
from tests.support.chat_templates import family
from tests.support.processes import until
from tests.support.scripted import rollout_engine

DONE = "Done."


def calls(*texts: str) -> str:
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def call(name: str, arguments: str = "{}") -> str:
    return calls(f'{{"name": "{name}", "arguments": {arguments}}}')


async def begun(*texts: str, **context: Any) -> Chat:
    """A chat whose first turn is the first text."""
    engine = rollout_engine(family("qwen3"), [*texts, DONE], **context)
    chat = engine.chat(engine.context.task)
    await chat.generate()
    return chat


def said_after(chat: Chat, turn: int) -> str:
    """What stands between two turns, without the template's marks."""
    text = family("qwen3").decode(chat.token_ids)
    after = text.split("<|im_start|>user")[2 + turn].split("<|im_end|>")[0]
    return after.replace("\n<tool_response>", "<").replace("\n</tool_response>", ">").replace("\n", "")


async def test_parallel_calls_are_answered_in_their_order() -> None:
    release = asyncio.Event()

    async def first(at: str) -> str:
        await release.wait()
        return f"first at {at}"

    def second() -> dict[str, int]:
        asyncio.run_coroutine_threadsafe(_set(release), loop)
        return {"n": 5}

    async def _set(event: asyncio.Event) -> None:
        event.set()

    loop = asyncio.get_running_loop()
    chat = await begun("<think>\nhm\n</think>\n\nLet me.\n" + call("first", '{"at": "home"}') + "\n" + call("second"))
    turn = chat.turns[0]
    assert (turn.content, turn.reasoning, [c.name for c in turn.tool_calls]) == ("Let me.", "hm", ["first", "second"])
    results = await chat.call_tools({"first": first, "second": second})
    assert [(r.text, r.error, r.attempts) for r in results] == [("first at home", "", 1), ('{"n":5}', "", 1)]
    assert said_after(chat, 0) == '<first at home><{"n":5}>'
    assert (await chat.generate()).content == DONE
    assert await chat.call_tools({"first": first}) == [], "a turn without calls is an answer"


async def test_whatever_a_tool_does_the_model_gets_an_answer() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    async def hangs() -> None:
        await asyncio.sleep(1000)

    async def leaves() -> None:
        sys.exit(3)

    def leaves_plainly() -> None:
        sys.exit(3)

    async def cancels() -> None:
        raise asyncio.CancelledError

    async def mute() -> None:
        raise Mute

    def thing() -> object:
        return object()

    def half() -> str:
        return "a\ud800"

    tools = {f.__name__: f for f in (hangs, leaves, leaves_plainly, cancels, mute, thing, half)}
    chat = await begun("\n".join([*map(call, tools), call("other"), call("half", '{"x": 1}'), calls('{"name": "half", ')]))
    results = await chat.call_tools(tools, timeout_s=0.05)
    errors = [result.error for result in results]
    assert errors[:5] == [
        "it has not answered within 0.05 s",
        "SystemExit: 3",
        "SystemExit: 3",
        "it was cancelled",
        "Mute: its text cannot be had: ValueError",
    ]
    assert "no JSON" in errors[5]
    assert (results[6].text, errors[6]) == ("a?", "")
    assert "'other'; there are: cancels, " in errors[7]
    assert errors[8].startswith("wrong arguments: ")
    assert results[9].call is None and "cannot be read" in results[9].text
    assert all(result.text == f"Error: {result.error}" for result in results[:9] if result.error)
    assert said_after(chat, 0).count("Error: ") == 9
    assert (await chat.generate()).content == DONE


async def test_a_tool_that_comes_right_is_tried_again_a_bounded_number_of_times() -> None:
    tries = {"late": 0, "never": 0}

    async def late() -> str:
        tries["late"] += 1
        if tries["late"] < 3:
            raise OSError("not yet")
        return "now"

    def never() -> str:
        tries["never"] += 1
        raise OSError("never")

    chat = await begun(call("late") + call("never"))
    results = await chat.call_tools({"late": late, "never": never}, retries=2)
    assert [(r.text, r.attempts) for r in results] == [("now", 3), ("Error: OSError: never", 3)]
    assert tries == {"late": 3, "never": 3}


async def test_by_choice_a_tool_fails_the_rollout() -> None:
    def broken() -> None:
        raise OSError("down")

    chat = await begun(call("broken"))
    before = chat.token_ids
    with pytest.raises(ToolError, match="broken gave nothing: OSError"):
        await chat.call_tools({"broken": broken}, fail=True)
    assert chat.token_ids == before


@pytest.mark.parametrize("plain", [True, False])
async def test_an_engine_that_goes_away_within_a_tool_is_no_answer(plain: bool) -> None:
    async def asks() -> None:
        raise EngineError("gone")

    def asks_plainly() -> None:
        raise EngineError("gone")

    chat = await begun(call("ask") + call("slow"))
    stopped = asyncio.Event()

    async def slow() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            stopped.set()

    with pytest.raises(EngineError, match="gone"):
        await chat.call_tools({"ask": asks_plainly if plain else asks, "slow": slow})
    assert stopped.is_set()


async def test_a_rollout_that_is_ended_ends_its_tools() -> None:
    began, stopped = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        began.set()
        try:
            await asyncio.sleep(1000)
        finally:
            stopped.set()

    chat = await begun(call("slow"))
    work = asyncio.create_task(chat.call_tools({"slow": slow}, timeout_s=100))
    await began.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await stopped.wait()


async def test_plain_tools_that_never_return_are_counted_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_runs, "MAX_HUNG", 2)
    release = threading.Event()
    try:
        chat = await begun(call("stuck") + call("stuck"), call("stuck"))
        await chat.call_tools({"stuck": release.wait}, timeout_s=0.05)
        await chat.generate()
        with pytest.raises(ToolError, match="2 calls of tools hang"):
            await chat.call_tools({"stuck": release.wait}, timeout_s=0.05)
    finally:
        release.set()
    await until(lambda: not tool_runs.num_hung())


async def test_a_tool_that_will_not_be_cancelled_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_runs, "_GRACE_S", 0.05)
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    chat = await begun(call("stubborn"))
    [result] = await chat.call_tools({"stubborn": stubborn}, timeout_s=0.05)
    assert "not answered" in result.error and tool_runs.num_hung() == 1
    release.set()
    await until(lambda: not tool_runs.num_hung())


async def test_a_result_without_end_is_cut() -> None:
    chat = await begun(call("long"))
    [result] = await chat.call_tools({"long": lambda: "x" * 10**7}, max_chars=10)
    assert result.text == "x" * 10 + "\n[cut: 10000000 characters]"


async def test_a_loop_over_calls_ends_where_the_chat_is_full() -> None:
    chat = await begun(*[call("again")] * 50, max_len=300)
    rounds = 0
    while await chat.call_tools({"again": lambda: "and again"}):
        await chat.generate()
        rounds += 1
    assert chat.is_full and 0 < rounds < 50 and len(chat.token_ids) <= 300


async def test_results_given_by_hand() -> None:
    chat = await begun(call("look") + call("look"), call("look"))
    turn = chat.turns[0]
    with pytest.raises(SchemaError, match="each of 2 calls"):
        chat.tools(["5"])
    with pytest.raises(SchemaError, match="each of 2 calls"):
        chat.tools("56")
    chat.tools(["5", "6"])
    assert said_after(chat, 0) == "<5><6>"
    with pytest.raises(SchemaError, match="follows a turn"):
        chat.tools(["5", "6"])
    await chat.generate()
    chat.tool("7", call=turn.tool_calls[0])
    assert said_after(chat, 1) == "<7>"


async def test_several_messages_and_a_system_message() -> None:
    chat = await begun("Hello.")
    chat.reply([{"role": "system", "content": "be brief"}, {"role": "user", "content": "go on"}])
    assert (
        family("qwen3")
        .decode(chat.token_ids)
        .endswith("Hello.<|im_end|>\n<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n")
    )


async def test_thinking_of_a_chat_and_of_a_turn() -> None:
    chat = await begun("a", "b", template_kwargs={"enable_thinking": False})
    chat.user("on", template_kwargs={"enable_thinking": True})
    assert family("qwen3").decode(chat.token_ids).endswith("<|im_start|>assistant\n")
    await chat.generate()
    chat.user("off")
    assert family("qwen3").decode(chat.token_ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


async def test_values_are_typed_by_the_tasks_tools_and_a_thought_begins_in_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
    text = "so\n</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>"
    engine = rollout_engine(family("qwen3.5"), [text], tools=tools)
    chat = engine.chat(engine.context.task)
    turn = await chat.generate()
    assert (turn.reasoning, turn.tool_calls) == ("so", (ToolCall("add", {"a": 5}),))


async def test_a_model_of_which_it_is_not_known_how_it_calls_is_refused() -> None:
    chat = await begun("x", tool_calls="none")
    with pytest.raises(SchemaError, match="does not show how"):
        await chat.call_tools({})
