"""Sets of problems asked of a version of a run, or of a model directory, by an engine of its own: `streamrl eval`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from streamrl.config.evaluation import EvaluationSetConfig
from streamrl.config.evaluation_sets import HELDOUT, ProblemSet, problem_sets
from streamrl.config.load import load, override
from streamrl.config.tree import Config, DataConfig, TrainerConfig
from streamrl.data.model import ensure_model
from streamrl.data.problems import left_out, load_set
from streamrl.data.tokenizer import load_tokenizer
from streamrl.engines.factory import make_engine
from streamrl.engines.protocol import HostedEngine
from streamrl.errors import ConfigError
from streamrl.history.export import choose, export, find_versions
from streamrl.producers.evaluation.asking import AHEAD, Room, asked_digest, evaluate
from streamrl.producers.evaluation.store import open_store
from streamrl.producers.factory import runner_of
from streamrl.runtime.kinds import take_environment
from streamrl.runtime.run_bus import open_bus
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.versions import Version
from streamrl.trainers.factory import make_trainer
from streamrl.weights.manifest import Content, build, cut
from streamrl.weights.protocol import Part

_PART_BYTES = 64 << 20
_WEIGHTS = ("*.safetensors", "*.bin", "logits.npy")


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What is evaluated."""

    name: str
    model_dir: Path
    version: Version
    weights: str
    """What tells these weights from others."""
    out: Path
    """Folder of the answers and results."""


def with_sets(config: Config, named: Sequence[str]) -> tuple[Config, tuple[ProblemSet, ...]]:
    """The configuration with sets given as `NAME=PATH`, and which are to be asked: those that were given, without any all.

    A set that the configuration has keeps all but its path.

    Raises:
        ConfigError: text of another form, a set that cannot be, or none at all.
    """
    sets, heldout, names = list(config.evaluation.sets), config.data.heldout, list[str]()
    for text in named:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"expected --set NAME=PATH, got {text!r}", hint="for example --set gsm8k=test.jsonl@[0:100]")
        if name in names:
            raise ConfigError(f"expected a name of its own for each set of problems, got {name!r} twice", hint="rename one of them")
        names.append(name)
        path = str(Path(path).expanduser().absolute())
        known = next((place for place, one in enumerate(sets) if one.name == name), None)
        if name == HELDOUT:
            heldout = path
        elif known is None:
            sets.append(EvaluationSetConfig(name=name, path=path))
        else:
            sets[known] = replace(sets[known], path=path)
    config = replace(config, data=replace(config.data, heldout=heldout), evaluation=replace(config.evaluation, sets=tuple(sets)))
    found = tuple(one for one in problem_sets(config) if not names or one.name in names)
    if not found:
        raise ConfigError(
            "expected sets of problems, got neither data.heldout nor evaluation.sets",
            hint="name one with --set NAME=PATH, or a configuration that has some with --config",
        )
    return override(config, ["run.name=" + config.run.name]), found  # checks the whole


def config_of_directory(model_dir: Path, file: Path | None, overrides: Sequence[str]) -> Config:
    """A configuration for a model directory: of a file, which need not say what is trained, or the defaults.

    Raises:
        ConfigError: the directory has no model, or the file cannot be read.
    """
    tabular = (model_dir / "table.json").is_file()
    if not tabular and not any(found for pattern in _WEIGHTS for found in model_dir.glob(pattern)):
        raise ConfigError(
            f"expected a model directory with weights, got {model_dir}, which has none",
            hint="it needs config.json, a tokenizer and *.safetensors, as `streamrl export` writes them",
            path=str(model_dir),
        )
    given = ['engine.kind="table"', 'trainer.backend="table"'] if tabular else []
    given += [f"model.path={model_dir.absolute()}", *overrides]
    if file is None:
        # Nobody reads training rows here.
        return override(Config(data=DataConfig(train=str(model_dir / "config.json"))), given)
    return load(file, [f"data.train={file.absolute()}", "data.sources=[]", "data.curriculum=", *given])


def model_kind(path: Path) -> bool:
    """Whether a directory is a model's: a run has a config.json too."""
    if (path / "table.json").is_file():
        return True
    try:
        described = msgspec.json.decode((path / "config.json").read_bytes())
    except (OSError, msgspec.MsgspecError):
        return False
    return isinstance(described, dict) and ("model_type" in described or "architectures" in described)


def directory_subject(model_dir: Path, out: Path | None) -> Subject:
    """A model directory; its files are told apart by name, size and time."""
    files = sorted(path for path in model_dir.iterdir() if path.is_file())
    told = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    weights = hashlib.sha256(msgspec.json.encode(told)).hexdigest()
    name = model_dir.absolute().name
    return Subject(name=name, model_dir=model_dir, version=Version(0, 0), weights=weights, out=out or Path("evaluations").absolute() / name)


@contextlib.asynccontextmanager
async def run_subject(run: RunDir, config: Config, wanted: str | None, out: Path | None) -> AsyncGenerator[Subject]:
    """A version of a run, up or not, as a model directory that is there meanwhile.

    Raises:
        ConfigError: it is not there any more; names those that are.
    """
    with tempfile.TemporaryDirectory(prefix=".eval-", dir=run.path) as scratch:
        async with open_bus(run) as bus:
            found = await find_versions(config, bus, run.checkpoints)
            version = choose(found, wanted)
            model_dir = run.export_path(version)
            if not model_dir.is_dir():
                model_dir = Path(scratch) / "model"
                await export(config, bus, ensure_model(config, run.model_dir), found, version, model_dir)
        yield Subject(
            name=f"{run.name} {version}",
            model_dir=model_dir,
            version=version,
            weights=f"{run.name} {version}",
            out=out or run.evaluations / f"eval-{version}",
        )


async def evaluate_subject(
    config: Config,
    sets: Sequence[ProblemSet],
    subject: Subject,
    *,
    said: Callable[[str], None] = lambda text: None,
    note: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Ask all sets, one after another, going on from the answers that are in `subject.out`; their results, which lie there too.

    `said` hears how far it is, and `note` which rows are not asked.

    Raises:
        LaunchError: another process evaluates into the same folder.
        ConfigError, DataError: rows, user code or the model cannot be used.
        EngineError: the engine cannot be started.
    """
    # User code and numpy in processes of their own: a thread a core each would be too many.
    take_environment(config, "producer")
    tokenizer = load_tokenizer(subject.model_dir)
    loaded = [(one, await asyncio.to_thread(load_set, one, tokenizer)) for one in sets]
    for one, rows in loaded:
        for text in left_out(one, rows):
            note(text)
    found: list[dict[str, Any]] = []
    async with contextlib.AsyncExitStack() as stack:
        stores = [
            stack.enter_context(open_store(subject.out / f"{one.name}.jsonl", asked_digest(one, rows, subject.weights)))
            for one, rows in loaded
        ]
        engine = await stack.enter_async_context(_engine(config, subject))
        for (one, rows), store in zip(loaded, stores, strict=True):
            runner = runner_of(one.config, subject.model_dir, engine, one.config.producer.function, key="producer.function")
            stack.push_async_callback(runner.close)
            await runner.start()

            def told(done: int, of: int, one: ProblemSet = one) -> None:
                said(f"{one.name}: {done} of {of}")

            room = Room(lambda: AHEAD * config.engine.slots)
            detail = await evaluate(one, rows, runner, store, version=subject.version, room=room, pinned=True, told=told)
            found.append(detail)
    return found


@contextlib.asynccontextmanager
async def _engine(config: Config, subject: Subject) -> AsyncGenerator[HostedEngine]:
    """An engine of the configuration's kind in this process, that serves the directory's weights as the version."""
    engine = await asyncio.to_thread(
        make_engine,
        config.engine,
        subject.model_dir,
        engine_id="eval-0",
        max_len=config.model.max_len,
        dtype=config.model.dtype,
        log_path=subject.out / "engine.log",
    )
    try:
        await engine.start()
        await serve_weights(engine, config, subject)
        yield engine
    finally:
        await engine.stop()


async def serve_weights(engine: HostedEngine, config: Config, subject: Subject) -> None:
    """Have it take the weights as a trainer would publish them, read on the CPU."""
    backend = "table" if config.engine.traits.tabular else "torch"
    reading = Config(model=replace(config.model, path=str(subject.model_dir)), trainer=TrainerConfig(backend=backend, device="cpu"))
    trainer = await asyncio.to_thread(make_trainer, reading, subject.model_dir)
    content = await asyncio.to_thread(lambda: Content(list(trainer.shards())))
    manifest = build(content, run="eval", policy="policy", version=subject.version, parts=(), transport="shm")

    async def parts() -> AsyncIterator[Part]:
        for piece in cut(content.nbytes, _PART_BYTES):
            data = np.empty(piece.nbytes, np.uint8)
            await asyncio.to_thread(content.fill, piece.start, data)
            yield Part(piece.start, data.data)

    await engine.stage(manifest, parts())
    await engine.commit(subject.version)
