"""Chat templates in the shapes of the field's families, written here, and small tokenizers that have their special tokens.

Each has the traps of its family: thoughts that earlier turns lose, a thought that the prompt opens, results grouped into one user turn, a
beginning-of-sequence token, a closing token without a newline, results after which nothing begins the model's turn.
"""

from functools import cache

import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.trainers

from streamrl.data.tokenizer import Tokenizer

_LAST_QUERY = """\
{%- set seen = namespace(query=0) %}
{%- for m in messages %}
{%- if m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
{%- set seen.query = loop.index0 %}
{%- endif %}
{%- endfor %}
"""
_RESULT = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + text + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
"""
QWEN3 = (
    """\
{%- if tools %}
{{- '<|im_start|>system\\nTools:\\n' + (tools | tojson) }}
{{- '\\nTo call one: <tool_call>\\n{"name": <name>, "arguments": <table>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
"""
    + _LAST_QUERY
    + """\
{%- for m in messages %}
{%- set text = m.content %}
{%- if m.role in ('user', 'system') %}{{- '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set thought = m.reasoning_content or '' %}
{%- if not m.reasoning_content is string and '</think>' in text %}
{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set text = text.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > seen.query and (loop.last or thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- set text = text.lstrip('\\n') %}
{%- endif %}
{{- text }}
{%- for call in m.tool_calls or [] %}
{{- '\\n' if text or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
"""
    + _RESULT
    + """\
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
)
QWEN35 = (
    """\
{%- if tools %}
{{- '<|im_start|>system\\n<tools>' + (tools | tojson) + '</tools>\\n<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\n' }}
{{- 'VALUE\\n</parameter>\\n</function>\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
"""
    + _LAST_QUERY
    + """\
{%- for m in messages %}
{%- set text = m.content | trim %}
{%- if m.role == 'system' and not loop.first %}{{- raise_exception('a system message must be the first') }}
{%- elif m.role in ('user', 'system') %}{{- '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set thought = (m.reasoning_content or '') | trim %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > seen.query %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
{{- text }}
{%- for call in m.tool_calls or [] %}
{{- '\\n\\n' if loop.first and text else ('' if loop.first else '\\n') }}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
"""
    + _RESULT
    + """\
{%- else %}{{- raise_exception('unknown role') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
)
LLAMA3 = """\
{{- bos_token }}
{%- macro head(role) %}{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{%- endmacro %}
{%- set date = date_string if date_string is defined else '26 Jul 2024' %}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- head('system') + ('Environment: ipython\\n' if tools else '') + 'Today Date: ' + date + '\\n\\n' + system + '<|eot_id|>' }}
{%- if tools %}
{{- head('user') + 'Answer with {"name": name, "parameters": table of arguments}.\\n\\n' }}
{%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\\n\\n' }}{%- endfor %}
{{- (messages[0].content | trim) + '<|eot_id|>' }}{%- set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set call = m.tool_calls[0].function %}
{{- head('assistant') + '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{%- elif m.role == 'tool' %}{{- head('ipython') + (m.content | tojson) }}
{%- else %}{{- head(m.role) + (m.content | trim) }}
{%- endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- head('assistant') }}{%- endif %}
"""
DEEPSEEK = """\
{{- bos_token }}
{%- for m in messages if m.role == 'system' %}{{- m.content }}{%- endfor %}
{%- if tools %}{{- '\\n## Tools\\n' + (tools | tojson) + '\\n' }}{%- endif %}
{%- set state = namespace(tool=false, first=true) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{%- set state.tool = false %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' %}
{%- if state.tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- else %}{{- '<｜Assistant｜>' }}{%- endif %}
{%- set state.tool = false %}
{{- m.content.split('</think>')[-1] }}
{%- for call in m.tool_calls or [] %}
{{- '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' + call.function.arguments }}
{{- '\\n```<｜tool▁call▁end｜>' + ('<｜tool▁calls▁end｜>' if loop.last else '') }}
{%- endfor %}
{{- '<｜end▁of▁sentence｜>' }}
{%- elif m.role == 'tool' %}
{{- '<｜tool▁outputs▁begin｜>' if state.first else '' }}
{%- set state.tool = true %}{%- set state.first = false %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if state.tool %}{{- '<｜tool▁outputs▁end｜>' }}
{%- elif add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}
"""
TEMPLATES = {"qwen3": QWEN3, "qwen3.5": QWEN35, "llama3": LLAMA3, "deepseek": DEEPSEEK}
BOS = "<|begin_of_text|>"
CLOSING = {"qwen3": "<|im_end|>", "qwen3.5": "<|im_end|>", "llama3": "<|eot_id|>", "deepseek": "<｜end▁of▁sentence｜>"}
"""The token with which a model ends its turn."""
SPECIALS = (
    *(BOS, "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    *(f"<｜tool▁{name}▁{place}｜>" for name in ("calls", "call", "outputs", "output") for place in ("begin", "end")),
    "<｜tool▁sep｜>",
)
_OTHER_STOPS = ("<|endoftext|>", "<|eom_id|>")


@cache
def _backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700,
        show_progress=False,
        special_tokens=[tokenizers.AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator([QWEN3, QWEN35, LLAMA3, DEEPSEEK], trainer)
    return backend


@cache
def tokenizer_for(template: str, closing: str) -> Tokenizer:
    """A byte-level tokenizer with all special tokens, that template, and `closing` as its end of sequence; compiled once for all tests."""
    stops = [found for token in _OTHER_STOPS if (found := _backend().token_to_id(token)) is not None]
    special = {"bos_token": BOS, "eos_token": closing}
    return Tokenizer(_backend(), special=special, template=template, stop_ids=stops, where="tests/support/chat_templates.py")


def family(name: str) -> Tokenizer:
    """The tokenizer of one of TEMPLATES."""
    return tokenizer_for(TEMPLATES[name], CLOSING[name])
