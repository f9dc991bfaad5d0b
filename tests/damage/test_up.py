"""What `up` says of user code that has changed, of a ledger that has lost something, and of a run that has trained nothing yet."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import msgspec
import nats
import pytest

from streamrl import bus
from streamrl.bus import BusAddress
from streamrl.bus.jetstream.bus import JetStreamBus
from streamrl.bus.reading import read_key
from streamrl.config.load import from_json, load
from streamrl.data.model import write_table
from streamrl.errors import LaunchError
from streamrl.launch import up as launch
from streamrl.launch.local import LocalLauncher
from streamrl.launch.prepare import make_record
from streamrl.monitor.screen import PlainLines
from streamrl.runtime.run_bus import open_bus
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import RunRecord
from streamrl.schemas.samples import Mark
from streamrl.schemas.subjects import KEY_RUN, SAMPLES
from tests.support.errors import raises
from tests.support.processes import read_pids, until
from tests.support.programs import Start, said
from tests.support.tiny import tiny_up, write_tiny

pytestmark = pytest.mark.nats

TOML = """
[run]
name = "demo"
[data]
train = "train.jsonl"
[engine]
kind = "table"
[trainer]
backend = "table"
[reward]
kind = "reward.py:score"
[supervise]
drain_s = 5
"""
REWARD = "from helper import length\n\n\ndef score(task, episode):\n    return length(episode.completion)\n"
HELPER = "def length(text):\n    return float(len(text))\n"
LOSS = "def advantage(batch, config):\n    return batch\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_tiny(tmp_path, TOML)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "loss.py").write_text(LOSS)
    return tmp_path


@pytest.fixture
def run(place: Path) -> RunDir:
    return RunDir(place / "runs" / "demo")


@pytest.fixture
def up(place: Path, start: Start) -> Start:
    return tiny_up(start)


async def started_and_stopped(up: Start, run: RunDir) -> None:
    """A start that trains nothing."""
    process = await up("endless")
    await until(lambda: len(read_pids(run.path / "pids")) >= 4)
    process.send_signal(signal.SIGTERM)
    assert (await said(process))[0] == 0


async def recorded(run: RunDir) -> RunRecord:
    async with open_bus(run) as bus:
        record = await read_key(bus.kv, KEY_RUN, RunRecord)
    assert record is not None
    return record


async def test_before_the_first_version_nothing_binds(up: Start, run: RunDir, place: Path) -> None:
    """The schedule has the length of the newest start before it."""
    await started_and_stopped(up, run)
    before = run.load_config().run.steps
    with (place / "train.jsonl").open("a") as file:
        file.write('{"prompt": "9+9=", "label": "18"}\n')
    for steps, again in ((before + 7, False), (before + 9, True)):
        code, out, err = await said(await up("learn", "tasks.batch_tasks=7", f"run.steps={steps}"))
        assert (code, err) == (0, "")
        assert ("begins anew: dataset" in out, f"over {before + 7} batches" in out) == (not again, again)
        record = from_json((await recorded(run)).config)
        assert record.tasks.batch_tasks == 7
        for kept in (run.load_config(), record):
            assert kept.trainer.optimizer.decay_steps == before + 7
    code, _, err = await said(await up("learn"))
    assert code == 1 and "tasks.batch_tasks" in err, "from the first version on it binds"


async def test_a_run_that_cannot_begin_anew_leaves_no_connection(
    up: Start, run: RunDir, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await started_and_stopped(up, run)
    with (place / "train.jsonl").open("a") as file:
        file.write('{"prompt": "9+9=", "label": "18"}\n')
    monkeypatch.chdir(place)
    config = load("demo.toml")
    prepared, made = list[RunRecord](), list[JetStreamBus]()

    async def prepare_once(*given: object) -> RunRecord:
        if prepared:
            raise LaunchError("full", space=0)
        prepared.append(await make_record(*given))  # type: ignore[arg-type]
        return prepared[0]

    async def connect(*given: object, **options: object) -> JetStreamBus:
        made.append(await bus.connect(*given, **options))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(launch, "make_record", prepare_once)
    monkeypatch.setattr(launch, "connect", connect)
    with raises(LaunchError, space=0):
        await launch.up(config, PlainLines(), launcher=LocalLauncher(run, config))
    assert made and not any(one.connected for one in made)


@pytest.mark.slow
async def test_what_has_changed_is_said_and_what_binds_asks_for_consent(up: Start, run: RunDir, place: Path) -> None:
    """One run, started again and again after the code of its reward and its loss, the files of its model, and its ledger have changed."""
    write_table(place / "mine", max_position=4)

    async def start(*consents: str, folder: str = "yours") -> tuple[int | None, str]:
        code, out, err = await said(
            await up("learn", *consents, f"loss.advantage={place / 'loss.py'}:advantage", f"model.path={place / folder}")
        )
        assert bool(code) == bool(err) and "--accept" not in out
        changed = {key for key in ("reward.kind", "loss.advantage", "model.path") if f"{key} ha" in out}
        return code, " ".join(sorted(changed)) if code == 0 else err

    assert await start(folder="mine") == (0, "")
    first = await recorded(run)
    shutil.move(place / "mine", place / "yours")  # it is the same, wherever it lies
    (place / "helper.py").write_text(HELPER.replace("float(len(text))", "-float(len(text))"))
    assert await start() == (0, "reward.kind")
    (place / "loss.py").write_text(LOSS + "# another\n")
    with (place / "yours" / "tokenizer.json").open("a") as file:
        file.write("\n")
    for consents, key, asked in ((), "loss.advantage", "--accept-code"), (("--accept-code",), "model.path", "--accept-model"):
        code, err = await start(*consents)
        assert code == 1 and key in err and asked in err
    assert await start("--accept-code", "--accept-model") == (0, "loss.advantage model.path")
    with (place / "yours" / "table.json").open("a") as file:
        file.write("\n")
    code, err = await start()
    assert code == 1 and "--accept-model" in err
    last = await recorded(run)
    assert last.models != first.models and last.code is not msgspec.UNSET and first.code is not msgspec.UNSET
    assert last.code["reward.kind"] != first.code["reward.kind"]
    async with open_bus(run) as bus:  # as a run of a build that wrote no digests
        await bus.kv.put(KEY_RUN, encode(msgspec.structs.replace(last, models=msgspec.UNSET)))
    assert await start() == (0, "")

    async with open_bus(run) as bus:
        end = (await bus.state(SAMPLES)).last
        marks = [decode((await bus.fetch(SAMPLES, sequence)).body, Mark) for sequence in range(1, end + 1)]
        address = BusAddress.load(run.bus_path)
        client = await nats.connect(address.url, user=address.user, password=address.password)
        await client.jetstream().delete_msg("demo-ledger", 7)
        await client.close()
    assert [mark.name for mark in marks] == ["start"] * 4
    digests = [mark.detail["code"]["reward.kind"] for mark in marks]
    assert digests[0] != digests[1] == digests[2] == digests[3] == last.code["reward.kind"]
    pids = read_pids(run.path / "pids")
    code, err = await start()
    assert code == 1 and "version 7" in err and "--accept-gap" in err
    assert read_pids(run.path / "pids") == pids, "no worker was started"
    assert await start("--accept-gap") == (0, "")
