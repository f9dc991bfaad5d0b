"""What must be true before the first worker starts: a readable dataset, a model, a run record that fits."""

from __future__ import annotations

import asyncio
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from streamrl import __version__
from streamrl.bus.protocol import Bus
from streamrl.config.bridges import bridge_of, function_of
from streamrl.config.check_sampling import check_vocabulary
from streamrl.config.code import code_digests, loss_code, rollout_code
from streamrl.config.evaluation_sets import problem_sets
from streamrl.config.load import dump
from streamrl.config.tree import Config
from streamrl.consumers.training.checkpoints import read_latest
from streamrl.consumers.training.gaps import NEED_CONSENT, find_gap, refusal, versions_made
from streamrl.consumers.training.ledger import publish_mark
from streamrl.data.model import check_context, check_experts, check_positions
from streamrl.data.problems import left_out, load_problems, load_set
from streamrl.data.streamed import check_rows, rows_digest, try_rows
from streamrl.data.tokenizer import Tokenizer, load_tokenizer
from streamrl.data.vocabulary import vocab_size
from streamrl.doctor.backend import refuse_backend
from streamrl.doctor.findings import Check
from streamrl.doctor.gpu_memory import check_shared_gpus, check_trainer_memory, gpu_memories, least_memory
from streamrl.doctor.run_checks import check_checkpoints, check_gpus_wanted, check_ports_wanted, check_start_room, check_weights_room
from streamrl.errors import ConfigError, LaunchError, StreamFull, StreamRLError
from streamrl.history.replay_log import read_past
from streamrl.launch.build_model import build_model
from streamrl.launch.code_check import check_code, rows_are_due
from streamrl.runtime.model_digests import model_digests
from streamrl.runtime.run_record import renew_digests, write_or_check
from streamrl.runtime.rundir import BRANCH_FILE, RunDir
from streamrl.schemas.control import RunRecord
from streamrl.schemas.samples import MARK_START, Mark
from streamrl.schemas.subjects import KEY_ACCEPTED_GAP, TASKS, Subjects

_PORTS_S = 5.0
"""What a supervisor that was killed has left behind gives its ports back within this time."""


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration's model and rows, read before anything starts."""

    model: Path
    """Directory of the initial model."""
    digest: str
    """Digest of the training rows."""
    num_rows: int
    """Training rows; 0 where they are counted while the run is up."""
    modules: frozenset[Path]
    """Files of the user's modules that were imported."""


async def check_inputs(config: Config, run: RunDir, note: Callable[[str], None] = lambda _: None) -> Inputs:
    """Import the code that is named, build or find the model, and look at all rows: for `up`, which then starts, and for `doctor`.

    Of the training rows the first ones are tried, or all of them with `data.reading = "whole"`, and all held-out ones, so that what cannot
    be used is reported before anything runs; rows that are left out are noted. Those that a producer brings are written first.

    Raises:
        DataError: a row that was read whole, or none of the first training rows, can be used; names the file and the line.
        ConfigError: a function cannot be used, `model.path` names no model, one with fewer positions than `model.max_len`, one with
            fewer token ids than its tokenizer, or without a token that ends an answer, a dense one with `loss.experts`, or one with sliding
            windows with `trainer.context`.
        LaunchError: the model cannot be built, or shared memory does not hold its versions.
    """
    modules = await check_code(run.with_secret_options(config), note=note)
    model = await build_model(config, run)
    check_positions(config, model)
    check_experts(config, model)
    check_context(config, model)
    if (weights := check_weights_room(config, model)) is not None and weights.state == "fail":
        raise LaunchError(f"expected room for the versions of weights: {weights.found}", hint=weights.hint)
    if (bridge := bridge_of(config.producer.function)) and await asyncio.to_thread(rows_are_due, config):
        await function_of(bridge.write_rows)(config, model, note)
    tokenizer, size = load_tokenizer(model), vocab_size(model)
    tokenizer.check_end()
    tokenizer.check_model(size)
    check_vocabulary(config.sampling, size, "sampling")
    for one in problem_sets(config):
        check_vocabulary(one.sampling, size, "evaluation.sampling" if one.key == "data.heldout" else f"{one.key}.sampling")
    digest, num_rows = await asyncio.to_thread(_look_at_rows, config, run, tokenizer, size, note)
    for one in problem_sets(config):
        found = await asyncio.to_thread(load_set, one, tokenizer)
        check_rows(found, one.config, one.sampling, size, trained=False)
        for text in left_out(one, found):
            note(text)
    return Inputs(model=model, digest=digest, num_rows=num_rows, modules=frozenset(modules))


async def rehearse(config: Config) -> Check:
    """Ask for `doctor` what `up` asks of code, model and rows (`check_inputs`), in a directory that is gone afterwards."""
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="streamrl-doctor-") as scratch:
        if rows_are_due(config):
            config = replace(config, data=replace(config.data, train=str(Path(scratch) / Path(config.data.train).name)))
        run = RunDir(Path(scratch) / config.run.name)
        run.create()
        try:
            await check_inputs(config, run, notes.append)
        except StreamRLError as error:
            return Check("inputs", "fail", error.message, error.hint)
    return Check("inputs", "ok", "; ".join(("code, model and rows can be used", *notes)))


async def prepare(config: Config, run: RunDir, note: Callable[[str], None] = lambda _: None) -> RunRecord:
    """Read what the configuration names, and return the record that it gives; raises as `check_inputs`."""
    return await make_record(config, run, await check_inputs(config, run, note), note)


async def make_record(config: Config, run: RunDir, inputs: Inputs, note: Callable[[str], None] = lambda _: None) -> RunRecord:
    """Return the record of a run that starts on these inputs."""
    return RunRecord(
        run=run.name,
        config=dump(config),
        dataset_digest=inputs.digest,
        num_rows=inputs.num_rows,
        code_version=__version__,
        fingerprint=machine(),
        created_s=time.time(),
        code=code_digests({**rollout_code(config), **loss_code(config)}) or UNSET,
        models=await asyncio.to_thread(model_digests, config, inputs.model, run.model_files_path, note),
    )


async def open_record(
    bus: Bus, config: Config, run: RunDir, record: RunRecord, *, accept_code: bool, accept_model: bool
) -> tuple[bool, list[str]]:
    """Write the record of a new run, or hold it against the one that is there; user code's digests go onto the stream as a mark.

    Args:
        bus: the operator's.
        config: the whole tree.
        run: its directory.
        record: what `prepare` gave.
        accept_code: see `renew_digests`.
        accept_model: the same.

    Returns:
        Whether the run is resumed, and what people should know.

    Raises:
        NothingBinds: this record does not fit the one that is there, but nothing has been trained by that.
        ConfigError: it does not fit, and something has.
    """
    subjects = Subjects(config.run.name)
    code = {} if isinstance(record.code, UnsetType) else record.code
    try:
        resumed = await write_or_check(bus, record)
        changed = await renew_digests(bus, record, accept_code=accept_code, accept_model=accept_model)
    except ConfigError as error:
        if await has_trained(bus, config, run):
            raise
        raise NothingBinds(error.message) from error
    if code:
        try:
            await publish_mark(bus, subjects, Mark(name=MARK_START, detail={"code": code}))
        except StreamFull as error:
            changed.append(f"this start is not marked on the sample stream: {error.message}")
    return resumed, changed


class NothingBinds(Exception):
    """The run has no version yet: it may begin anew with another configuration."""


async def has_trained(bus: Bus, config: Config, run: RunDir) -> bool:
    """Whether there is, or has been, a version: in the ledger, as a manifest or as a checkpoint."""
    subjects, trainer = Subjects(config.run.name), config.trainer.name
    latest = await read_latest(bus, trainer)
    made = await versions_made(bus, subjects, latest, trainer=trainer, run_path=run.path)
    return await bus.last(subjects.ledger(trainer)) is not None or any(version.number for version in made.values())


def _look_at_rows(config: Config, run: RunDir, tokenizer: Tokenizer, size: int, note: Callable[[str], None]) -> tuple[str, int]:
    """Digest and number of the training rows, the number 0 where they are counted while the run is up."""
    if config.data.reading == "whole":
        train = load_problems(config.data.train, config.data, tokenizer)
        check_rows(train, config, config.sampling, size, trained=True)
        if said := train.left_out("data.train", config.data.max_prompt_tokens):
            note(said)
        return train.digest, len(train)
    for name, unusable, tried in try_rows(config, tokenizer, run.data, vocab_size=size):
        if unusable:
            note(
                f"{f'source {name}' if name else 'data.train'}: {len(unusable)} of the first {tried} rows cannot be used, their tasks end "
                f"when their turn comes; the first: {unusable[0].detail}"
            )
    return rows_digest(config), 0


async def check_start(config: Config, run: RunDir, note: Callable[[str], None] = lambda _: None) -> None:
    """Look at the disk, at GPUs and ports; before the bus is started, which takes a port.

    Raises:
        LaunchError: a port that is named is taken, there is no room for a start or for two checkpoints, or the trainer does not fit its
            GPUs.
        ConfigError: the run's directory is a branch's, or the trainer's backend cannot train the model.
    """
    if (run.path / BRANCH_FILE).exists():
        raise ConfigError(
            f"expected a run of its own, got the branch {run.name!r}, which was trained from its parent's log",
            hint="choose another --name",
            key="run.name",
            path=str(run.path),
        )
    refuse_backend(config)
    if (start := check_start_room(config)).state == "fail":
        raise LaunchError(f"expected room for a run: {start.found}", hint=start.hint)
    if (room := check_checkpoints(config)) and room.state == "fail":
        raise LaunchError(f"expected room for two checkpoints: {room.found}", hint=room.hint)
    await check_gpus(config, note)
    deadline = time.monotonic() + _PORTS_S
    while (found := check_ports_wanted(config)).state == "fail":
        if time.monotonic() > deadline:
            raise LaunchError(f"expected the ports that the configuration names to be free: {found.found}", hint=found.hint)
        await asyncio.sleep(0.1)


async def check_gpus(config: Config, note: Callable[[str], None]) -> None:
    """See that the GPUs of trainer and engines are there and that their models fit; says how they share one.

    Those of a cluster of Ray are Ray's to count, and their memory is not known here.

    Raises:
        LaunchError: they are not, or do not.
    """
    trains_there = config.trainer.device != "cpu" and not config.trainer.tabular
    if not (trains_there or config.engine.traits.gpus == "own") or config.ray.address not in ("", "local"):
        return
    gpus = await gpu_memories()
    if not gpus and config.trainer.device != "cuda":  # all is on the CPU, or SGLang's own environment alone sees GPUs
        return
    nbytes = least_memory(config, gpus)
    checks: list[tuple[str, Check | None]] = [
        ("the GPUs that the configuration names", check_gpus_wanted(config, len(gpus))),
        ("GPUs that hold the trainer's models", check_trainer_memory(config, nbytes)),
        ("a GPU that holds trainer and engine", shared := check_shared_gpus(config, nbytes)),
    ]
    for expected, check in checks:
        if check is not None and check.state == "fail":
            raise LaunchError(f"expected {expected}: {check.found}", hint=check.hint)
    if shared is not None:
        note(shared.found + (f"; {shared.hint}" if shared.hint else ""))


def machine() -> dict[str, str]:
    """Versions and the kind of machine, for people; the trainer writes its own numerics fingerprint into the ledger."""
    packages = ("torch", "transformers", "numpy", "pyarrow", "nats-py")
    versions = {name: metadata.version(name) for name in packages}
    return {"python": platform.python_version(), "system": platform.system(), "machine": platform.machine(), **versions}


async def check_log(bus: Bus, config: Config, run: RunDir, *, accept_gap: bool) -> list[str]:
    """Compare ledger, checkpoints, newest manifest and task queue before anything starts; returns what people should know.

    A ledger that lost its end is the trainer's to go on from, which also knows what the sample stream still has.

    Raises:
        CannotResume: the ledger has lost more than its end, and `accept_gap` is false.
    """
    subjects, trainer = Subjects(config.run.name), config.trainer.name
    latest = await read_latest(bus, trainer)
    made = await versions_made(bus, subjects, latest, trainer=trainer, run_path=run.path)
    past = await read_past(bus, subjects, trainer)
    newest = max(past.entries, default=0)
    found = find_gap(past.entries, past.gaps, start=newest, made=made, readable=sys.maxsize)
    if found is not None and found[1].lost in NEED_CONSENT:
        if not accept_gap:
            raise refusal(found[1], trainer)
        end = await bus.last(subjects.ledger(trainer))
        await bus.kv.put(KEY_ACCEPTED_GAP, str(end.sequence if end else 0).encode())
    issued = 1 + max((group.task for entry in past.entries.values() for group in entry.used), default=-1)
    queue = await bus.state(TASKS)
    if queue.last < issued:
        return [
            f"the task queue has lost its end: at least {issued} tasks were issued, it has {queue.last}; those between are issued again, "
            "and what they give is dropped as late"
        ]
    return []
