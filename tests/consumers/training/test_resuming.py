"""Where a trainer goes on from, on the in-process bus with a backend that only gives back what it was given."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from streamrl.bus.memory import MemoryBus
from streamrl.bus.protocol import Message
from streamrl.consumers.training.ledger import open_ledger
from streamrl.consumers.training.resuming import Resumed, Resuming
from streamrl.core.state import FoldState
from streamrl.errors import CannotResume, CheckpointDamaged, LogTruncated, TrainingError
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import Latest, Position
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import PREFIX_POSITIONS, SAMPLES, Subjects
from streamrl.schemas.versions import Version
from tests.support.records import Stream, config, view

SUBJECTS = Subjects("r")
INITIAL = Stream(config()).state


def path_of(number: int, epoch: int = 0) -> str:
    return f"checkpoints/main-v{number:08d}-e{epoch}"


class Scene:
    """A run with a stream of ten messages, versions 1 to 5 in its ledger, and checkpoints that are made as a test says."""

    def __init__(self, path: Path, call: Any) -> None:
        self.path, self.call = path / "demo", call
        self.bus = MemoryBus("r")
        self.said: list[str] = []
        self.puts: list[tuple[str, Any]] = []
        self.damaged: set[str] = set()
        self.loaded: list[str] = []
        self.states: dict[str, FoldState] = {}
        self.messages(10)
        self.entries(1, 2, 3, 4, 5)
        put = self.bus.kv.put

        async def told(key: str, value: bytes, **options: Any) -> int:
            self.puts.append((key, decode(value, Position if key.startswith(PREFIX_POSITIONS) else Latest)))
            return await put(key, value, **options)

        self.bus.kv.put = told  # type: ignore[method-assign]

    def messages(self, count: int) -> None:
        for _ in range(count):
            self.call(self.bus.publish(SUBJECTS.rewards, b"x"))

    @property
    def identity(self) -> str:
        return self.call(self.bus.state(SAMPLES)).identity

    def entries(self, *numbers: int, epoch: int = 0) -> None:
        """The ledger has these."""
        for number in numbers:
            version, empty = Version(epoch, number), {"used": (), "granted": 0, "retired": 0}
            entry = LedgerEntry(run="r", trainer="main", version=version, source="main", cursor=number, **empty)
            self.call(self.bus.publish(SUBJECTS.ledger("main"), encode(entry)))

    def checkpoint(self, number: int, *, epoch: int = 0, cursor: int = 0, pending: int = 0, cursor_s: float = 0.0, **fields: Any) -> Latest:
        """One that has read up to `cursor` and has a group of message `pending`; returns how a key names it."""
        path = path_of(number, epoch)
        (self.path / path).mkdir(parents=True)
        stream = Stream(config())
        if pending:
            stream.sequence = pending - 1
            stream.rollouts(0, view(0))
        self.states[path] = replace(stream.state, cursor=cursor or number, cursor_s=cursor_s)
        named = {"cursor": 0, "oldest_needed": 1, "stream_identity": self.identity, **fields}
        return Latest("main", Version(epoch, number), path, **named)

    def carries(self, number: int, *sequences: int) -> dict[int, Message]:
        messages = [self.call(self.bus.fetch(SAMPLES, sequence)) for sequence in sequences]
        (self.path / path_of(number) / "carried.msgpack").write_bytes(msgspec.msgpack.encode(messages))
        return {message.sequence: message for message in messages}

    def point(self, newest: Latest, *older: Latest) -> None:
        self.call(self.bus.kv.put("latest/main", encode(replace(newest, older=older) if older else newest)))
        self.puts.clear()

    def lose(self, sequence: int) -> None:
        """The stream has a hole there."""
        fetch, state = self.bus.fetch, self.bus.state

        async def holed(stream: str, asked: int) -> Message:
            return await fetch(stream, 99 if (stream, asked) == (SAMPLES, sequence) else asked)

        async def fewer(stream: str) -> Any:
            found = await state(stream)
            return replace(found, messages=found.messages - 1) if stream == SAMPLES else found

        self.bus.fetch, self.bus.state = holed, fewer  # type: ignore[method-assign]

    def load(self, path: Path) -> bytes:
        name = str(path.relative_to(self.path))
        self.loaded.append(name)
        if name in self.damaged:
            raise CheckpointDamaged(f"{name} is damaged")
        return self.states[name].encode()

    def resume(self) -> Resumed:
        return Resuming(
            bus=self.bus,
            call=self.call,
            trainer=cast(Any, self),
            name="main",
            run_path=self.path,
            initial=INITIAL,
            ledger=self.call(open_ledger(self.bus, SUBJECTS, "main")),
            say=self.said.append,
        ).resume()

    def positions(self) -> list[tuple[int, int, Any]]:
        """Oldest message that was held, for which version, and the tasks that are carried."""
        return [(p.oldest_needed, p.version.number, p.carried) for key, p in self.puts if key == PREFIX_POSITIONS + "main"]

    def folders(self) -> list[str]:
        return sorted(path.name.removeprefix("main-v0000000") for path in (self.path / "checkpoints").iterdir())


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with asyncio.Runner() as runner:
        yield Scene(tmp_path, runner.run)


def test_without_a_checkpoint_it_begins_while_the_stream_has_its_beginning(scene: Scene) -> None:
    assert scene.resume() == Resumed(INITIAL, None, {}, scene.identity) and scene.puts == []
    scene.call(scene.bus.trim(SAMPLES, through=1))
    with pytest.raises(LogTruncated) as caught:
        scene.resume()
    assert caught.value.values == {"needed": 1, "first": 2}


def test_a_stream_without_messages_has_its_beginning(scene: Scene) -> None:
    scene.bus = MemoryBus("r")
    assert scene.resume().identity == scene.identity
    scene.point(scene.checkpoint(1))
    scene.damaged = {path_of(1)}
    assert scene.resume() == Resumed(INITIAL, None, {}, scene.identity)


def test_the_newest_is_gone_on_from_and_the_older_ones_are_kept(scene: Scene) -> None:
    older = scene.checkpoint(2), scene.checkpoint(1)
    newest = scene.checkpoint(5, cursor=7)
    scene.point(newest, *older)
    found = scene.resume()
    assert found.state == scene.states[path_of(5)] and (found.carried, found.identity) == ({}, scene.identity)
    assert found.latest == replace(newest, cursor=7, oldest_needed=8, older=older)
    assert (scene.loaded, scene.said, scene.puts) == ([path_of(5)], [], [])


def test_what_the_files_say_counts_and_not_the_key(scene: Scene) -> None:
    newest = scene.checkpoint(5, cursor=7, pending=3)
    scene.point(newest)
    found = scene.resume()
    assert found.latest == replace(newest, cursor=7, oldest_needed=3, older=())
    messages = scene.carries(5, 3)
    scene.call(scene.bus.trim(SAMPLES, through=3))
    scene.point(replace(newest, oldest_needed=4, carried=(3,), carried_tasks=(0,)))
    again = scene.resume()
    assert again.carried == messages and again.latest is not None and again.latest.oldest_needed == 8


def test_an_older_one_is_gone_on_from_where_the_newer_are_damaged(scene: Scene) -> None:
    one, two = scene.checkpoint(1, oldest_needed=1), scene.checkpoint(2, oldest_needed=2, carried=(1,), carried_tasks=(9,))
    five = scene.checkpoint(5, oldest_needed=5, carried=(3, 4), carried_tasks=(8, 7))
    scene.point(five, two, one)
    scene.damaged = {path_of(5), path_of(2)}
    found = scene.resume()
    assert found.latest == replace(one, cursor=1, oldest_needed=2, older=())
    assert scene.loaded == [path_of(5), path_of(2), path_of(1)]
    assert scene.positions() == [(2, 2, (7, 8, 9)), (1, 1, (7, 8, 9)), (2, 1, msgspec.UNSET)]
    assert scene.puts[-2] == ("latest/main", replace(one, cursor=1, oldest_needed=2, older=()))
    assert scene.folders() == ["1-e0", "2-e0.damaged", "5-e0.damaged"]
    assert [re.findall(r"main-v\d{8}-e0", said)[0] for said in scene.said] == [f"main-v{number:08}-e0" for number in (5, 2, 1)]
    assert scene.said[-1].startswith("goes on from ")


def test_one_in_the_middle_keeps_those_behind_it(scene: Scene) -> None:
    one, two = scene.checkpoint(1), scene.checkpoint(2)
    scene.point(scene.checkpoint(5), two, one)
    scene.damaged = {path_of(5)}
    found = scene.resume()
    assert found.latest == replace(two, cursor=2, oldest_needed=3, older=(one,)) and len(scene.said) == 2
    assert scene.puts[1] == ("latest/main", found.latest)


def test_what_the_stream_does_not_fit_stays_where_it_is(scene: Scene) -> None:
    scene.point(scene.checkpoint(5, cursor=11), scene.checkpoint(2))
    assert scene.resume().latest is not None
    assert scene.loaded == [path_of(5), path_of(2)] and scene.folders() == ["2-e0", "5-e0"]


@pytest.mark.parametrize(
    ("fields", "named", "values"),
    [
        ({"cursor": 11}, {}, {"needed": 11}),
        ({"cursor": 5}, {"cursor": 11}, {"needed": 11}),
        ({"cursor": 5}, {"oldest_needed": 2}, {"needed": 2}),
        ({"cursor": 5}, {"stream_identity": "another"}, {}),
        ({"cursor": 9, "pending": 2}, {}, {"needed": 2}),
        ({"cursor": 9, "cursor_s": 1.0}, {}, {"needed": 9}),
        ({"cursor": 9, "pending": 6}, {}, {"needed": 6}),
    ],
)
def test_a_stream_that_does_not_fit_is_refused(scene: Scene, fields: dict[str, Any], named: dict[str, Any], values: dict[str, Any]) -> None:
    """Messages 1 and 2 are trimmed, 6 is lost."""
    lost = scene.checkpoint(5, **{"oldest_needed": 3, **fields})
    scene.point(replace(lost, **named))
    scene.call(scene.bus.trim(SAMPLES, through=2))
    scene.lose(6)
    with pytest.raises(CannotResume) as caught:
        scene.resume()
    assert isinstance(caught.value.__cause__, LogTruncated)
    assert {name: caught.value.__cause__.values.get(name) for name in values} == values
    assert scene.loaded == ([] if named else [path_of(5)]), "what the key says is looked at before anything is loaded"


def test_what_is_carried_is_not_asked_of_the_stream(scene: Scene) -> None:
    scene.point(scene.checkpoint(5, cursor=9, pending=6))
    messages = scene.carries(5, 6)
    scene.lose(6)
    assert scene.resume().carried == messages


@pytest.mark.parametrize(("entries", "version"), [((1, 2, 3, 4, 5), 3), ((1, 4, 5), 3), ((1, 2, 3, 5), 5), ((1, 2, 3), 3), ((5,), 5)])
def test_the_ledger_leads_on_from_a_checkpoint_to_its_end(scene: Scene, entries: tuple[int, ...], version: int) -> None:
    """Checkpoints 3 and 5, in this order."""
    three, five = scene.checkpoint(3), scene.checkpoint(5)
    scene.bus = MemoryBus("r")
    scene.messages(10)
    scene.entries(*entries)
    scene.point(*(replace(one, stream_identity=scene.identity) for one in (three, five)))
    found = scene.resume().latest
    assert found is not None and found.version.number == version
    assert scene.folders() == ["3-e0", "5-e0"], "a checkpoint before a gap is not damaged"


@pytest.mark.parametrize(
    ("why", "version"),
    [("lost in the stream", 2), ("lost in the stream, then damaged", 2), ("another stream", None), ("damaged", None)],
)
def test_a_gap_is_gone_back_behind_only_where_its_messages_are_lost_too(scene: Scene, why: str, version: int | None) -> None:
    """The ledger lacks version 3: checkpoint 2 does unless checkpoint 5 could have done."""
    two, four, five = scene.checkpoint(2), scene.checkpoint(4), scene.checkpoint(5, cursor=11 if "in the stream" in why else 5)
    scene.bus = MemoryBus("r")
    scene.messages(10)
    scene.entries(1, 2, 4, 5)
    scene.call(scene.bus.trim(SAMPLES, through=1))
    here = {"stream_identity": scene.identity, "oldest_needed": 2}
    five = replace(five, **(here | ({"stream_identity": "another"} if why == "another stream" else {})))
    scene.point(five, *(replace(one, **here) for one in ((four, two) if "then" in why else (two,))))
    (scene.path / four.path).rename(scene.path / "elsewhere") if "then" not in why else None
    scene.damaged = {four.path} | ({five.path} if why == "damaged" else set())
    if version is None:
        with pytest.raises(CannotResume):
            scene.resume()
    else:
        assert (found := scene.resume().latest) and found.version.number == version


def test_others_in_the_directory_are_tried_too_the_newest_first(scene: Scene) -> None:
    """Not those of another line, nor newer ones, nor those of another trainer."""
    five = scene.checkpoint(5)
    for number in (1, 2, 4, 6):
        scene.checkpoint(number)
    scene.checkpoint(3, epoch=1)
    scene.entries(6)
    scene.checkpoint(0)
    other = scene.path / "checkpoints" / "tap-v00000004-e0"
    other.mkdir()
    scene.damaged = {path_of(5), path_of(4), path_of(2)}
    scene.call(scene.bus.trim(SAMPLES, through=1))
    scene.point(replace(five, oldest_needed=2))
    found = scene.resume()
    assert scene.loaded == [path_of(5), path_of(4), path_of(2), path_of(1)]
    assert found.latest == Latest("main", Version(0, 1), path_of(1), 1, 2, scene.identity, older=())
    assert scene.positions()[0] == (2, 4, msgspec.UNSET)


def test_an_unnamed_one_of_another_epoch_is_tried_where_the_ledger_has_that(scene: Scene) -> None:
    scene.entries(4, 5, epoch=1)
    scene.checkpoint(4)
    scene.checkpoint(4, epoch=1)
    scene.point(scene.checkpoint(5, epoch=1))
    scene.damaged = {path_of(5, 1)}
    assert (found := scene.resume().latest) and found.version == Version(1, 4)


def test_a_damaged_state_is_passed_over(scene: Scene) -> None:
    scene.point(scene.checkpoint(5), scene.checkpoint(2))
    load = scene.load
    scene.load = lambda path: b"\xc1" if "5-e0" in path.name else load(path)  # type: ignore[method-assign]
    assert (found := scene.resume().latest) and found.version.number == 2 and "5-e0.damaged" in scene.folders()


def test_what_cannot_be_looked_at_now_ends_it(scene: Scene) -> None:
    scene.point(scene.checkpoint(5), scene.checkpoint(2))

    def load(path: Path) -> bytes:
        raise TrainingError("not now")

    scene.load = load  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="not now"):
        scene.resume()


def test_with_none_that_will_do_it_begins_again_before_anything_was_loaded(scene: Scene) -> None:
    scene.point(scene.checkpoint(5), scene.checkpoint(4))
    scene.damaged = {path_of(5), path_of(4)}
    deleted: list[tuple[str, int]] = []
    delete = scene.bus.kv.delete

    async def told(key: str) -> None:
        deleted.append((key, len(scene.puts)))
        await delete(key)

    scene.bus.kv.delete = told  # type: ignore[method-assign]
    assert scene.resume() == Resumed(INITIAL, None, {}, scene.identity)
    assert scene.loaded == [path_of(5), path_of(4)]
    assert scene.puts[-1] == (PREFIX_POSITIONS + "main", Position("main", SAMPLES, 1, Version()))
    assert deleted == [("latest/main", len(scene.puts))], "behind the position"
    assert "initial weights:" in scene.said[-1] and scene.said[-1].startswith("goes on from")


@pytest.mark.parametrize("why", ["loaded", "trimmed", "ledger", "another stream"])
def test_with_none_that_will_do_and_no_beginning_it_cannot_go_on(scene: Scene, why: str) -> None:
    scene.point(scene.checkpoint(5, cursor=11 if why == "loaded" else 5), scene.checkpoint(4))
    scene.damaged = {path_of(4)} if why == "loaded" else {path_of(5), path_of(4)}
    match why:
        case "trimmed":
            scene.point(replace(scene.checkpoint(3), oldest_needed=2))
            scene.damaged |= {path_of(3)}
            scene.call(scene.bus.trim(SAMPLES, through=1))
        case "ledger":
            scene.entries(8)
        case "another stream":
            scene.point(replace(scene.checkpoint(3), stream_identity="another"))
        case _:
            pass
    before = len(scene.puts)
    with pytest.raises(CannotResume) as caught:
        scene.resume()
    cause = caught.value.__cause__
    assert isinstance(cause, CheckpointDamaged if why == "trimmed" else LogTruncated)
    assert all(key != "latest/main" and position.oldest_needed for key, position in scene.puts[before:])
    assert scene.call(scene.bus.kv.get("latest/main")) is not None and "initial weights" not in "".join(scene.said)
    assert "'demo'" in caught.value.message and cause.message in caught.value.message
