"""Code that really fails: each function ends in the error that it is named after, and docs/errors.md shows what was said.

All of it runs on one core in a few seconds: in process where a bus is needed, on a real nats-server where rights or a port are.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import socket
import sys
from collections.abc import Coroutine
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from scripts.docs import provoked_server
from streamrl.bus import BusAddress, connect
from streamrl.bus.memory import MemoryBus
from streamrl.bus.permissions import OPERATOR, role_users
from streamrl.bus.server import NatsServer
from streamrl.config.engines import EngineConfig, SglangConfig
from streamrl.config.load import load
from streamrl.config.reward_kinds import Calls
from streamrl.config.tree import BusConfig, Config, DebugConfig, LossConfig, ModelConfig, OptimizerConfig, TrainerConfig
from streamrl.consumers.training.ledger import open_ledger, take_fence
from streamrl.core.batches import TrainBatch
from streamrl.data.characters import write_tokenizer
from streamrl.data.model import ensure_model
from streamrl.data.problems import load_problems
from streamrl.data.tokenizer import load_tokenizer
from streamrl.data.tool_calls import ToolCall
from streamrl.engines.batching.buffers import TensorLayout, WeightBuffers
from streamrl.engines.http import HttpEngine
from streamrl.engines.protocol import Chunk, GenerateRequest
from streamrl.engines.requests import check_request
from streamrl.engines.sglang.server import SglangServer
from streamrl.producers.engine_pool import Silence
from streamrl.producers.tool_runs import fail_on, run_calls
from streamrl.producers.turns import Turn
from streamrl.rewards.asking import Asking
from streamrl.runtime.lock import lock_run
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import SAMPLES, Subjects
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from streamrl.telemetry.names import metric
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.table.trainer import TABLE_FILE, Adam, TableTrainer
from streamrl.weights.manifest import Content, build
from streamrl.weights.protocol import Shard

RUN = "demo"
SUBJECTS = Subjects(RUN)
_SMALL = BusConfig(samples_bytes=1000, patience_s=2.0)


def unknown_key() -> None:
    """A typing error in the file."""
    _config("[tasks]\nmax_stalness = 2\n")


def contradiction() -> None:
    """Keys that do not go together."""
    _config("[tasks]\nmax_staleness = 0\nhold_ahead = true\n")


def no_such_run() -> None:
    """`streamrl status dmeo`."""
    RunDir.find("dmeo")


def row_without_label() -> None:
    """A row that cannot be used."""
    Path("rows.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n{"prompt": "1+2="}\n')
    write_tokenizer(Path("tokenizer"))
    config = _config('[data]\ntrain = "rows.jsonl"\n')
    load_problems("rows.jsonl", config.data, load_tokenizer(Path("tokenizer")))


async def reward_from_nobody() -> None:
    """A reward that is asked for where nobody listens."""
    asking = Asking("http://127.0.0.1:9/score", Calls(attempts=1), what="reward remote")
    try:
        await asking.post({"response": "4"}, where="row 2 (task 5, rollout 0)")
    finally:
        await asking.close()


def no_arrow() -> None:
    """Bytes that are no samples; on the stream they become a dead letter."""
    decode_samples(b"no Arrow data")


def undeclared_metric() -> None:
    """A metric that no worker may report."""
    metric("staleness/avg")


async def too_large() -> None:
    """A message above the server's limit."""
    await MemoryBus(RUN).publish(SUBJECTS.samples("main"), bytes(9 << 20))


async def nobody_there() -> None:
    """No server at the address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    await connect(BusAddress(url=f"nats://127.0.0.1:{port}"), RUN, _SMALL)


async def not_its_right() -> None:
    """A producer's credentials, and the ledger."""
    async with contextlib.AsyncExitStack() as stack:
        users = role_users(RUN, [(role, "secret") for role in (OPERATOR, "producer")])
        server = NatsServer(Path("bus"), users=users)
        server.start()
        stack.callback(server.stop)
        operator = await connect(server.address, RUN)
        stack.push_async_callback(operator.close)
        producer = await connect(server.address_of(users[1]), RUN, create=False)
        stack.push_async_callback(producer.close)
        await producer.publish(SUBJECTS.ledger("main"), b"")


async def somebody_was_first() -> None:
    """Two writers, one expectation."""
    bus = MemoryBus(RUN)
    await bus.publish(SUBJECTS.tasks("main"), b"task 0", expect_last=0)
    await bus.publish(SUBJECTS.tasks("main"), b"another task 0", expect_last=0)


async def no_room() -> None:
    """A byte budget, used up."""
    bus = MemoryBus(RUN, _SMALL)
    await bus.publish(SUBJECTS.samples("main"), bytes(700))
    await bus.publish(SUBJECTS.samples("main"), bytes(700))


async def trimmed() -> None:
    """A replay from the beginning of a stream that has been trimmed."""
    bus = MemoryBus(RUN)
    for number in range(5):
        await bus.publish(SUBJECTS.samples("main"), str(number).encode())
    await bus.trim(SAMPLES, through=3)
    await anext(aiter(bus.read(SAMPLES, after=0)))


async def retired_blob() -> None:
    """Bytes of a version that is no longer kept."""
    await MemoryBus(RUN).blobs.get("weights/policy/0-3/all")


def long_prompt() -> None:
    """A prompt that leaves no room for an answer."""
    request = GenerateRequest(request_id="task-7", policy="policy", prompt_ids=tuple(range(40)), seeds=(1,))
    check_request(request, engine="engine-0", policy="policy", vocab_size=64, max_len=32)


def endless_answer() -> None:
    """An engine that gives a call more tokens than it asked for."""
    call = Silence(GenerateRequest(request_id="0.0-1", prompt_ids=(1,), sampling=Sampling(max_new_tokens=4), seeds=(0,)), 120.0)
    call.heard(Chunk(completion=0, token_ids=(7, 7, 7, 7, 7), logprobs=(-1.0,) * 5, spans=(), engine="engine-0"))


async def gone_engine() -> None:
    """An engine that does not answer; producers ask another one."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = HttpEngine(f"http://127.0.0.1:{silent.getsockname()[1]}", silence_s=0.1)
        try:
            await engine.info()
        finally:
            await engine.close()


async def tool_that_fails() -> None:
    """A tool that raises, in a rollout that is to fail then."""

    def search(query: str) -> str:
        raise OSError("the index is away")

    turn = Turn("", (), "stop", tool_calls=(ToolCall("search", {"query": "x"}),))
    results = await run_calls(turn, {"search": search}, timeout_s=5.0, retries=0, max_chars=100, log=logging.getLogger("docs"))
    fail_on(results)


def server_that_ends() -> Coroutine[None, None, None]:
    """An SGLang server that ends once it has started."""
    python, model = Path("python"), Path("model")
    python.write_text(f"#!{sys.executable}\n{inspect.getsource(provoked_server)}")
    python.chmod(0o700)
    model.mkdir()
    (model / "config.json").write_text("{}")
    config = EngineConfig(kind="sglang", sglang=SglangConfig(python=str(python.absolute()), swap="pause"))
    server = SglangServer(config, model, name="engine-0", max_len=64, dtype="bfloat16", log_path=Path("engine-0-server.log").absolute())
    return _whole_life(server)


def other_model() -> None:
    """Weights of a trainer whose model is wider than the engine's."""
    shape = (4, 8, 8)
    shard = Shard(name="logits", dtype="float32", global_shape=shape, shape=shape, data=np.zeros(4 * 8 * 8 * 4, np.uint8))
    content = Content([shard])
    manifest = build(content, run=RUN, policy="policy", version=Version(0, 12), parts=(), transport="bus")
    WeightBuffers([TensorLayout("logits", "float32", (4, 6, 6))]).check(manifest)


CHECKPOINT = Path("checkpoints") / "main-v00000012-e0"


def damaged_checkpoint() -> None:
    """A checkpoint whose file was cut."""
    trainer = _table(vocab=4)
    trainer.save(CHECKPOINT, b"", version=Version(0, 12)).result()
    (CHECKPOINT / "state.npz").write_bytes(b"PK")
    trainer.load(CHECKPOINT)


def checkpoint_of_another_model() -> None:
    """The model directory was exchanged between two starts."""
    _table(vocab=4).save(CHECKPOINT, b"", version=Version(0, 12)).result()
    _table(vocab=6).load(CHECKPOINT)


def _table(vocab: int) -> TableTrainer:
    model = Path(f"model-{vocab}")
    model.mkdir()
    (model / TABLE_FILE).write_text(f'{{"vocab": {vocab}, "max_position": 8, "eos": 0}}')
    return TableTrainer(model, trainer=TrainerConfig(backend="table"), loss=LossConfig(), learning_rate=lambda batch: 0.1)


def endless_rate() -> None:
    """A learning rate that no weights survive."""
    table = np.zeros((1, 2, 2), np.float32)
    Adam(table, OptimizerConfig()).step(np.ones(table.shape), 1e60)


def one_sample_too_long() -> None:
    """A sample that does not fit alone."""
    config = Config(
        model=ModelConfig(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=16),
        trainer=TrainerConfig(micro_tokens=8),
        debug=DebugConfig(memory_tokens=8),
    )
    batch = TrainBatch.from_lists([[2] * 8], [[3] * 4], kind="sft")
    make_trainer(config, ensure_model(config, Path("model"))).step(batch)


async def another_trainer() -> None:
    """A trainer that was stopped inside a commit, and wakes beside its successor."""
    bus = MemoryBus(RUN)
    old = await open_ledger(bus, SUBJECTS, "main", fence=await take_fence(bus, "main"))
    new = await open_ledger(bus, SUBJECTS, "main", fence=await take_fence(bus, "main"))
    for ledger in (new, old):
        entry = LedgerEntry(run=RUN, trainer="main", version=Version(0, 1), source="main", used=(), cursor=9, granted=4, retired=2)
        await ledger.append(replace(entry, fence=ledger.fence))


def up_twice() -> None:
    """`streamrl up` on a run that is up."""
    run = RunDir(Path("runs") / RUN)
    run.create()
    with lock_run(run), lock_run(run):
        pass


def port_in_use() -> None:
    """`bus.port` is somebody else's."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        NatsServer(Path("bus"), port=taken.getsockname()[1]).start()


async def _whole_life(server: SglangServer) -> None:
    try:
        await server.start()
        raise await server.ended()
    finally:
        await server.stop()


def _config(text: str) -> Config:
    Path("my.toml").write_text(text if "[data]" in text else f'[data]\ntrain = "my.toml"\n{text}')
    return load("my.toml")
