"""Random conversations with models of the families in `tests/support/chat_templates.py`, played token by token."""

import json
from typing import Any

import msgspec
from hypothesis import strategies as st

from streamrl.data.tokenizer import Tokenizer
from streamrl.data.tool_calls import tool_call_format
from streamrl.producers.chat_format import ChatFormat
from tests.support.chat_templates import CLOSING

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}}]
LOOKS = [
    *("<|im_end|>", "<|eot_id|>", "<think>", "<tool_call>", "</tool_response>", "<｜Assistant｜>", "{{ x }}", "0123456789", "\n", "é"),
    "7510000057",
]
Message = dict[str, Any]
Place = tuple[int, list[int]]
contents = st.lists(st.sampled_from(LOOKS) | st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8), max_size=4).map(
    "".join
)


class Round(msgspec.Struct, frozen=True):
    """A turn of the model, and what it is answered."""

    content: str
    thought: str
    calls: int
    answers: tuple[str, ...]
    """Answers of the tools where there are calls, else of the user."""
    cut: bool
    """The turn ended at a length limit."""
    alone: bool
    """Each of its characters is a token."""


def rounds(name: str) -> st.SearchStrategy[list[Round]]:
    """Conversations that the family's template renders one message after the other."""
    result = st.tuples(contents) | st.tuples(contents, contents, contents)
    # Qwen3 and Qwen3.5 take thoughts away once the user speaks again, DeepSeek begins results anew in the first batch only, Llama 3 has
    # one call a turn and then no content.
    thoughts = contents.map(str.strip) if name.startswith("qwen") else st.just("")
    tools = st.builds(
        lambda content, thought, answers, cut, alone: Round(content, thought, len(answers), answers, cut, alone),
        st.just("") if name == "llama3" else contents.map(str.strip),
        thoughts,
        st.tuples(contents) if name == "llama3" else result,
        st.booleans(),
        st.booleans(),
    )
    user = st.builds(Round, contents.map(str.strip), st.just(""), st.just(0), st.tuples(contents), st.booleans(), st.booleans())
    if name == "qwen3.5":
        return st.lists(tools, max_size=3)
    if name == "deepseek":
        return st.tuples(st.lists(user, max_size=2), st.lists(tools, max_size=1)).map(lambda both: [*both[0], *both[1]])
    return st.lists(user, max_size=2).flatmap(lambda before: st.lists(tools, max_size=3).map(lambda after: [*before, *after]))


def called(name: str, number: int) -> Message:
    arguments: Any = {"at": f"place {number}"}
    return {
        "id": f"call{number:05}",
        "type": "function",
        "function": {"name": "look", "arguments": json.dumps(arguments) if name == "deepseek" else arguments},
    }


def tools_for(tokenizer: Tokenizer) -> Any:
    """TOOLS, or None for a template that shows none."""
    return TOOLS if "tools" in tokenizer.chat_template else None


def played(name: str, tokenizer: Tokenizer, opening: list[Message], made: list[Round]) -> tuple[list[int], list[Message], list[Place]]:
    """A conversation as a producer has it: (all tokens, the same in messages, where each turn stands with its tokens)."""
    form, chat = tool_call_format(tokenizer), ChatFormat(tokenizer, chat_template=True)
    messages, tools = list(opening), tools_for(tokenizer)
    tokens = chat.prompt(messages, tools)
    turns: list[Place] = []
    for each in made:
        calls = [called(name, number) for number in range(each.calls)]
        message: Message = {"role": "assistant", "content": each.content, "reasoning_content": each.thought}
        answers: list[Message] = [{"role": "tool" if calls else "user", "content": text} for text in each.answers]
        text = written(name, each, calls)
        if not any(mark in each.content + each.thought for mark in LOOKS):
            parsed = form.parse(text, tools, thinking=chat.opens_thought(tokens))
            assert (parsed.content, parsed.reasoning) == (each.content, each.thought)
            assert [call.name for call in parsed.tool_calls] == ["look"] * each.calls
        ids = [token for character in text for token in tokenizer.encode(character)] if each.alone else tokenizer.encode(text)
        if not (each.cut and ids and ids[-1] not in tokenizer.stop_ids):
            ids += tokenizer.encode(CLOSING[name])
        turns.append((len(tokens), ids))
        tokens = [*tokens, *ids]
        tokens += chat.replies(answers, last_token=ids[-1], tools=tools)
        messages += [message | ({"tool_calls": calls} if calls else {}), *answers]
    return tokens, messages, turns


def written(name: str, each: Round, calls: list[Message]) -> str:
    """The text of a turn as a model of the family writes it."""
    functions = [call["function"] for call in calls]
    if name == "qwen3":
        thought = f"<think>\n{each.thought}\n</think>\n\n" if each.thought else ""
        texts = [f'<tool_call>\n{{"name": "{f["name"]}", "arguments": {json.dumps(f["arguments"])}}}\n</tool_call>' for f in functions]
        return thought + "\n".join(([each.content] if each.content else []) + texts)
    if name == "qwen3.5":
        texts = [
            f"<tool_call>\n<function={f['name']}>\n<parameter=at>\n{f['arguments']['at']}\n</parameter>\n</function>\n</tool_call>"
            for f in functions
        ]
        return f"{each.thought}\n</think>\n\n{each.content}" + ("\n\n" if each.content else "") + "\n".join(texts)
    if name == "llama3":
        return each.content + "".join(f'{{"name": "{f["name"]}", "parameters": {json.dumps(f["arguments"])}}}' for f in functions)
    texts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{f['name']}\n```json\n{f['arguments']}\n```<｜tool▁call▁end｜>" for f in functions
    ]
    return each.content + (f"<｜tool▁calls▁begin｜>{chr(10).join(texts)}<｜tool▁calls▁end｜>" if texts else "")
