"""`data.train` from a taskset, where the file is not there yet: a row a task, whose prompt is what its episode first asks the model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from streamrl.bridges.verifiers.guests import LAST_WORDS_S, Spec, guest, wrong
from streamrl.config.bridges import split
from streamrl.config.paths import parse_dataset
from streamrl.config.tree import Config
from streamrl.data.tokenizer import Tokenizer, load_tokenizer
from streamrl.errors import ConfigError


async def write_rows(config: Config, model: Path, note: Callable[[str], None]) -> None:
    """Write `data.train`, whose rows are those of the taskset that `producer.function` names.

    Raises:
        ConfigError: the taskset cannot be read, or its prompts are other tokens by verifiers' renderer than by the policy's chat template.
    """
    _, taskset = split(config.producer.function)
    path = Path(parse_dataset(config.data.train).path)
    found = await _read(taskset, config, model)
    tokenizer = load_tokenizer(model)
    rows = [_row(one, config, tokenizer) for one in sorted(found, key=lambda one: one["idx"])]
    await asyncio.to_thread(_write, path, rows)
    note(f"{len(rows)} tasks of verifiers:{taskset} are the rows of {path}; without the file they are read again")


async def _read(taskset: str, config: Config, model: Path) -> list[dict[str, Any]]:
    spec = Spec(mode="rows", taskset=taskset, options=config.producer.options, model_dir=str(model), max_len=config.model.max_len)
    found: list[dict[str, Any]] = []
    async with guest(config.producer.python, spec) as running:
        async for said in running.lines():
            if said.error:
                raise wrong(said, taskset)
            if said.done:
                break
            if said.row:
                found.append(said.row)
        else:
            code = await running.end(patience_s=LAST_WORDS_S)
            raise ConfigError(
                f"expected the rows of verifiers:{taskset}, its process ended with exit code {code}",
                hint="the lines above are its own",
                key="producer.function",
            )
    return found


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """All rows or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    half.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    half.replace(path)


def _row(one: Mapping[str, Any], config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    data, tools = config.data, one["tools"]
    if tools and not data.tools_key:
        raise ConfigError(
            f"expected a field for the tools of task {one['idx']} of the taskset, got none",
            hint='set data.tools_key = "tools"',
            key="data.tools_key",
        )
    ids = tokenizer.encode(tokenizer.apply_chat_template(one["messages"], tools=tools, add_generation_prompt=True))
    if ids != one["token_ids"] and config.gateway.prompts == "task":
        raise ConfigError(
            f"expected the prompt of task {one['idx']} to be the same tokens by verifiers' renderer as by the policy's chat template, got "
            f"{_shown(tokenizer, one['token_ids'])} instead of {_shown(tokenizer, ids)}",
            hint='choose another producer.options.renderer, such as {name = "default"}, which takes the template too',
            key="producer.options",
        )
    row = {data.prompt_key: one["messages"], data.metadata_key: {"verifiers": {"idx": one["idx"], "key": one["key"]}}}
    return row | ({data.tools_key: tools} if tools else {})


def _shown(tokenizer: Tokenizer, ids: list[int]) -> str:
    text = tokenizer.decode(ids)
    return repr(text if len(text) < 400 else f"{text[:200]} ... {text[-200:]}")
