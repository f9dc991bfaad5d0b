"""What `up` says of user code that has changed, of a ledger that has lost something, and of a run that has trained nothing yet."""

from __future__ import annotations

import json
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
from streamrl.launch.prepare import prepare
from streamrl.monitor.screen import PlainLines
from streamrl.runtime.run_bus import open_bus
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import RunRecord
from streamrl.schemas.samples import Mark
from streamrl.schemas.subjects import KEY_RUN, SAMPLES
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


async def test_before_the_first_version_nothing_binds(up: Start, run: RunDir, place: Path) -> None:
    await started_and_stopped(up, run)
    with (place / "train.jsonl").open("a") as file:
        file.write('{"prompt": "9+9=", "label": "18"}\n')
    code, out, err = await said(await up("learn", "tasks.batch_tasks=7"))
    assert (code, err) == (0, "")
    assert "nothing was trained yet, so the run begins anew: dataset changed on resume" in out and "] starting" in out
    async with open_bus(run) as bus:
        record = await read_key(bus.kv, KEY_RUN, RunRecord)
    assert record is not None and json.loads(record.config)["tasks"]["batch_tasks"] == 7
    code, _, err = await said(await up("learn"))
    assert code == 1 and "tasks.batch_tasks changed on resume" in err, "from the first version on it binds"


async def test_before_the_first_version_the_schedule_has_the_length_of_the_newest_start(up: Start, run: RunDir) -> None:
    await started_and_stopped(up, run)
    before = run.load_config().run.steps
    for steps, length in ((before + 7, before + 7), (before + 9, before + 7)):
        code, out, err = await said(await up("learn", f"run.steps={steps}"))
        assert (code, err) == (0, "")
        assert (f"still that of the first start, over {length} batches" in out) is (steps != length)
        async with open_bus(run) as bus:
            record = await read_key(bus.kv, KEY_RUN, RunRecord)
        assert record is not None
        for kept in (run.load_config(), from_json(record.config)):
            assert kept.trainer.optimizer.decay_steps == length


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
            raise LaunchError("the disk is full by now")
        prepared.append(await prepare(*given))  # type: ignore[arg-type]
        return prepared[0]

    async def connect(*given: object, **options: object) -> JetStreamBus:
        made.append(await bus.connect(*given, **options))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(launch, "prepare", prepare_once)
    monkeypatch.setattr(launch, "connect", connect)
    with pytest.raises(LaunchError, match="the disk is full"):
        await launch.up(config, PlainLines(), launcher=LocalLauncher(run, config))
    assert made and not any(one.connected for one in made)


async def test_a_changed_reward_is_said_and_goes_on(up: Start, run: RunDir, place: Path) -> None:
    assert (await said(await up("learn")))[0] == 0
    code, out, _ = await said(await up("learn"))
    assert code == 0 and "has changed" not in out
    (place / "helper.py").write_text(HELPER.replace("float(len(text))", "-float(len(text))"))
    code, out, _ = await said(await up("learn"))
    assert code == 0 and "the code of reward.kind has changed since the last start" in out
    code, out, _ = await said(await up("learn"))
    assert code == 0 and "has changed" not in out
    async with open_bus(run) as bus:
        record, last = await read_key(bus.kv, KEY_RUN, RunRecord), (await bus.state(SAMPLES)).last
        marks = [decode((await bus.fetch(SAMPLES, sequence)).body, Mark) for sequence in range(1, last + 1)]
    digests = [mark.detail["code"]["reward.kind"] for mark in marks]
    assert [mark.name for mark in marks] == ["start"] * 4
    assert digests[0] == digests[1] != digests[2] == digests[3]
    assert record is not None and record.code == {"reward.kind": digests[3]}


async def test_a_changed_loss_asks_for_consent(up: Start, run: RunDir, place: Path) -> None:
    own = f"loss.advantage={place / 'loss.py'}:advantage"
    assert (await said(await up("learn", own)))[0] == 0
    (place / "loss.py").write_text(LOSS + "# another\n")
    for _ in range(2):
        code, _, err = await said(await up("learn", own))
        assert code == 1 and "the code of loss.advantage is not what run 'demo' was trained with" in err and "--accept-code" in err
    code, out, _ = await said(await up("learn", "--accept-code", own))
    assert code == 0 and "the code of loss.advantage has changed" in out
    assert (await said(await up("learn", own)))[0] == 0, "it is what the run is trained with now"


@pytest.mark.parametrize("name", ["tokenizer.json", "table.json"])
async def test_another_model_in_the_same_folder_asks_for_consent(up: Start, run: RunDir, place: Path, name: str) -> None:
    write_table(place / "mine", max_position=4)
    own = f"model.path={place / 'mine'}"
    assert (await said(await up("learn", own)))[0] == 0
    async with open_bus(run) as bus:
        first = await read_key(bus.kv, KEY_RUN, RunRecord)
    shutil.move(place / "mine", place / "yours")
    own = f"model.path={place / 'yours'}"
    assert (await said(await up("learn", own)))[0] == 0, "it is the same, wherever it lies"
    with (place / "yours" / name).open("a") as file:
        file.write("\n")
    for _ in range(2):
        code, _, err = await said(await up("learn", own))
        assert code == 1 and "a model is not what run 'demo' was trained with so far: model.path: expected files with digest" in err
        assert "--accept-model" in err
    code, out, _ = await said(await up("learn", "--accept-model", own))
    assert code == 0 and "the files of model.path have changed since the last start" in out
    assert (await said(await up("learn", own)))[0] == 0, "it is what the run is trained with now"
    async with open_bus(run) as bus:
        last = await read_key(bus.kv, KEY_RUN, RunRecord)
        assert first is not None and last is not None and last.models != first.models
        # A run of a build that wrote no digests.
        await bus.kv.put(KEY_RUN, encode(msgspec.structs.replace(last, models=msgspec.UNSET)))
    with (place / "yours" / name).open("a") as file:
        file.write("\n")
    assert (await said(await up("learn", own)))[0] == 0


async def test_a_ledger_without_its_middle_is_refused_before_anything_starts(up: Start, run: RunDir) -> None:
    assert (await said(await up("learn")))[0] == 0
    async with open_bus(run):
        address = BusAddress.load(run.bus_path)
        client = await nats.connect(address.url, user=address.user, password=address.password)
        await client.jetstream().delete_msg("demo-ledger", 7)
        await client.close()
    pids = read_pids(run.path / "pids")
    code, _, err = await said(await up("learn"))
    assert code == 1 and "there is none for version 7" in err and "--accept-gap" in err
    assert read_pids(run.path / "pids") == pids, "no worker was started"
    assert (await said(await up("learn", "--accept-gap")))[0] == 0
