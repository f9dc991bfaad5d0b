from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from streamrl.data.characters import write_tokenizer
from streamrl.data.tokenizer import Tokenizer, load_tokenizer
from streamrl.page.conversation import Marks, conversation, marks_of
from streamrl.schemas.samples import Sample, TurnSpan, VersionSpan
from streamrl.schemas.versions import Version

CHAT_ML = """{% for m in messages %}{% if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}{% else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_tokenizer(tmp_path)
    return load_tokenizer(tmp_path)


def sample(tokenizer: Tokenizer, *parts: tuple[str, str], timed: bool = False) -> Sample:
    """A sample of texts, each by the `model` or somebody else."""
    ids, spans, turns = list[int](), list[VersionSpan](), list[TurnSpan]()
    for who, text in parts:
        some = tokenizer.encode(text)
        if who == "model":
            at = 10.0 * len(ids)
            times: dict[str, Any] = {"asked_s": at, "began_s": at + 1, "finished_s": at + 2} if timed else {}
            turns.append(TurnSpan(start=len(ids), length=len(some), engine="engine-1", finish_reason="stop", **times))
        spans.append(VersionSpan(len(some), Version(0, 3) if who == "model" else None))
        ids += some
    kind = {"run": "r", "policy": "policy", "source": "main", "task": 1, "rollout": 0}
    mask = np.zeros(len(ids), np.uint8)
    logprobs = np.zeros(len(ids), np.float32)
    return Sample(
        **kind, tokens=np.array(ids, np.int32), loss_mask=mask, logprobs=logprobs, spans=tuple(spans), turns=tuple(turns) if timed else ()
    )


def said(one: Sample, tokenizer: Tokenizer, marks: Marks | None = None) -> list[tuple[str, bool, str]]:
    found = conversation(one, tokenizer.decode, marks_of(tokenizer) if marks is None else marks)
    return [(message.role, message.sampled, message.text) for message in found]


def test_roles_texts_and_what_the_model_wrote_are_told_apart(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    prompt = tokenizer.apply_chat_template([*messages, {"role": "user", "content": "2+3"}])
    one = sample(
        tokenizer,
        ("", prompt),
        ("model", "<call>2+3<|end|>"),
        ("", "<|tool|>5<|end|><|assistant|>"),
        ("model", "It is 5<|end|>"),
        timed=True,
    )
    assert said(one, tokenizer) == [
        ("system", False, "Add."),
        ("user", False, "1+1"),
        ("assistant", False, "2"),
        ("user", False, "2+3"),
        ("assistant", True, "<call>2+3<|end|>"),
        ("tool", False, "5"),
        ("assistant", True, "It is 5<|end|>"),
    ]
    found = conversation(one, tokenizer.decode, marks_of(tokenizer))
    assert sum(message.num_tokens for message in found) == len(one.tokens)
    assert [message.seconds for message in found if message.sampled] == [2.0, 2.0]
    assert found[5].seconds == one.turns[1].asked_s - one.turns[0].finished_s
    assert {message.engine for message in found if message.sampled} == {"engine-1"}


def test_headers_of_models_and_parts_that_nobody_sampled(tokenizer: Tokenizer) -> None:
    one = sample(tokenizer, ("", "<|user|>hi<|end|><|assistant|>"), ("model", "<|tool|>all is well<|end|><|user|>thanks"))
    assert said(one, tokenizer) == [("user", False, "hi"), ("assistant", True, "<|tool|>all is well<|end|><|user|>thanks")]
    one = sample(tokenizer, ("", "12"), ("model", "="), ("", "7"), ("model", "7"))
    parts = [("prompt", False, "12"), ("assistant", True, "="), ("environment", False, "7"), ("assistant", True, "7")]
    assert said(one, tokenizer, Marks({})) == parts
    assert marks_of(None) == Marks({})
    assert said(sample(tokenizer), tokenizer) == []
    assert said(sample(tokenizer, ("model", "x")), tokenizer) == [("assistant", True, "x")]


def test_tools_that_speak_as_users_are_tools(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(CHAT_ML)
    chat_ml = load_tokenizer(tmp_path)
    prompt = chat_ml.apply_chat_template([{"role": "user", "content": "2+3"}])
    answer = "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    one = sample(chat_ml, ("", prompt), ("model", "x<|im_end|>"), ("", answer), ("model", "5<|im_end|>"))
    assert [role for role, _, _ in said(one, chat_ml)] == ["user", "assistant", "tool", "assistant"]
    assert said(one, chat_ml)[2][2].startswith("5")


def test_turns_and_conversations_are_cut_where_they_end(tokenizer: Tokenizer) -> None:
    one = sample(tokenizer, ("", "a"), ("model", "bc"))
    one = msgspec.structs.replace(one, turns=(TurnSpan(start=1, length=1), TurnSpan(start=2, length=1)))
    assert [text for _, _, text in said(one, tokenizer, Marks({}))] == ["a", "b", "c"]
    one = sample(tokenizer, *[part for _ in range(40) for part in (("", "a" * 9_000), ("model", "b" * 30_000))])
    found = conversation(one, tokenizer.decode, Marks({}))
    assert max(len(message.text) for message in found) == 20_000
    assert sum(len(message.text) for message in found) < 230_000
