"""Keys of `data` that contradict each other."""

from __future__ import annotations

import math
import re

from streamrl.config.bounds import refuse
from streamrl.config.bridges import brings_tasks, split
from streamrl.config.data import SourceConfig, data_sets, has_images
from streamrl.config.tree import Config

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ROWS_OF_ROOM = 4
"""Of the largest rows of images: one of them fits into the part above which the trainer trims, with what the server keeps beside it."""


def check_data(config: Config, *, asked: bool = False) -> None:
    """Raise ConfigError for sources that are none, variables of a chat template that is not used, what nobody trains on or looks at.

    With `asked` it is the configuration of problems that are asked, not of rows that are trained on.
    """
    _check_sources(config)
    if bool(config.data.images_key) if asked else has_images(config.data):
        _check_images(config)
        _check_room(config, asked)
    conversations = any(one.messages_key for _, one in data_sets(config.data))
    refuse(
        conversations and config.run.kind != "sft",
        f"data.messages_key is for run.kind = sft, got it with run.kind = {config.run.kind}",
        hint="name the prompt's field in data.prompt_key, or train on the conversations themselves with run.kind = sft",
        key="data.messages_key",
    )
    refuse(
        conversations and not config.data.chat_template,
        "data.messages_key needs the chat template, got data.chat_template = false",
        hint="leave data.chat_template out",
        key="data.chat_template",
    )
    for key in ("chat_template_kwargs", "chat_template_kwargs_key"):
        refuse(
            bool(getattr(config.data, key)) and not config.data.chat_template,
            f"data.{key} is for chat templates, got it with data.chat_template = false",
            hint="leave it out, or use the chat template",
            key=f"data.{key}",
        )


def _check_images(config: Config) -> None:
    refuse(
        config.run.kind != "rl",
        f"data.images_key is for run.kind = rl, got it with run.kind = {config.run.kind}: nothing is trained on images",
        hint="leave it out",
        key="data.images_key",
    )
    refuse(
        config.data.reading == "whole",
        "images are read when their row's turn comes, got data.images_key with data.reading = whole",
        hint="leave data.reading out",
        key="data.reading",
    )
    if config.gateway.workers > 0:
        check_gateway(config)
    check_looks(config.producer.function)


def check_gateway(config: Config) -> None:
    """Raise ConfigError where rows have images, of which a gateway's agents are given none."""
    refuse(
        has_images(config.data),
        "data.images_key is for producer functions, got a gateway (gateway.workers), whose agents are given no images",
        hint="leave data.images_key or the gateway out",
        key="gateway.workers",
    )


def check_looks(function: str) -> None:
    """Raise ConfigError for a producer that looks at no image."""
    refuse(
        not any(mark in function for mark in ".:") or bool(split(function)[0]),
        f"data.images_key needs a producer function that looks at images, got producer.function = {function}: no engine does",
        hint="write one that asks for them with `await engine.image(0)` (docs/data.md), or leave data.images_key out",
        key="producer.function",
    )


def _check_room(config: Config, asked: bool) -> None:
    """Trimming begins once their room is 70 % full: where what is left holds no row's images, a feeder may wait for it for ever."""
    least = _ROWS_OF_ROOM * config.data.max_image_bytes
    refuse(
        not asked and config.bus.sample_blobs_bytes < least,
        f"bus.sample_blobs_bytes must be at least {_ROWS_OF_ROOM} data.max_image_bytes = {least}, got {config.bus.sample_blobs_bytes}: the "
        "images of one row must find room before any are removed",
        hint="raise it (docs/data.md says how much is needed), or lower data.max_image_bytes",
        key="bus.sample_blobs_bytes",
    )


def _check_sources(config: Config) -> None:
    data, names = config.data, [one.name for one in config.data.sources]
    refuse(
        bool(data.curriculum) and not names,
        "data.curriculum weighs data.sources, got it without them",
        hint="write a table [[data.sources]] for each set of rows",
        key="data.curriculum",
    )
    if not names:
        return
    refuse(bool(data.train), "data.train and data.sources both name training rows", hint="leave data.train out", key="data.train")
    refuse(
        data.reading == "whole",
        "data.sources are read when their turn comes, got data.reading = whole",
        hint="leave data.reading out",
        key="data.reading",
    )
    refuse(
        brings_tasks(config.producer.function),
        f"data.sources are files of rows, got producer.function = {config.producer.function}, which writes its own to data.train",
        hint="name one file in data.train",
        key="data.sources",
    )
    for one in data.sources:
        refuse(
            not _NAME.fullmatch(one.name) or names.count(one.name) > 1,
            f"a source's name is of letters, digits, '_' and '-', at most 64 of them, and its own, got {one.name!r}",
            hint="give each table [[data.sources]] a name of its own",
            key="data.sources",
        )
        _check_weight(one)
        refuse(
            not one.train,
            f"expected the source {one.name!r} to name its rows in `train`, got nothing",
            hint="set it to a file of rows, as data.train",
            key="data.sources",
        )
    versions = sorted({version for one in data.sources for version, _ in pairs(one)})
    empty = [version for version in versions if not any(weight_at(one, version) for one in data.sources)]
    refuse(
        bool(empty),
        f"some source needs a weight above 0 at each version, got none at version {empty[:1]}",
        hint="change data.sources",
        key="data.sources",
    )


def _check_weight(one: SourceConfig) -> None:
    versions = [version for version, _ in pairs(one)]
    rising = versions[:1] == [0] and versions == sorted(set(versions))
    refuse(
        not rising or not all(math.isfinite(weight) for _, weight in pairs(one)),
        f"a source's weight is a finite number, or pairs of rising versions from 0 on and such numbers, got {one.weight} for {one.name!r}",
        hint="write weight = 2, or weight = [[0, 1], [100, 3]]",
        key="data.sources",
    )


def pairs(source: SourceConfig) -> tuple[tuple[int, float], ...]:
    """Versions and the weights from them on."""
    return source.weight if isinstance(source.weight, tuple) else ((0, source.weight),)


def weight_at(source: SourceConfig, version: int) -> float:
    """The source's weight at a version: that of the last pair whose version is not above it."""
    return [weight for first, weight in pairs(source) if first <= version][-1]
