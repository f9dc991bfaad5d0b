"""Code that a configuration names: what runs when it is loaded, and what it was made of."""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from streamrl.config.bridges import beside, bridges, split
from streamrl.config.code_copies import is_module, source_of
from streamrl.config.loss import OF_LOGITS, is_function
from streamrl.config.reward_kinds import ASKS, BOXED
from streamrl.config.tree import Config
from streamrl.errors import ConfigError


def loss_code(config: Config) -> Mapping[str, str]:
    """By key, the functions of the user's that a trainer runs."""
    loss = config.loss
    named = {"loss.advantage": loss.advantage, "loss.policy": loss.policy, OF_LOGITS: loss.of_logits}
    return {key: reference for key, reference in named.items() if is_function(reference)}


def judging_code(config: Config) -> Mapping[str, str]:
    """Those of `rollout_code` that judge what any producer has made, one from another host too."""
    judges = ("reward.kind", "filters.function", *(key for bridge in bridges() for key in bridge.judging))
    return {key: name for key, name in rollout_code(config).items() if key in judges}


def rollout_code(config: Config) -> Mapping[str, str]:
    """By key, the functions of the user's that producers, evaluators and the feeder run."""
    named = {
        "producer.function": config.producer.function,
        "reward.kind": config.reward.kind,
        "filters.function": config.filters.function,
        "data.curriculum": config.data.curriculum,
    }
    for one in config.evaluation.sets:
        named |= {f"evaluation.sets[{one.name}].function": one.function, f"evaluation.sets[{one.name}].reward.kind": one.reward.kind}
    named |= beside(config)
    return {key: reference for key, reference in named.items() if is_function(reference)}


def reward_addresses(config: Config) -> Mapping[str, str]:
    """By key, where producers and evaluators send texts for their rewards, and with which of their keys."""
    rewards = {"reward": config.reward, **{f"evaluation.sets[{one.name}].reward": one.reward for one in config.evaluation.sets}}
    options = {f"{key}.options": one.options for key, one in rewards.items() if one.kind.removeprefix(BOXED) in ASKS}
    options |= {f"data.reward_options.{kind}": given for kind, given in config.data.reward_options.items() if kind in ASKS}
    found: dict[str, str] = {}
    for key, given in options.items():
        if url := given.get("url"):
            with_key = f" with the value of {given['token_env']}" if given.get("token_env") else ""
            found[f"{key}.url"] = f"{url}{with_key}"
    return found


def code_digests(named: Mapping[str, str]) -> dict[str, str]:
    """By key, the SHA-256 (hex) of a function's source: its file, and those beside it that it imports, and so on. Nothing is run.

    Args:
        named: references by key, `file.py:name`, `pkg.mod:name` or `pkg.mod.name`, also behind the prefix of a bridge; or a taskset's file.

    Returns:
        Those whose source is found; one that is not is for `streamrl.config.plugins.resolve` to say.
    """
    found: dict[str, str] = {}
    for key, reference in named.items():
        file = _source_of(reference)
        if file is None:
            continue
        digest = hashlib.sha256()
        for path in sorted(_closure(file)):
            body = source_of(path).read_bytes()
            digest.update(f"{path.relative_to(file.parent)} {len(body)}\n".encode())
            digest.update(body)
        found[key] = digest.hexdigest()
    return found


def code_files(named: Mapping[str, str]) -> set[Path]:
    """The files that `code_digests` looks at."""
    files = (_source_of(reference) for reference in named.values())
    return {path for file in files if file is not None for path in _closure(file)}


def code_folders(named: Mapping[str, str]) -> set[Path]:
    """The folders that the functions' files lie in; of a module of a package, the package's own."""
    folders = set[Path]()
    for reference in named.values():
        if (file := _source_of(reference)) is not None:
            folder = file.parent
            while not reference.partition(":")[0].endswith(".py") and (folder.parent / "__init__.py").is_file():
                folder = folder.parent
            folders.add(folder)
    return folders


def _source_of(reference: str) -> Path | None:
    _, reference = split(reference)
    place = reference if reference.endswith(".py") else reference.partition(":")[0] if ":" in reference else reference.rpartition(".")[0]
    if place.endswith(".py"):
        path = Path(place).expanduser().absolute()
        return path if is_module(path) else None
    folders: list[str] | None = [*sys.path, str(Path.cwd())]
    origin: str | None = None
    for name in place.split("."):
        spec = PathFinder.find_spec(name, folders) if folders is not None else None
        if spec is None:
            break  # a class or an attribute of the module before
        origin = spec.origin
        folders = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else None
    return Path(origin) if origin is not None and origin.endswith(".py") and Path(origin).is_file() else None


def _closure(file: Path) -> set[Path]:
    """A file, and all below its folder that it imports, directly or not."""
    found, waiting = {file}, [file]
    while waiting:
        for name in _imported(waiting.pop()):
            base = file.parent.joinpath(*name.split("."))
            for path in (base.with_suffix(".py"), base / "__init__.py"):
                if path not in found and is_module(path):
                    found.add(path)
                    waiting.append(path)
    return found


def _imported(file: Path) -> Iterator[str]:
    """Names of modules that a file imports, those of its own folder without a leading dot; none where it is no Python."""
    try:
        tree = ast.parse(source_of(file).read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = f"{node.module}." if node.module else ""
            yield from ([node.module] if node.module else [])
            yield from (prefix + alias.name for alias in node.names if alias.name != "*")


def engine_code(config: Config) -> Mapping[str, str]:
    """By key, what an engine worker starts that is not streamrl's: an interpreter, and flags that may name code."""
    sglang = config.engine.sglang
    named = {"engine.sglang.python": sglang.python, "engine.sglang.flags": str(sglang.flags) if sglang.flags else ""}
    return {key: value for key, value in named.items() if value and config.engine.traits.server}


def check_trust(named: Mapping[str, str], whose: str, *, trusted: bool) -> None:
    """Whoever made a run or a recording decides what its configuration names, and so what would run here, or be sent from here.

    Args:
        named: what would run, by key.
        whose: "the recording DIR", "a run of user 1000"; empty: our own.
        trusted: `--trust-code` was given.

    Raises:
        ConfigError: it is not our own, names code, and was not trusted.
    """
    if whose and named and not trusted:
        said = ", ".join(f"{key} = {reference!r}" for key, reference in named.items())
        raise ConfigError(
            f"{whose} names what would run here, or where texts and keys would be sent: {said}",
            hint="read it first; --trust-code runs it",
            key=next(iter(named)),
        )
