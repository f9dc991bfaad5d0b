"""The run record: written at the first start, and compared with the configuration whenever the run is resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from streamrl.bus.protocol import Bus
from streamrl.config.bridges import bridges
from streamrl.config.former import LATER_DECISIONS
from streamrl.config.load import dump, from_json, override
from streamrl.config.paths import DIRECTORIES, without_folder
from streamrl.config.reward_kinds import ASKS
from streamrl.config.tree import Config, schedule_steps
from streamrl.errors import ConfigError, Conflict
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import RunRecord
from streamrl.schemas.subjects import KEY_RUN

FREE_KEYS = (
    "run.dir",
    "run.kernels",
    "run.steps",
    "run.max_seconds",
    "run.until_reward",
    "run.numerics",
    "model.path",
    "data.train",
    "data.heldout",
    "data.images_folder",
    "tasks.max_deliveries",
    "producer",
    *(key for bridge in bridges() for key in bridge.of_producers),
    "gateway",
    "reward.timeout_s",
    "reward.options.url",
    "reward.options.token_env",
    *(f"data.reward_options.{kind}.{name}" for kind in sorted(ASKS) for name in ("url", "token_env")),
    "reward.children",
    "reward.concurrency",
    "reward.max_hung",
    "reward.workers",
    "engine.workers",
    "engine.slots",
    "engine.threads",
    "engine.deterministic",
    "engine.host",
    "engine.advertise",
    "engine.port",
    "engine.sglang.python",
    "engine.sglang.gpus",
    "engine.sglang.quick_start",
    "trainer.ranks",
    "trainer.shards",
    "trainer.tensor",
    "trainer.experts",
    "trainer.pipeline",
    "trainer.context",
    "trainer.gather",
    "trainer.rank_timeout_s",
    "trainer.threads",
    "trainer.device",
    "trainer.gpu",
    "trainer.attention",
    "trainer.compile",
    "trainer.activations",
    "trainer.micro_tokens",
    "trainer.check_logprobs",
    "trainer.checkpoint_every",
    "trainer.keep_checkpoints",
    "trainer.export_every",
    "trainer.token_weights_bytes",
    "weights",
    "evaluation",
    "bus",
    "supervise",
    "metrics",
    "page",
    "slo",
    "ray",
    "debug.token_delay_s",
    "debug.token_delay_sigma",
    "debug.memory_tokens",
    "debug.memory_ranks",
    "debug.profile_versions",
)
"""Keys and sections that may differ when a run is resumed: how fast and where, not what is learned.

The paths are free because their content is what counts: rows and the model's files are compared by digest. Of functions in a file where
they lie is free, and so it is of folders of models (the reference, the critic, the teacher) of the same content, or that lie in the run's
own directory: a run that was moved with them goes on.

`run.steps` is free because the learning rate's schedule has a length of its own, which is not: see `with_decay_steps`.
"""
DECAY_STEPS = "trainer.optimizer.decay_steps"


def continued(config: Config, run: RunDir) -> tuple[Config, list[str]]:
    """The configuration with which `run` goes on, and what was set in it: a decision that the run was begun without stays off.

    Raises ConfigError where the directory is that of a run with another name: its store has nothing under this one.
    """
    try:
        known = run.load_config() if run.exists else config
    except ConfigError:  # `check_resume` judges by the record, which is on the bus
        return config, []
    if known.run.name != config.run.name:
        raise ConfigError(
            f"expected run {config.run.name!r} in {run.path}, got run {known.run.name!r}: a run keeps its name, also where its directory "
            "is moved or copied to",
            hint=f"call the directory {known.run.name!r} again, in another --set run.dir=DIR if need be, or choose another --name",
            key="run.name",
            expected=known.run.name,
            got=config.run.name,
        )
    before, now = (json.loads(dump(one)) for one in (known, config))
    settings: list[str] = []
    for key, off in LATER_DECISIONS.items():
        section, name = key.split(".")
        if name in now[section] and name not in before[section]:
            settings.append(f"{key}={json.dumps(off)}")
    return override(config, settings), settings


def with_decay_steps(config: Config, run: RunDir, *, trained: bool) -> tuple[Config, str]:
    """The configuration with the length of the learning rate's schedule, and what is to be said of that, or an empty string.

    Unless it is set, it is `run.steps` of the first start, and stays that when the run is resumed with other steps once it has `trained`:
    before that the length is this start's, for nothing was decided by the other.
    """
    if config.trainer.optimizer.decay_steps:
        return config, ""
    try:
        steps = schedule_steps(run.load_config() if trained and run.exists else config)
    except ConfigError:  # see `continued`
        steps = schedule_steps(config)
    optimizer = replace(config.trainer.optimizer, decay_steps=steps)
    text = ""
    if schedule_steps(config) != steps and optimizer.schedule not in ("constant", "inverse_sqrt"):
        text = (
            f"run.steps is {config.run.steps}, the learning rate's schedule still that of the first start, over {steps} batches: "
            f"its length is {DECAY_STEPS}, which cannot change once the run has trained"
        )
    return replace(config, trainer=replace(config.trainer, optimizer=optimizer)), text


async def write_or_check(bus: Bus, record: RunRecord) -> bool:
    """Write the record of a new run, or check `record` against the one that is there; returns whether the run is resumed.

    Raises:
        ConfigError: the dataset, or a key that decides what is learned, is not what the run was started with.
    """
    entry = await bus.kv.get(KEY_RUN)
    if entry is None or entry.value is None:
        try:
            await bus.kv.put(KEY_RUN, encode(record), expect=0 if entry is None else entry.revision)
        except Conflict:
            return await write_or_check(bus, record)
        return False
    check_resume(decode(entry.value, RunRecord, where=KEY_RUN), record)
    return True


async def renew_digests(bus: Bus, new: RunRecord, *, accept_code: bool, accept_model: bool) -> list[str]:
    """Compare digests of user code and of models with those of the last start, and keep the new ones; returns what has changed, in words.

    A run of an earlier build has none to compare with.

    Args:
        bus: connected; the record is there.
        new: what this start has found, see `streamrl.config.code.code_digests` and `streamrl.runtime.model_digests`.
        accept_code: changed code of the loss may go on; that of producers and rewards may always.
        accept_model: changed files of a model may go on.

    Raises:
        ConfigError: code of the loss or a model has changed, and that was not accepted.
        Conflict: somebody else has written the record meanwhile.
    """
    entry = await bus.kv.get(KEY_RUN)
    assert entry is not None and entry.value is not None
    record = decode(entry.value, RunRecord, where=KEY_RUN)
    code, models = _changed(record.code, new.code), _changed(record.models, new.models)
    if (refused := [key for key in code if key.startswith("loss.")]) and not accept_code:
        raise ConfigError(
            f"the code of {' and '.join(refused)} is not what run {record.run!r} was trained with so far",
            hint="put the old code back, or go on with the new one by `streamrl up --accept-code`; a replay of the past needs the old one",
            key=refused[0],
        )
    if models and not accept_model:
        found = ", ".join(f"{key}: expected files with digest {was[:16]}, got {now[:16]}" for key, (was, now) in models.items())
        raise ConfigError(
            f"a model is not what run {record.run!r} was trained with so far: {found}",
            hint="put the old files back, or go on with the new ones by `streamrl up --accept-model`; a replay of the past needs the old",
            key=next(iter(models)),
        )
    # What this start has none of stays known, for it may come back.
    renewed = replace(
        record,
        code={**_known(record.code), **_known(new.code)} or UNSET,
        models={**_known(record.models), **_known(new.models)} or UNSET,
    )
    if renewed != record:
        await bus.kv.put(KEY_RUN, encode(renewed), expect=entry.revision)
    return [
        *(f"the code of {key} has changed since the last start" for key in code),
        *(f"the files of {key} have changed since the last start" for key in models),
    ]


def _changed(old: dict[str, str] | UnsetType, new: dict[str, str] | UnsetType) -> dict[str, tuple[str, str]]:
    """By key, both digests where both are known and differ."""
    before, now = _known(old), _known(new)
    return {key: (before[key], now[key]) for key in sorted(now) if before.get(key, now[key]) != now[key]}


def _known(digests: dict[str, str] | UnsetType) -> dict[str, str]:
    return {} if isinstance(digests, UnsetType) else digests


def check_resume(old: RunRecord, new: RunRecord) -> None:
    """Raise ConfigError unless `new` may continue the run that `old` describes.

    A key that came after `old` was written counts as its default, which for a key that decides means off.
    """
    if old.dataset_digest != new.dataset_digest:
        raise ConfigError(
            f"dataset changed on resume: run {old.run!r} was started on {_rows(old)} with digest {_short(old)}, "
            f"data.train now has {_rows(new)} with digest {_short(new)}",
            hint="put the old rows back, or start a new run with --name NAME",
            key="data.train",
        )
    before = _decisions(from_json(old.config, where=f"the record of run {old.run!r}"))
    after = _decisions(from_json(new.config))
    for key in sorted(before.keys() | after.keys()):
        if not _is_free(key) and before.get(key) != after.get(key) and _what(old, key, before.get(key)) != _what(new, key, after.get(key)):
            if (model := _known(old.models).get(key)) and model == _known(new.models).get(key):
                continue
            raise ConfigError(
                f"{key} changed on resume: run {old.run!r} was started with {before.get(key)!r}, got {after.get(key)!r}",
                hint=f"set {key} back, or start a new run with --name NAME",
                key=key,
            )


def _rows(record: RunRecord) -> str:
    return f"{record.num_rows} rows" if record.num_rows else "rows"


def _short(record: RunRecord) -> str:
    return record.dataset_digest.removeprefix("blocks:")[:16]


def _decisions(config: Config) -> dict[str, Any]:
    """By dotted key; the schedule's length is said, for the record of a run of an earlier build does not say it.

    Two backends that train the same model are one here.
    """
    found: dict[str, Any] = flat_keys(json.loads(dump(config))) | {DECAY_STEPS: schedule_steps(config)}
    # As of data.train, their content counts.
    found["data.sources"] = [{key: value for key, value in one.items() if key != "train"} for one in found["data.sources"]]
    if found["trainer.backend"] == "megatron":  # it goes on from the checkpoints of the other, on a mesh of its own
        found["trainer.backend"] = "torch"
    return found


def _what(record: RunRecord, key: str, value: Any) -> Any:
    """The value without where it is found; of a folder of a model, which may be another by the same name, without where the run is."""
    if not isinstance(value, str):
        return value
    if key not in DIRECTORIES:
        return without_folder(key, value)
    base = Path(from_json(record.config, where=f"the record of run {record.run!r}").run.dir) / record.run
    _, inside, rest = value.rpartition(f"/{str(base).strip('/')}/")
    return rest if inside else value


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE_KEYS)


def flat_keys(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration's values by dotted key; lists are values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(flat_keys(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return flat
