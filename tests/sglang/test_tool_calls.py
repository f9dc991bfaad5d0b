"""Calls are read as SGLang's own parsers read them, in what models write when nothing is wrong."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import msgspec
import pytest

from streamrl.data.tool_calls import ToolCall, tool_call_format
from tests.support.chat_templates import family
from tests.support.needs import need, sglang_python

pytestmark = pytest.mark.process

THEIRS = """
import json, sys
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
asked = json.load(sys.stdin)
tools = [Tool(type="function", function=Function(**tool["function"])) for tool in asked["tools"]]
found = []
for name, text in asked["texts"]:
    content, calls = FunctionCallParser(tools, name).parse_non_stream(text)
    found.append([content, [[call.name, json.loads(call.parameters)] for call in calls]])
print(json.dumps(found))
"""
PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "on": {"type": "boolean"},
    "list": {"type": "array"},
    "table": {"type": "object"},
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": PROPERTIES}}}]
SEPARATE = {"text": "a b\nc", "n": -3, "x": 0.5, "on": True, "list": [1, "two"], "table": {"a": {"b": None}}}
JSON = json.dumps(SEPARATE)
XML = "".join(
    f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n" for key, value in SEPARATE.items()
)
V3 = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{JSON}\n```<｜tool▁call▁end｜>"
V31 = f"<｜tool▁call▁begin｜>look<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
HERMES = f'<tool_call>\n{{"name": "look", "arguments": {JSON}}}\n</tool_call>'
LLAMA = f'{{"name": "look", "parameters": {JSON}}}'
CASES = [
    ("hermes", "qwen25", f"Let me see.\n{HERMES}\n{HERMES}"),
    ("hermes", "hermes", f"Let me see.\n{HERMES}\n{HERMES}"),
    ("hermes", "qwen25", "No call at all."),
    ("qwen3_coder", "qwen3_coder", f"Let me see.\n<tool_call>\n<function=look>\n{XML}</function>\n</tool_call>"),
    ("qwen3_coder", "qwen3_coder", "<tool_call>\n<function=look>\n</function>\n</tool_call>"),
    ("llama3", "llama3", f"<|python_tag|>{LLAMA}; {LLAMA}"),
    ("llama3", "llama3", LLAMA),
    ("deepseek", "deepseekv3", f"Let me see.<｜tool▁calls▁begin｜>{V3}\n{V3}<｜tool▁calls▁end｜>"),
    ("deepseek", "deepseekv31", f"Let me see.<｜tool▁calls▁begin｜>{V31}{V31}<｜tool▁calls▁end｜>"),
]


def test_calls_are_those_that_sglang_reads() -> None:
    need("sglang")
    asked = json.dumps({"tools": TOOLS, "texts": [[name, text] for _, name, text in CASES]})
    done = subprocess.run([str(sglang_python()), "-c", THEIRS], input=asked, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = msgspec.json.decode(done.stdout.splitlines()[-1])
    for (mine, name, text), (content, calls) in zip(CASES, theirs, strict=True):
        turn = tool_call_format(family("qwen3"), mine).parse(text, TOOLS)
        assert (turn.content, list(turn.tool_calls)) == (content.strip(), [ToolCall(*call) for call in calls]), (name, text)
