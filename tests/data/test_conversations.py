"""Whole conversations as training data: the template's own ids, and a mask that holds what the model is to write."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.data.conversations import encode_conversation, is_answer, split
from streamrl.data.tokenizer import Tokenizer
from streamrl.errors import ConfigError, SchemaError
from tests.support.chat_templates import CLOSING, TEMPLATES, family, tokenizer_for
from tests.support.errors import raises
from tests.support.needs import chat_templates

CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ASKED = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]
TWICE = [{"role": "system", "content": "be brief"}, *ASKED, {"role": "user", "content": "4?"}, {"role": "assistant", "content": "four"}]
CALLED = [
    ASKED[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "6", "tool_call_id": "a", "name": "add"},
    {"role": "assistant", "content": "six"},
]


def trained(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    """The texts that are trained on, in order; the ids must be those of the rendered conversation."""
    ids, mask = encode_conversation(tokenizer, messages, **options)
    kwargs = options.get("template_kwargs")
    assert ids == tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=False, template_kwargs=kwargs))
    runs: list[list[int]] = []
    for place, (token, on) in enumerate(zip(ids, mask, strict=True)):
        if on and (place == 0 or not mask[place - 1]):
            runs.append([])
        if on:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


def test_every_turn_of_the_assistant_is_trained_with_its_end() -> None:
    for name, end, first, last in (
        ("qwen3", "<|im_end|>", "", "<think>\n\n</think>\n\n"),  # the newest turn's empty thought is the model's own
        ("qwen3.5", "<|im_end|>", "", "\n</think>\n\n"),  # here the prompt has opened it
        ("llama3", "<|eot_id|>", "", ""),
        ("deepseek", "<｜end▁of▁sentence｜>", "", ""),
    ):
        assert trained(family(name), TWICE) == [f"{first}5{end}", f"{last}four{end}"]


def test_thoughts_and_calls_are_trained_where_the_template_shows_them() -> None:
    for name in ("qwen3", "qwen3.5"):
        assert trained(family(name), TWICE, template_kwargs={"enable_thinking": False}) == ["5<|im_end|>", "four<|im_end|>"]
    thought = [ASKED[0], {"role": "assistant", "content": "5", "reasoning_content": "two and three"}]
    assert trained(family("qwen3"), thought) == ["<think>\ntwo and three\n</think>\n\n5<|im_end|>"]
    # Of an earlier turn it is left out, in the text and so in what is trained.
    assert trained(family("qwen3"), [*thought, *ASKED])[0] == "5<|im_end|>"
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert trained(family("qwen3"), CALLED) == [call, "<think>\n\n</think>\n\nsix<|im_end|>"]
    assert trained(family("llama3"), CALLED) == ['{"name": "add", "parameters": {"a": 1}}<|eot_id|>', "six<|eot_id|>"]
    text = {**CALL, "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [CALLED[0], {**CALLED[1], "tool_calls": [text]}, *CALLED[2:]]
    assert trained(family("deepseek"), messages)[1] == "six<｜end▁of▁sentence｜>"


@pytest.mark.parametrize("field", ["weight", "step_loss_mask"])
def test_a_turn_of_weight_0_is_read_and_not_trained(field: str) -> None:
    messages = [*TWICE[:2], {**TWICE[2], field: 0}, TWICE[3], {**TWICE[4], field: 1}]
    assert trained(family("llama3"), messages) == ["four<|eot_id|>"]
    with pytest.raises(SchemaError, match="turn to train on"):
        encode_conversation(family("llama3"), [*TWICE[:2], {**TWICE[2], field: 0}])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text("ab 1\n.é", max_size=8), min_size=2, max_size=7), st.sampled_from(sorted(TEMPLATES)))
def test_what_is_trained_is_the_assistants_and_all_of_it(texts: list[str], name: str) -> None:
    """A run of trained tokens for each turn, which ends with the turn's text and its end."""
    messages = [{"role": ("user", "assistant")[place % 2], "content": f"x{text}x"} for place, text in enumerate(texts)]
    end = CLOSING[name]
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    shown = trained(family(name), messages)
    assert len(shown) == len(said)
    for text, content in zip(shown, said, strict=True):
        assert text.endswith(content + end)
        assert text.count(content + end) == 1


def test_what_is_no_conversation_or_ends_no_turn_is_refused() -> None:
    qwen = family("qwen3")
    for wrong in (
        [{"content": "x"}],
        ["x"],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": 7}],
        [],
        [{"role": 1, "content": "x"}],
    ):
        with pytest.raises(SchemaError):
            encode_conversation(qwen, wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(SchemaError, match="turn to train on"):
        encode_conversation(qwen, ASKED[:1])
    with pytest.raises(ConfigError):
        encode_conversation(family("qwen3.5"), [*ASKED, {"role": "system", "content": "late"}, *ASKED])
    bare = tokenizer_for("{% for m in messages %}{{ m.role + ': ' + m.content + ' ' }}{% endfor %}", "<|im_end|>")
    with pytest.raises(SchemaError, match="no token that ends"):
        encode_conversation(bare, ASKED)


@pytest.mark.parametrize("text", ["5<|im_end|>", "<|im_start|>assistant\n5"])
def test_a_text_that_begins_or_ends_turns_is_trained_nowhere(text: str) -> None:
    """The assistant's is refused; the user's is characters, among which no turn begins or ends."""
    qwen, [user, answer] = family("qwen3"), ASKED
    with raises(SchemaError, number=2):
        encode_conversation(qwen, [user, {**answer, "content": text}])
    ids, mask = encode_conversation(qwen, [{**user, "content": text}, answer])
    expected, expected_mask = encode_conversation(qwen, ASKED)
    assert [token for token, on in zip(ids, mask, strict=True) if on] == [
        token for token, on in zip(expected, expected_mask, strict=True) if on
    ]
    assert [ids.count(qwen.encode(one)[0]) for one in ("<|im_end|>", "<|im_start|>")] == [2, 2]
    assert text in qwen.decode(ids)


def test_a_conversation_is_split_before_the_first_turn() -> None:
    assert split(TWICE) == (TWICE[:2], TWICE[2:])
    assert split(ASKED[:1]) == (ASKED[:1], [])
    assert is_answer(TWICE[2:])
    assert not any(map(is_answer, (["5", "6"], "5", [], None, [{"role": "user"}])))


LIKE_TRL = ("qwen2_5_vl", "qwen3_instruct_2507", "qwen3_vl", "nemotron_3_nano")
"""Training templates that render what the plain ones do, and mark the turns as they are generated."""


@pytest.mark.needs("chat templates")
@pytest.mark.parametrize("name", LIKE_TRL)
@pytest.mark.parametrize("messages", [ASKED, TWICE, CALLED])
def test_the_mask_is_that_of_templates_with_generation_marks(name: str, messages: list[dict[str, Any]]) -> None:
    """transformers' own mask by the marks of trl's training templates; these train the newline behind the end, too."""
    from transformers import PreTrainedTokenizerFast

    from tests.support.chat_templates import _backend  # pyright: ignore[reportPrivateUsage]

    folder = chat_templates()
    assert folder is not None
    tokenizer = tokenizer_for((folder / f"{name}.jinja").read_text(encoding="utf-8"), "<|im_end|>")
    theirs = PreTrainedTokenizerFast(tokenizer_object=_backend(), eos_token="<|im_end|>").apply_chat_template(
        messages,
        chat_template=(folder / f"{name}_training.jinja").read_text(encoding="utf-8"),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    if messages is CALLED and name == "qwen2_5_vl":  # it leaves the call out, and would train an empty turn in its place
        with raises(ConfigError, missing="tool_calls"):
            encode_conversation(tokenizer, messages)
        return
    ids, mask = encode_conversation(tokenizer, messages)
    assert theirs["input_ids"] == ids  # pyright: ignore[reportCallIssue, reportArgumentType]
    more = [token for token, own, other in zip(ids, mask, theirs["assistant_masks"], strict=True) if own != bool(other)]  # pyright: ignore
    assert not [place for place, own in enumerate(mask) if own and not theirs["assistant_masks"][place]]  # pyright: ignore
    assert {tokenizer.decode([token]) for token in more} == {"\n"}
    assert len(more) == sum(message["role"] == "assistant" for message in messages)
