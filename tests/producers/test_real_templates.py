"""The models' own chat templates, as the package trl ships copies of them, with the small tokenizers of the tests."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from streamrl.data.tokenizer import Tokenizer
from streamrl.data.tool_calls import tool_call_format
from streamrl.producers.chat_format import ChatFormat
from tests.support.chat_templates import CLOSING, tokenizer_for
from tests.support.conversations import Round, called, contents, played, rounds, tools_for
from tests.support.needs import chat_templates

pytestmark = pytest.mark.needs("chat templates")

WHOLE = {"qwen3": "qwen3", "qwen3_5_think": "qwen3.5", "qwen3_6": "qwen3.5", "llama3_1": "llama3", "llama3_2": "llama3"}
"""Those that render messages one after the other, as the shape of that family does."""
FORMS = {
    **{name: "hermes" for name in ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl")},
    **{name: "qwen3_coder" for name in ("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8", "nemotron_3_nano")},
    **{name: "llama3" for name in ("llama3_1", "llama3_2")},
    **{name: "deepseek" for name in ("deepseekv3", "deepseek_r1_distill")},
    **{name: "none" for name in ("llama3", "gemma3", "phi3", "glm4moe", "gptoss")},
}
APPENDS = [name for name in FORMS if name not in ("gemma3", "phi3", "gptoss")]
"""Those that show a tool's results, and append them."""


def real(name: str) -> tuple[Tokenizer, str]:
    """The template with a tokenizer, and the token that closes its turns."""
    folder = chat_templates()
    assert folder is not None
    text = (folder / f"{name}.jinja").read_text(encoding="utf-8")
    closing = next((token for token in CLOSING.values() if token in text), "<|endoftext|>")
    return tokenizer_for(text, closing), closing


@pytest.mark.parametrize(("name", "form"), FORMS.items())
def test_the_form_of_calls_is_read_from_the_template(name: str, form: str) -> None:
    assert tool_call_format(real(name)[0]).name == form


@pytest.mark.parametrize(("name", "shape"), WHOLE.items())
def test_appended_tokens_say_what_the_template_says_of_the_whole(name: str, shape: str) -> None:
    tokenizer, _ = real(name)

    @settings(max_examples=25, deadline=None)
    @given(contents, contents, rounds(shape))
    def check(system: str, question: str, made: list[Round]) -> None:
        opening = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        tokens, messages, _ = played(shape, tokenizer, opening, made)
        assert tokenizer.decode(tokens) == tokenizer.unveiled(tokenizer.apply_chat_template(messages, tools=tools_for(tokenizer)))

    check()


@pytest.mark.parametrize("name", APPENDS)
@pytest.mark.parametrize("role", ["tool", "user"])
def test_what_is_appended_is_how_the_template_ends_such_a_conversation(name: str, role: str) -> None:
    tokenizer, closing = real(name)
    tools = tools_for(tokenizer)
    asked: list[dict[str, Any]] = [{"role": "user", "content": "look"}, {"role": "assistant", "content": "", "reasoning_content": "hm"}]
    if role == "tool":
        asked[1]["tool_calls"] = [called("deepseek" if name.startswith("deepseek") else "other", 0)]
    else:
        asked[1]["content"] = "no"
    messages = [{"role": role, "content": "five"}]
    reply = ChatFormat(tokenizer, chat_template=True).replies(messages, last_token=tokenizer.encode(closing)[0], tools=tools)
    text = tokenizer.decode(reply)
    assert "five" in text
    assert tokenizer.apply_chat_template([*asked, *messages], tools=tools).endswith(text)
