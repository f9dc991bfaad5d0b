"""From a TOML file and `--set` overrides to the configuration tree, with errors that name the key."""

from __future__ import annotations

import difflib
import functools
import json
import math
import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin
from urllib.parse import urlsplit, urlunsplit

import msgspec

from streamrl.config.bridges import lowered, raised
from streamrl.config.check import check
from streamrl.config.check_files import check_files
from streamrl.config.former import as_recorded, for_the_record, in_present_words
from streamrl.config.hub import from_hub
from streamrl.config.paths import resolve
from streamrl.config.tree import Config
from streamrl.errors import ConfigError, SchemaError

_BOUND = re.compile(r"Expected `\w+` (>=|>|<=|<) (\S+)")
_RULES: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    ">=": (operator.ge, "at least"),
    ">": (operator.gt, "above"),
    "<=": (operator.le, "at most"),
    "<": (operator.lt, "below"),
}


def load(path: str | Path, overrides: Sequence[str] = (), *, plan: bool = False) -> Config:
    """Read a TOML file, put `a.b=c` overrides over it, and check the whole.

    Relative paths in the file are relative to its folder, those in overrides to the working directory; `run.dir` is always
    relative to the working directory. Models and rows of the Hugging Face Hub may be named in place of paths; they are fetched where they
    are not in its cache. Of a `plan`, for another machine or for later, no file that it names is looked for.

    Raises ConfigError: missing or malformed file, unknown key (with the nearest known one),
    wrong type, a value out of its range, sections that contradict each other, a file that is named but not there.
    """
    source = Path(path)
    tree, base = _read(source), source.resolve().parent
    tree = resolve(tree if plan else from_hub(tree, base), base)
    given: dict[str, Any] = {}
    for override in overrides:
        _place(given, *_parse_override(override))
    merged = _merge(tree, resolve(given if plan else from_hub(given, Path.cwd()), Path.cwd()))
    try:
        config = convert(merged, where=str(source))
    except ConfigError as error:
        for text in reversed(overrides):
            if f"{error.values.get('key')}.".startswith(f"{'.'.join(_parse_override(text)[0])}."):
                convert(merged, where=f"--set {text}")  # the same error, with its origin
        raise
    check(config)
    if not plan:
        check_files(config)
    return config


def override(config: Config, overrides: Sequence[str]) -> Config:
    """The same configuration with `a.b=c` put over it, checked anew (files are not looked for); raises ConfigError."""
    if not overrides:
        return config
    given: dict[str, Any] = {}
    for text in overrides:
        _place(given, *_parse_override(text))
    changed = convert(_merge(raised(msgspec.to_builtins(config, str_keys=True)), resolve(given, Path.cwd())), where="--set")
    check(changed)
    return changed


def override_keys(overrides: Sequence[str]) -> list[str]:
    """The dotted keys that overrides name, in order; raises ConfigError for text that is no override and for a key that there is not."""
    keys = [_parse_override(text)[0] for text in overrides]
    for parts in keys:
        named: dict[str, Any] = {}
        _place(named, parts, None)
        _refuse_unknown(named, Config, where="--set")
    return [".".join(parts) for parts in keys]


def convert(tree: Mapping[str, Any], *, where: str) -> Config:
    """A plain table to the tree, strictly, every value within its bounds.

    Raises ConfigError that names the key and `where` it is from.
    """
    present = lowered(in_present_words(tree), where)
    _refuse_unknown(present, Config, where=where)
    try:
        return msgspec.convert(present, Config, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), present, where) from error
    except SchemaError as error:
        raise ConfigError(f"{error.message}, in {where}", hint=error.hint or "change it in the file or with --set", path=where) from error


def dump(config: Config) -> str:
    """The tree as JSON text, for the run directory and the run record. Credentials inside `bus.url` are left out."""
    tree: dict[str, Any] = for_the_record(msgspec.to_builtins(config, str_keys=True))
    tree["bus"]["url"] = _without_credentials(config.bus.url)
    return json.dumps(tree, indent=2) + "\n"


def from_json(text: str, *, where: str = "config.json") -> Config:
    """What `dump` wrote, also by an earlier version; it was checked when it was loaded, and is not again."""
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"expected JSON in {where}, got: {error.msg} (line {error.lineno})",
            hint="it is written by streamrl up; start the run again",
            where=where,
            line=error.lineno,
        ) from error
    if not isinstance(tree, dict):
        raise ConfigError(
            f"expected a JSON object in {where}, got {type(tree).__name__}",
            hint="it is written by streamrl up",
            where=where,
            got=type(tree).__name__,
        )
    return convert(as_recorded(tree), where=where)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        hint = f"keys are set with --set {path}, behind the file" if re.match(r"[a-z_]+(\.\w+)+=", str(path)) else "check the path"
        raise ConfigError(f"expected a TOML file, got no such file: {path}", hint=hint, path=str(path)) from error
    except (IsADirectoryError, PermissionError) as error:
        raise ConfigError(f"expected a readable TOML file, got {error.strerror}: {path}", hint="check the path", path=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"expected UTF-8 text in {path}, got byte {error.object[error.start]:#x} at {error.start}",
            hint="save it as UTF-8 in the editor",
            path=str(path),
            byte=error.start,
        ) from error
    except tomllib.TOMLDecodeError as error:
        hint = "strings need quotes, tables are [name]"
        if path.suffix in (".yaml", ".yml"):
            hint = "it is YAML; in TOML `run: {steps: 3}` is a line [run] and a line steps = 3"
        raise ConfigError(f"expected TOML in {path}, got: {error}", hint=hint, path=str(path)) from error


def _parse_override(text: str) -> tuple[list[str], Any]:
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"expected --set section.key=value, got {text!r}", hint="for example --set tasks.max_staleness=2", override=text)
    return parts, _value(value.strip(), parts)


def _value(text: str, parts: Sequence[str]) -> Any:
    """A TOML value; a bare word is a string, and so is anything but a quoted string for a key that holds a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    if set(parsed) != {"value"} or (_field_type(parts) is str and not isinstance(parsed["value"], str)):
        return text
    return parsed["value"]


@functools.cache
def _fields(kind: Any) -> Mapping[str, Any]:
    """Return the types of a struct's fields by their keys; msgspec evaluates the annotations anew each time."""
    return {field.encode_name: field.type for field in msgspec.structs.fields(kind)}


def _field_type(parts: Sequence[str], kind: Any = Config) -> Any:
    for part in parts:
        if not _is_struct(kind):
            return None
        kind = _fields(kind).get(part)
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _choices(key: str) -> tuple[str, ...]:
    """What a key that takes one of several words takes; empty for other keys."""
    kind: Any = Config
    for part in re.findall(r"[^.\[\]]+", key):
        # A number or `...` is one of several tables of a kind.
        kind = get_args(kind)[0] if get_origin(kind) is tuple else _field_type([part], kind)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _value_at(tree: Mapping[str, Any], key: str) -> Any:
    value: Any = tree
    for part in re.findall(r"[^.\[\]]+", key):
        value = value[int(part) if isinstance(value, list | tuple) else part]
    return value


def _no_choice(key: str, got: Any, choices: Sequence[str], where: str) -> ConfigError:
    near = difflib.get_close_matches(str(got), choices, n=1, cutoff=0.6)
    said = ", ".join(repr(choice) for choice in choices)
    hint = f"did you mean {near[0]!r}?" if near else "docs/configuration.md says what each of them does"
    return ConfigError(f"{key} must be one of {said}, got {got!r}, in {where}", hint=hint, key=key, path=where)


def _place(tree: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    for part in parts[:-1]:
        table = tree.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"expected a table at {part} for --set {'.'.join(parts)}, got {table!r}",
                hint="set it whole or by its keys",
                override=".".join(parts),
                got=table,
            )
        tree = table
    tree[parts[-1]] = value


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` put over `below` key by key; an empty table takes the place of what is there."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _merge(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) and value else value
    return merged


def _refuse_unknown(tree: Mapping[str, Any], kind: Any, *, where: str, prefix: str = "") -> None:
    fields = _fields(kind)
    for key, value in tree.items():
        if key not in fields:
            raise ConfigError(
                f"expected a known key, got {prefix}{key} in {where}", hint=_suggest(key, prefix, fields), key=prefix + key, path=where
            )
        for number in _numbers(value, fields[key]):
            if isinstance(number, float) and not math.isfinite(number):
                raise _out_of_range(prefix + key, "a finite number", number, where)
        if _is_struct(fields[key]) and isinstance(value, Mapping):
            _refuse_unknown(value, fields[key], where=where, prefix=f"{prefix}{key}.")
        if get_origin(fields[key]) is tuple and _is_struct(get_args(fields[key])[0]) and isinstance(value, list | tuple):
            for index, table in enumerate(value):
                if isinstance(table, Mapping):
                    _refuse_unknown(table, get_args(fields[key])[0], where=where, prefix=f"{prefix}{key}[{_called(table, index)}].")


def _numbers(value: Any, kind: Any) -> Iterable[Any]:
    """What must be finite: of a list or a table of named numbers each one."""
    if isinstance(value, Mapping) and get_args(kind) == (str, float):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)


def _called(table: Any, index: int) -> str | int:
    """One of several tables: by its name, if it has one, else by its place."""
    name = table.get("name") if isinstance(table, Mapping) else None
    return name if isinstance(name, str) and name else index


def _by_name(key: str, tree: Mapping[str, Any]) -> str:
    """`a.b[1].c` as `a.b[name].c`."""
    value: Any = tree
    named = key
    for part in re.finditer(r"\[(\d+)\]|[^.\[\]]+", key):
        try:
            value = value[int(part[1])] if part[1] else value[part[0]]
        except (KeyError, IndexError, TypeError):
            break
        if part[1]:
            named = named.replace(part[0], f"[{_called(value, int(part[1]))}]", 1)
    return named


def _suggest(key: str, prefix: str, siblings: Mapping[str, Any]) -> str:
    """The same key in another section, else the nearest one here, else the nearest one anywhere."""
    by_name = {name.rsplit(".", 1)[-1]: name for name in reversed(_all_keys(Config))}
    if key in by_name:
        return f"did you mean {by_name[key]}?"
    if near := difflib.get_close_matches(key, siblings, n=1, cutoff=0.6):
        return f"did you mean {prefix}{near[0]}?"
    if near := difflib.get_close_matches(key, by_name, n=1, cutoff=0.8):
        return f"did you mean {by_name[near[0]]}?"
    return f"known here: {', '.join(siblings)}"


def _all_keys(kind: Any, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for key, field_type in _fields(kind).items():
        name = prefix + key
        keys += [name, *_all_keys(field_type, name + ".")] if _is_struct(field_type) else [name]
    return keys


def _is_struct(kind: Any) -> bool:
    return get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _invalid(message: str, tree: Mapping[str, Any], where: str) -> ConfigError:
    """The validation error `Expected ..., got ... - at $.a.b` or `Expected ... >= 1 - at $.a.b` with our keys, the value and the file."""
    text, _, place = message.partition(" - at `$")
    key = place.rstrip("`").lstrip(".")
    if bound := _BOUND.fullmatch(text):
        holds, words = _RULES[bound[1]]
        value: Any = tree
        for part in re.findall(r"[^.\[\]]+|\.{3}", key):
            if part == "...":  # msgspec's word for some key of a table
                part = next(name for name, number in value.items() if not holds(number, float(bound[2])))
                key = key.replace("[...]", f".{part}")
            value = value[int(part) if isinstance(value, list) else part]
        return _out_of_range(_by_name(key, tree), f"{words} {bound[2].removesuffix('.0')}", value, where)
    if choices := _choices(key):
        return _no_choice(_by_name(key, tree), _value_at(tree, key), choices, where)
    got = _value_at(tree, key)
    key = _by_name(key, tree)
    text = text.replace("`object`", "`table`").replace("`array`", "`list`").replace("`", "")
    if text.endswith(("got str", "got int", "got float", "got bool")) and len(str(got)) <= 80:
        text += f" {got!r}"
    at = f" at {key}" if key else ""
    return ConfigError(f"{text[:1].lower()}{text[1:]}{at} in {where}", hint="docs/configuration.md has every key", key=key, path=where)


def _out_of_range(key: str, rule: str, value: Any, where: str) -> ConfigError:
    name = key.partition("[")[0]
    hint = f"change {name} in the TOML file or with --set {name}=..."
    return ConfigError(f"{key} must be {rule}, got {value!r}, in {where}", hint=hint, key=name, path=where)


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
