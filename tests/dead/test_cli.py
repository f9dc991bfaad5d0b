"""`streamrl dead` and `streamrl reward` on a run that is up, on one that is not, and on one that cannot be reached."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from streamrl.bus import BusAddress, connect
from streamrl.bus.server import NatsServer
from streamrl.cli import main
from streamrl.config.tree import BusConfig, Config, RunConfig
from streamrl.consumers.training.dead_letters import publish_dead_letter
from streamrl.consumers.training.ledger import open_ledger
from streamrl.consumers.training.reader import open_message
from streamrl.core.fold import DeadLetter
from streamrl.core.records import Poison
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.digests import body_digest
from streamrl.schemas.ledger import LedgerEntry, Used
from streamrl.schemas.subjects import HEADER_DIGEST, HEADER_TASK, SAMPLES, Subjects
from streamrl.schemas.versions import Version
from tests.support.bad_messages import patched, template
from tests.support.printed import printed
from tests.support.programs import STREAMRL, Start, answer

pytestmark = pytest.mark.nats
GOOD = patched(template((0, 1)), 3, 0)
CONFIG = BusConfig(patience_s=60.0, samples_bytes=10_000_000, blobs_bytes=10_000_000)


async def bad_messages(address: BusAddress, run: str) -> None:
    """Six tasks, two letters (sequences 1 and 2) and one entry that trained task 0."""
    subjects = Subjects(run)
    bus = await connect(address, run, CONFIG)
    try:
        for task in range(6):
            await bus.publish(subjects.tasks("main"), b"task", id=f"t{task}", expect_last=task)
        for task in (3, 0):
            await bus.publish(subjects.samples("main"), GOOD[:-900], headers={HEADER_TASK: str(task), HEADER_DIGEST: body_digest(GOOD)})
        for sequence in (1, 2):
            message = await bus.fetch(SAMPLES, sequence)
            record = open_message(message).record
            assert isinstance(record, Poison)
            await publish_dead_letter(bus, subjects, message, DeadLetter(sequence, record.reason, record.task))
        ledger = await open_ledger(bus, subjects, "main", fence=1)
        used = (Used(0, (0,), (9,)),)
        await ledger.append(
            LedgerEntry(run=run, trainer="main", version=Version(0, 1), source="main", used=used, cursor=2, granted=9, retired=1)
        )
    finally:
        await bus.close()


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    run = RunDir(tmp_path / "runs" / "demo")
    run.create()
    return run


@pytest.fixture
def up(run_dir: RunDir, nats_server: NatsServer) -> Iterator[RunDir]:
    """A run whose bus answers, as far as the command line can tell; nobody trains it."""
    import asyncio

    address = nats_server.address
    password = run_dir.path / "password"
    password.write_text(address.password)
    bus = msgspec.structs.replace(CONFIG, url=address.url, user=address.user, password_file=str(password))
    run_dir.write_config(Config(run=RunConfig(name="demo"), bus=bus))
    address.save(run_dir.bus_path)
    asyncio.run(bad_messages(address, "demo"))
    yield run_dir

    async def remove() -> None:
        connection = await connect(address, "demo", CONFIG)
        await connection.remove()
        await connection.close()

    asyncio.run(remove())


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    out, err = printed(capsys, *arguments, code=1)
    assert out == "" and err.startswith("error: ") and "\nhint: " in err
    return err


def test_list_show_repair_replay(up: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    dead = partial(printed, capsys, "dead")
    header, first, second = dead("list", "demo").out.splitlines()
    assert header.split() == ["SEQ", "TASK", "BYTES", "STORED", "SUBJECT", "REASON"]
    assert first.split()[:2] == ["1", "3"] and "demo.samples.main" in first and "digest" in first
    assert second.split()[:2] == ["2", "0"]
    assert [letter["sequence"] for letter in json.loads(dead("list", "demo", "--json").out)] == [1, 2]

    shown = dead("show", "demo", "1", "--out", "body.bin").out
    assert Path("body.bin").read_bytes() == GOOD[:-900]
    assert f"{HEADER_TASK}: 3" in shown and "--out FILE" in shown and "000000  " in shown
    assert bytes.fromhex(json.loads(dead("show", "demo", "1", "--json").out)["body_hex"]) == GOOD[:256]

    assert "letter 1" in refused(capsys, "dead", "replay", "demo", "1")
    Path("good.bin").write_bytes(GOOD)
    arguments = ["replay", "demo", "1", "--body", "good.bin", "--wait", "0.1"]
    assert "at sequence 3: waiting" in dead(*arguments).out
    (again,) = json.loads(dead(*arguments, "--json").out)
    assert (again["sequence"], again["duplicate"], again["task"], again["state"]) == (3, True, 3, "waiting")
    Path("good.bin").write_bytes(patched(template((0, 1)), 0, 0))
    late = dead("replay", "demo", "2", "--body", "good.bin").out
    assert "dropped" in late and "task 0" in late and "version 0.1" in late, "its task has ended"


def test_wrong_arguments(up: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        ("dead show demo 7", "got 7; there are 2: 1, 2"),
        ("dead replay demo 7", "got 7; there are 2: 1, 2"),
        ("dead replay demo 1 2 --body x", "got 2 sequences"),
        ("dead replay demo 1 --body x", "body x"),
        ("dead show demo 1 --out no/where", "no/where"),
        ("dead list nobody", "got 'nobody'"),
        ("reward nobody --task 0 --rollout 0 --reward 1", "got 'nobody'"),
        ("reward demo --rollout 1 --task 5 --reward 1 --revision 0", "revision >= 1"),
        ("reward demo --rollout 1 --task 5 --reward 1 --part format", "expected --part NAME=VALUE"),
    ):
        assert said in refused(capsys, *words.split()), words
    with pytest.raises(SystemExit) as ended:
        main(["reward", "demo", "--rollout", "1", "--task", "5", "--reward", "nan"])
    assert ended.value.code == 2 and "got 'nan'" in capsys.readouterr().err


def test_reward(up: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    reward = partial(printed, capsys, "reward", "demo", "--rollout", "1", "--wait", "0.1")
    out = reward("--task", "0", "--reward", "0.5", "--part", "format=0.25").out
    assert "sequence 3: dropped" in out and "version 0.1" in out
    first = json.loads(reward("--task", "5", "--reward", "-0.5", "--revision", "3", "--json").out)
    assert (first["sequence"], first["state"], first["duplicate"]) == (4, "waiting", False)
    assert "revision 3 had been published" in reward("--task", "5", "--reward", "1", "--revision", "3").out


async def test_a_run_that_is_not_up_is_read_from_its_store(run_dir: RunDir, start: Start) -> None:
    run_dir.write_config(Config(run=RunConfig(name="demo"), bus=CONFIG))
    server = NatsServer(run_dir.bus_store)
    server.start()
    try:
        await bad_messages(server.address, "demo")
    finally:
        server.stop()
    letters = await answer(await start(*STREAMRL, "dead", "list", str(run_dir.path), "--json"))
    assert [letter["sequence"] for letter in letters] == [1, 2]


def test_a_bus_that_does_not_answer(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    bus = BusConfig(url="nats://127.0.0.1:1", patience_s=0.2)
    run_dir.write_config(Config(run=RunConfig(name="demo"), bus=bus))
    BusAddress(url=bus.url).save(run_dir.bus_path)
    assert "127.0.0.1:1" in refused(capsys, "dead", "list", "demo")
