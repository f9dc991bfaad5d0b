"""A small run of the table backend with what was recorded of it."""

from dataclasses import dataclass
from pathlib import Path

from streamrl.bus.memory import MemoryBus
from streamrl.bus.reading import read_key
from streamrl.config.tree import Config
from streamrl.data.model import ensure_model
from streamrl.history.record import Recording, record
from streamrl.launch.prepare import prepare
from streamrl.runtime.run_record import write_or_check
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.control import RunRecord
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import KEY_RUN
from tests.support.harness import make_run, read_ledger, run_to_end

FIXED: dict[str, dict[str, object]] = {"trainer": {"keep_checkpoints": 100}, "data": {"max_prompt_tokens": 16}}
"""Every checkpoint stays, and the configuration passes its own check."""


@dataclass(frozen=True)
class Recorded:
    config: Config
    run: RunDir
    path: Path
    """The recording."""
    recording: Recording
    ledger: list[LedgerEntry]
    messages: list[tuple[int, str, bytes, dict[str, str]]]
    """The sample stream as the bus had it."""


async def make_recorded(base: Path, config: Config) -> Recorded:
    """Run to the end in process, then record; foreign bytes, a tampered sample and a mark are on the stream, too."""
    run, config = make_run(base, config)
    ensure_model(config, run.model_dir)
    bus = MemoryBus(config.run.name, config.bus)
    try:
        await write_or_check(bus, await prepare(config, run))
        await bus.publish(f"{config.run.name}.samples.main", b"no Arrow data")
        await run_to_end(config, run, bus)
        messages = []
        last = (await bus.state("samples")).last
        async for message in bus.read("samples", after=0):
            messages.append((message.sequence, message.subject, bytes(message.body), dict(message.headers)))
            if message.sequence == last:
                break
        out = base / "recorded"
        made = await record(bus, config, run, out, run_record=await read_key(bus.kv, KEY_RUN, RunRecord), checkpoints=True)
        return Recorded(config, run, out, made, await read_ledger(bus, config.run.name), messages)
    finally:
        await bus.close()
