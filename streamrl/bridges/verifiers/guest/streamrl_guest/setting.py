"""A taskset and its environment, as `producer.options` has them: verifiers' own `env` block, and three keys beside it.

```toml
[producer.options]
select = {limit = 1000}                     # verifiers' SelectConfig: which tasks
renderer = {name = "default"}               # verifiers' RendererConfig: how messages become tokens
traces = "folder"                           # a file a rollout: verifiers' record of it
taskset = {...}                             # from here on an EnvConfig
agent = {max_turns = 4, harness = {...}}
```
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import TypeAdapter
from renderers import RendererConfig
from renderers.base import create_renderer, load_tokenizer

OURS = ("select", "renderer", "traces")
HARNESS = "streamrl_chat"
_BASH = "bash"
"""Harness of a role that nobody has chosen one for. It runs what the model says on this machine, so it must be asked for by name."""


class Setting:
    """Raises what pydantic or the taskset raises for what cannot be.

    Args:
        spec: with `taskset`, the name of an installed one or a file, `options` and `model_dir`.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        options = dict(spec["options"])
        self.select = vf.SelectConfig(**options.pop("select", {}))
        renderer = options.pop("renderer", None)
        self.renderer = None if renderer is None else TypeAdapter(RendererConfig).validate_python(renderer)
        self.traces = Path(options.pop("traces")) if "traces" in options else None
        self.model_dir: str = spec["model_dir"]
        self._config = _config(_ident(spec["taskset"]), options)
        self.env = vf.load_environment(self._config)
        self._tasks: Iterator[vf.Task] = iter(())
        self._seen: dict[int, vf.Task] = {}
        self._left = True

    def tasks(self) -> Iterator[vf.Task]:
        """Those that are selected; raises ValueError when there is no end of them."""
        chosen = self.env.taskset.select(self.select)
        if not chosen.bounded:
            raise ValueError("expected a taskset with an end, got an infinite one; set producer.options.select = {limit = 1000}")
        return iter(chosen)

    def task(self, idx: int) -> vf.Task | None:
        """The task at this position of the taskset; None: it is not among those that are selected."""
        if self._left:
            self._seen = {task.data.idx or 0: task for task in self.tasks()}
            self._left = False
        return self._seen.get(idx)

    def make_renderer(self) -> Any:
        """As verifiers' training client makes it."""
        return create_renderer(load_tokenizer(self.model_dir), self.renderer)


def _ident(taskset: str) -> str:
    if not taskset.endswith(".py"):
        return taskset
    path = Path(taskset)
    sys.path.append(str(path.parent))
    return path.stem


def _config(ident: str, options: Mapping[str, Any]) -> vf.EnvConfig:
    raw: dict[str, Any] = {**options, "taskset": {**options.get("taskset", {}), "id": ident}}
    unchosen = vf.default_harness_id(ident) == _BASH
    for name, field in vf.env_config_type(ident, raw.get("id") or "").model_fields.items():
        role = field.default
        if not isinstance(role, vf.AgentConfig):
            continue
        said = dict(raw.get(name) or {})
        if unchosen and role.harness is None:
            said.setdefault("harness", {"id": HARNESS})
        if "runtime" not in role.model_fields_set:
            said.setdefault("runtime", {"type": "subprocess"})
        raw[name] = said
    return vf.resolve_env_config(raw)
