from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.data.tokenizer import Tokenizer, load_tokenizer
from streamrl.errors import ConfigError, SchemaError
from streamrl.producers.chat_format import ChatFormat
from tests.producers.policies import make_model

# As Qwen3's template does: an assistant's turn after the last question is shown with its (empty) thoughts, an earlier one without, and a
# newline follows every message.
THINKING = """\
{%- set last = namespace(user=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{{- '<|' + message.role + '|>' }}
{%- if message.role == 'assistant' and loop.index0 > last.user %}{{- '[]' }}{%- endif %}
{{- message.content + '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
REVERSED = "{%- for message in messages | reverse %}{{- '<|' + message.role + '|>' + message.content }}{%- endfor %}"


def tokenizer_with(directory: Path, template: str | None = None) -> Tokenizer:
    make_model(directory)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return load_tokenizer(directory)


@pytest.mark.parametrize("role", ["tool", "user"])
@pytest.mark.parametrize("ended", [True, False])
def test_a_reply_in_a_template_with_thoughts(tmp_path: Path, role: str, ended: bool) -> None:
    tokenizer = tokenizer_with(tmp_path / "model", THINKING)
    last = tokenizer.encode("<|end|>" if ended else "7")[0]
    reply = ChatFormat(tokenizer, chat_template=True).reply(role, "five", last_token=last)
    assert tokenizer.decode(reply) == ("" if ended else "<|end|>") + f"\n<|{role}|>five<|end|>\n<|assistant|>"


def test_a_template_that_appends_nothing_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path / "model", REVERSED)
    with pytest.raises(SchemaError, match="cannot be told apart") as caught:
        ChatFormat(tokenizer, chat_template=True).reply("tool", "five", last_token=5)
    assert "chat.append" in caught.value.hint


def test_a_role_the_template_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown role judge"):
        ChatFormat(tokenizer_with(tmp_path / "model"), chat_template=True).reply("judge", "five", last_token=5)


def test_contents_may_look_like_anything(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path / "model")
    reply = ChatFormat(tokenizer, chat_template=True).reply("tool", "0123456789 0123456789", last_token=5)
    assert tokenizer.decode(reply) == "<|tool|>0123456789 0123456789<|end|><|assistant|>"
