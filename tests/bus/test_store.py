"""A run whose store lies under the server's default account, where the versions before accounts put it."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.bus import connect
from streamrl.bus.accounts import FORMER, RUN
from streamrl.bus.server import NatsServer
from streamrl.bus.store import move_to_account
from streamrl.errors import LaunchError
from streamrl.schemas.subjects import Subjects

TO = Subjects("run")


async def furnished(directory: Path) -> tuple[Path, str]:
    """A store as an earlier version left it, with a log, a key, a blob and a task that is claimed; and the log's identity."""
    server = NatsServer(directory)
    server.start()
    bus = await connect(server.address, "run")
    for number in range(100):
        await bus.publish(TO.samples("main"), b"%d" % number, id=str(number))
    await bus.publish(TO.tasks("main"), b"task")
    await bus.claim("main", max=1, wait_s=1.0)
    await bus.kv.put("granted", b"7")
    await bus.blobs.put("large", bytes(3_000_000))
    identity = (await bus.state("samples")).identity
    await bus.close()
    server.stop()
    store = directory / "store"
    (store / "jetstream" / RUN).rename(store / "jetstream" / FORMER)
    return store, identity


async def check_whole(directory: Path, identity: str) -> None:
    server = NatsServer(directory)
    server.start()
    try:
        bus = await connect(server.address, "run")
        state = await bus.state("samples")
        assert (state.identity, state.first, state.last) == (identity, 1, 100)
        assert (await bus.fetch("samples", 100)).body == b"99"
        assert (await bus.publish(TO.samples("main"), b"again", id="99")).duplicate
        entry = await bus.kv.get("granted")
        assert entry is not None and entry.value == b"7"
        assert await bus.blobs.get("large") == bytes(3_000_000)
        assert (await bus.state("tasks")).messages == 1
        await bus.close()
    finally:
        server.stop()


@pytest.mark.nats
async def test_an_old_runs_streams_are_found_and_moved_once(tmp_path: Path) -> None:
    store, identity = await furnished(tmp_path)
    for _ in range(2):
        await check_whole(tmp_path, identity)
        assert [path.name for path in (store / "jetstream").iterdir()] == [RUN]
    assert not move_to_account(store)


def stream(store: Path, account: str, name: str) -> Path:
    folder = store / "jetstream" / account / "streams" / name
    folder.mkdir(parents=True)
    return folder


def test_empty_folders_are_in_nobodys_way(tmp_path: Path) -> None:
    assert not move_to_account(tmp_path / "nothing")
    (tmp_path / "jetstream" / FORMER / "streams").mkdir(parents=True)
    assert not move_to_account(tmp_path)
    stream(tmp_path, FORMER, "run-samples")
    (tmp_path / "jetstream" / RUN / "streams").mkdir(parents=True)
    assert move_to_account(tmp_path)
    assert [path.name for path in (tmp_path / "jetstream" / RUN / "streams").iterdir()] == ["run-samples"]


def test_streams_under_both_names_are_a_named_error_and_stay(tmp_path: Path) -> None:
    stream(tmp_path, FORMER, "run-samples")
    stream(tmp_path, RUN, "run-samples")
    with pytest.raises(LaunchError, match="got both") as caught:
        move_to_account(tmp_path)
    assert "move that folder away" in caught.value.hint
    assert {path.name for path in (tmp_path / "jetstream").iterdir()} == {FORMER, RUN}


def test_a_store_that_cannot_be_moved_is_a_named_error(tmp_path: Path) -> None:
    stream(tmp_path, FORMER, "run-samples")
    (tmp_path / "jetstream" / RUN).write_text("a file")
    with pytest.raises(LaunchError, match="cannot rename"):
        move_to_account(tmp_path)
