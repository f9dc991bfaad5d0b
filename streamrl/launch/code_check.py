"""Whether the code that a configuration names can be imported, and takes what it will be given: asked before the run starts.

Importing runs the user's code, which may do anything. So it is imported in a process of its own, `python -m streamrl.launch.code_check`,
that has a limited time and whose end, however it comes, is a sentence here. Nothing but the module's own statements is run: functions are
not called and classes not built.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from streamrl.config.bridges import bridge_of, brings_tasks, function_of, section_of, split
from streamrl.config.code import code_folders, loss_code, rollout_code
from streamrl.config.curriculum import CURRICULUM
from streamrl.config.evaluation_sets import HELDOUT, problem_sets
from streamrl.config.loss import OF_LOGITS, is_function
from streamrl.config.paths import parse_dataset
from streamrl.config.plugins import Form, check_form, resolve
from streamrl.config.tree import Config, ProducerConfig
from streamrl.errors import ConfigError
from streamrl.producers.filtering import FILTER_FORM
from streamrl.producers.functions import PRODUCER, make_producer
from streamrl.rewards.factory import REWARD, make_reward
from streamrl.rewards.layers import close
from streamrl.runtime.apart import TAIL_BYTES, Ended, begin, run_apart, say
from streamrl.runtime.kinds import environment, inherited

LIMIT_S = 120.0
"""Importing torch from a slow disk is to pass."""
_SAID_S = 10.0
"""An import that takes so long is said while it goes on."""

_ALGORITHMS = "; see docs/algorithms.md"
FORMS: Mapping[str, Form] = {
    form.key: form
    for form in (
        PRODUCER,
        REWARD,
        FILTER_FORM,
        CURRICULUM,
        Form(
            key="loss.advantage",
            what="advantage function",
            takes=("batch", "arrays"),
            hint=f"write `def name(batch, arrays)`, which returns one advantage a token{_ALGORITHMS}",
        ),
        Form(
            key="loss.policy",
            what="policy loss",
            takes=("tokens", "config"),
            hint=f"write `def name(tokens, config)`, which returns losses and metrics{_ALGORITHMS}",
        ),
        Form(
            key=OF_LOGITS,
            what="loss",
            takes=("args", "data", "logits", "sum_of_sample_mean"),
            hint=f"write `def name(args, data, logits, sum_of_sample_mean)`{_ALGORITHMS}",
        ),
    )
}


class Asked(msgspec.Struct, frozen=True):
    """What the process is to look at."""

    named: dict[str, str]
    """References by key."""
    options: dict[str, tuple[str, ...]] = {}
    """By key, names of the options that what it names is given as keyword arguments."""
    producers: dict[str, ProducerConfig] = {}
    """Of producers, their sections."""
    folders: tuple[str, ...] = ()
    """Modules below these are told."""


class Said(msgspec.Struct, frozen=True):
    """What it says: a line with `key` when it begins with one, and a last one with `done` or an error."""

    key: str
    done: bool = False
    message: str = ""
    hint: str = ""
    files: tuple[str, ...] = ()
    """With `done`, the files of the modules below the folders that were imported."""


async def check_code(config: Config, *, limit_s: float = LIMIT_S, note: Callable[[str], None] = lambda _: None) -> set[Path]:
    """The modules beside it that the code which `config` names has imported.

    What other machines run is not looked at: all of it with `ray.address`, producers without `producer.workers`. Nor is a taskset
    whose rows are read next.

    Args:
        config: with its secret options.
        limit_s: how long the imports of producers and rewards, and those of the loss, may take.
        note: told when that takes long.

    Raises:
        ConfigError: something of it is not there, or does not take what it will be given.
    """
    options = {REWARD.key: tuple(config.reward.options), FILTER_FORM.key: tuple(config.filters.options)}
    producers = {PRODUCER.key: config.producer}
    for key, one in (("", config), *((f"{one.key}.", one.config) for one in problem_sets(config) if one.name != HELDOUT)):
        await _check_built_in(key, one)
        options[f"{key}{REWARD.key}"], producers[f"{key}function"] = tuple(one.reward.options), one.producer
    loaded = set[Path]()
    if config.ray.address:
        return loaded
    not_here = config.producer.workers == 0 and not problem_sets(config)
    elsewhere = ("producer.function",) if not_here or await asyncio.to_thread(rows_are_due, config) else ()
    rollouts = {key: name for key, name in rollout_code(config).items() if key not in elsewhere}
    for kind, named in (("producer", rollouts), ("trainer", dict(loss_code(config)))):
        if named:
            surroundings = {**inherited(os.environ, kind), **environment(config, kind)}
            folders = tuple(str(folder) for folder in code_folders(named))
            loaded |= await ask(Asked(named, options, producers, folders), surroundings, limit_s, note)
    return loaded


async def _check_built_in(place: str, config: Config) -> None:
    """Raise ConfigError for a producer or reward without user code that cannot be made."""
    try:
        if not is_function(config.producer.function):
            make_producer(config.producer.function)
        if not is_function(config.reward.kind):
            await close(make_reward(config.reward))
    except ConfigError as error:
        if not place:
            raise
        raise ConfigError(f"{place.rstrip('.')}: {error.message}", hint=error.hint, **error.values | {"key": "evaluation.sets"}) from error


def _form(key: str) -> Form:
    """What code at this key has to be; of a set of problems, as in training."""
    return FORMS.get(key) or replace(PRODUCER if key.endswith(".function") else REWARD, key=key)


async def ask(asked: Asked, surroundings: Mapping[str, str], limit_s: float, note: Callable[[str], None] = lambda _: None) -> set[Path]:
    """Import what is asked in a process of its own; the files of the user's modules that it loaded. Raises as `check_code`."""
    text = msgspec.json.encode(asked).decode()
    names = ", ".join(dict.fromkeys(asked.named.values()))
    late = asyncio.get_running_loop().call_later(
        _SAID_S, note, f"importing {names} takes long; it has {limit_s:g} s. hint: does a file do its work, or loop, when it is imported?"
    )
    try:
        return _judge(asked, await run_apart("streamrl.launch.code_check", text, surroundings, limit_s), limit_s)
    finally:
        late.cancel()


def _judge(asked: Asked, ended: Ended, limit_s: float) -> set[Path]:
    """The files that were imported; raises ConfigError for what the process found, or for how it ended."""
    said = [msgspec.json.decode(line, type=Said) for line in ended.lines]
    last = said[-1] if said else Said(next(iter(asked.named)))
    if last.message:
        raise ConfigError(last.message, hint=last.hint, key=last.key)
    if last.done:
        return {Path(file) for file in last.files}
    busy = "importing a file runs its statements; move work that takes long into functions"
    raise ConfigError(
        f"{last.key} = {asked.named[last.key]!r}: expected code that can be imported, {ended.words(limit_s)}",
        hint=busy if ended.code is None else "run the file with python to see why",
        key=last.key,
        code=ended.code,
    )


def _imported(folders: Sequence[str]) -> tuple[str, ...]:
    """Files of the modules of this process that lie below the folders; installed packages, and streamrl, are left out."""
    found = set[str]()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py") or "/site-packages/" in file or name.partition(".")[0] == "streamrl":
            continue
        path = Path(file).absolute()
        if path.is_file() and any(path.is_relative_to(folder) for folder in folders):
            found.add(str(path))
    return tuple(sorted(found))


def rows_are_due(config: Config) -> bool:
    """Tell whether the rows are those that a producer brings, and are not there yet."""
    return brings_tasks(config.producer.function) and not Path(parse_dataset(config.data.train).path).exists()


def main(arguments: Sequence[str]) -> None:
    """The process: imports and looks; its words go to the descriptor that is its first argument."""
    answer, text = begin(arguments)
    asked = msgspec.json.decode(text, type=Asked)
    key = ""
    try:
        for key, reference in asked.named.items():
            say(answer, Said(key))
            if section := section_of(key):
                function_of(section.check_function)(reference, key=key)
                continue
            if (bridge := bridge_of(reference)) and bridge.check:
                _, name = split(reference)
                function_of(bridge.check)(name, asked.producers[key])
                continue
            found = resolve(reference, what=_form(key).what, key=key)
            check_form(_form(key), reference, found, asked.options.get(key, ()))
        say(answer, Said(key, done=True, files=_imported(asked.folders)))
    except ConfigError as error:
        say(answer, Said(key, message=error.message[:TAIL_BYTES], hint=error.hint))
    except BaseException as error:
        say(
            answer,
            Said(
                key,
                message=f"{key} = {asked.named[key]!r}: expected code that can be imported, it raises {type(error).__name__}: {error}",
                hint="run the file with python to see where",
            ),
        )
    os._exit(0)  # threads that the code has left behind are not waited for


if __name__ == "__main__":
    main(sys.argv[1:])
