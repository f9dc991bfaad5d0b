"""Names of the Hugging Face Hub where a path is expected: `Qwen/Qwen3-0.6B`, `openai/gsm8k`.

A name is a path that is not there, of an owner and a repository. It is looked up in the Hub's cache on this machine, then fetched, which is
said. What takes its place is the path in the cache, which has the revision in it; so a run goes on with the files that it began with.
"""

from __future__ import annotations

import fnmatch
import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast

from streamrl.config.paths import DIRECTORIES, parse_dataset
from streamrl.errors import ConfigError

DATASETS_URL = "hf://datasets/"
"""Before `OWNER/NAME/PATTERN`: files of a dataset, as other libraries name them too."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_ROWS = (".parquet", ".jsonl", ".json", ".csv", ".gz", ".arrow", ".tsv")
_SPLIT = re.compile(r"(?P<split>[A-Za-z_]+)(-\d+-of-\d+)?(-[0-9a-f]{16})?")
_MODEL_FILES = ("*.json", "*.jinja", "*.safetensors", "additional_chat_templates/*")
_NOTHING = ":"
"""A pattern of no file."""
_MODELS = tuple(key for key in DIRECTORIES if key != "data.images_folder")


class _Repo(NamedTuple):
    kind: str
    """`model` or `dataset`."""
    name: str
    key: str
    """Where the configuration names it."""

    @property
    def command(self) -> str:
        """The command that fetches it by hand."""
        return f"hf download {'--repo-type dataset ' if self.kind == 'dataset' else ''}{self.name} --local-dir DIR"


def from_hub(tree: Mapping[str, Any], base: Path) -> Mapping[str, Any]:
    """A raw configuration table in which names of the Hub are paths in its cache.

    Args:
        tree: the table; it is changed where it has such names.
        base: what relative paths are relative to.

    Raises:
        ConfigError: the Hub has no such name, cannot be reached, or has several sets of rows under it.
    """
    for key, table, field in _places(tree):
        text: str = table[field]
        if key in _MODELS:
            if _is_name(text, base):
                table[field] = str(_model(_Repo("model", text, key)))
            continue
        dataset = parse_dataset(text)
        if dataset.path.startswith(DATASETS_URL) or (_is_name(dataset.path, base) and not dataset.path.endswith(_ROWS)):
            table[field] = str(dataset._replace(path=_rows(dataset.path, key)))
    return tree


def _places(tree: Mapping[str, Any]) -> Iterator[tuple[str, MutableMapping[str, Any], str]]:
    """The keys that may hold a name, each with its table and field."""
    for key in (*_MODELS, "data.train", "data.heldout"):
        *sections, field = key.split(".")
        table: Any = tree
        for section in sections:
            table = table.get(section) if isinstance(table, Mapping) else None
        if isinstance(table, MutableMapping) and isinstance(table.get(field), str) and table[field]:
            yield key, cast("MutableMapping[str, Any]", table), field
    for section, listed, field in (("data", "sources", "train"), ("evaluation", "sets", "path")):
        outer = tree.get(section)
        tables: Any = outer.get(listed) if isinstance(outer, Mapping) else None
        for one in cast("list[Any]", tables) if isinstance(tables, list) else ():
            if isinstance(one, MutableMapping) and isinstance(one.get(field), str) and one[field]:
                yield f"{section}.{listed}", cast("MutableMapping[str, Any]", one), field


def _is_name(text: str, base: Path) -> bool:
    return _NAME.fullmatch(text) is not None and not os.path.lexists(base / text)


def _model(repo: _Repo) -> Path:
    cached = _snapshot(repo, _MODEL_FILES, offline=True)
    if cached is not None and _is_whole(cached):
        return cached
    found = _snapshot(repo, _MODEL_FILES, offline=False)
    assert found is not None
    return found


def _is_whole(path: Path) -> bool:
    """Tell whether a model's files are all there: the cache may have some of them."""
    index = path / "model.safetensors.index.json"
    weights = set(re.findall(r'"([^"/]+\.safetensors)"', index.read_text(encoding="utf-8"))) if index.is_file() else {"model.safetensors"}
    return all((path / name).is_file() for name in ("config.json", "tokenizer.json", *weights))


def _rows(text: str, key: str) -> str:
    """The pattern of the files that a name of a dataset stands for, in the cache."""
    owner, name, *rest = text.removeprefix(DATASETS_URL).split("/")
    repo, pattern = _Repo("dataset", f"{owner}/{name}", key), "/".join(rest)
    cached = _snapshot(repo, (pattern,) if pattern else (), offline=True)
    if cached is not None and fnmatch.filter(files := _files(cached), pattern or "*"):
        return f"{cached}/{_pattern(repo, files, pattern)}"
    try:
        files = _asked(repo, lambda hub: hub.HfApi().list_repo_files(repo.name, repo_type=repo.kind))
    except ConfigError:
        cached = _snapshot(repo, (_NOTHING,), offline=True)
        if cached is None or pattern:
            raise
        return f"{cached}/{_pattern(repo, _files(cached), pattern)}"  # without the Hub, what was fetched before is what there is
    pattern = _pattern(repo, files, pattern)
    cached = _snapshot(repo, (pattern,), offline=True)
    if cached is None or {*fnmatch.filter(files, pattern)} - {*_files(cached)}:
        cached = _snapshot(repo, (pattern,), offline=False)
    return f"{cached}/{pattern}"


def _files(folder: Path) -> list[str]:
    return [str(file.relative_to(folder)) for file in sorted(folder.rglob("*")) if file.is_file()]


def _pattern(repo: _Repo, files: Sequence[str], pattern: str) -> str:
    """The one set of files that is meant: what `pattern` names, or else the only one of the split that the key asks for."""
    if pattern and fnmatch.filter(files, pattern):
        return pattern
    wanted = ("train",) if repo.key in ("data.train", "data.sources") else ("test", "validation")
    splits: dict[str, str] = {}
    for file in (PurePosixPath(one) for one in files if one.endswith(_ROWS)):
        found = _SPLIT.fullmatch(file.name.removesuffix("".join(file.suffixes)))
        if found is not None:
            splits[str(file.with_name(f"{found['split']}*{''.join(file.suffixes)}"))] = found["split"]
    meant = [one for one, split in splits.items() if split in wanted]
    if len(meant) == 1 and not pattern:
        return meant[0]
    shown = ", ".join(f"{DATASETS_URL}{repo.name}/{one}" for one in (meant or splits))
    convert = f"python -c \"import datasets; datasets.load_dataset('{repo.name}', split='{wanted[0]}').to_parquet('rows.parquet')\""
    raise ConfigError(
        f"expected {repo.key} to name one set of rows of {repo.name} on the Hub, got {len(meant)} of {' or '.join(wanted)}",
        hint=f"name one of {shown}" if shown else f"write its rows to a file: `{convert}`",
        key=repo.key,
        got=repo.name,
    )


def _snapshot(repo: _Repo, patterns: Sequence[str], *, offline: bool) -> Path | None:
    """The folder of a repository's files in the cache, those of the patterns (none: all); what is missing is fetched.

    With `offline` it is None instead where one of them is missing.
    """
    if offline:
        try:
            hub = importlib.import_module("huggingface_hub")
            return Path(hub.snapshot_download(repo.name, repo_type=repo.kind, allow_patterns=list(patterns) or None, local_files_only=True))
        except (ImportError, OSError, ValueError):
            return None

    def fetch(hub: Any) -> str:
        told = hub.HfApi().repo_info(repo.name, repo_type=repo.kind, files_metadata=True)
        files = [one for one in told.siblings if any(fnmatch.fnmatch(one.rfilename, pattern) for pattern in patterns)]
        size = sum(one.size or 0 for one in files)
        print(f"fetching {len(files)} files, {size / 1e6:.1f} MB, of {repo.kind} {repo.name} from the Hugging Face Hub", file=sys.stderr)
        return hub.snapshot_download(repo.name, repo_type=repo.kind, allow_patterns=list(patterns))

    return Path(_asked(repo, fetch))


def _asked(repo: _Repo, ask: Any) -> Any:
    """The Hub's answer; raises ConfigError where there is none."""
    try:
        return ask(importlib.import_module("huggingface_hub"))
    except Exception as error:  # whatever the network, the Hub or its library raises
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"expected {repo.key} to name a path, or a {repo.kind} of the Hugging Face Hub; there is no {repo.name} here, and the Hub "
            f"says: {said}",
            hint=f"check the name, or fetch it where there is a network, with `{repo.command}`, and name DIR",
            key=repo.key,
            got=repo.name,
        ) from error
