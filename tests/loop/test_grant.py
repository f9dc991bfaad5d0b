"""Raising the key `granted`: it never goes down, whoever else puts it."""

import pytest

from streamrl.bus.protocol import Bus
from streamrl.consumers.training.loop import raise_grant
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import Grant
from streamrl.schemas.subjects import KEY_GRANTED


def grant(granted: int) -> Grant:
    return Grant(granted=granted, version=0, retired=0)


async def granted(bus: Bus) -> int:
    entry = await bus.kv.get(KEY_GRANTED)
    assert entry is not None and entry.value is not None
    return decode(entry.value, Grant, where=KEY_GRANTED).granted


async def test_with_its_own_last_revision_a_grant_is_raised_without_asking(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    revision = await raise_grant(bus, grant(8))

    async def refuse(key: str) -> None:
        raise AssertionError(f"asked for {key}")

    with monkeypatch.context() as patched:
        patched.setattr(type(bus.kv), "get", lambda self, key: refuse(key))
        after = await raise_grant(bus, grant(16), revision=revision)
    assert await granted(bus) == 16 and after is not None and revision is not None and after > revision


@pytest.mark.parametrize(("other", "left"), [(12, 16), (24, 24)])
async def test_what_another_process_has_put_is_seen_and_never_lowered(bus: Bus, other: int, left: int) -> None:
    revision = await raise_grant(bus, grant(8))
    await bus.kv.put(KEY_GRANTED, encode(grant(other)))
    after = await raise_grant(bus, grant(16), revision=revision)
    assert await granted(bus) == left
    await raise_grant(bus, grant(18), revision=after)
    assert await granted(bus) == max(left, 18)


@pytest.mark.parametrize(("version", "expected"), [((1, 3), (1, 3, 24)), ((0, 9), (0, 7, 24))])
async def test_a_new_epoch_is_told_with_all_that_was_granted(bus: Bus, version: tuple[int, int], expected: tuple[int, int, int]) -> None:
    await bus.kv.put(KEY_GRANTED, encode(Grant(24, 7, 12)))
    await raise_grant(bus, Grant(20, version[1], 8, epoch=version[0]))
    entry = await bus.kv.get(KEY_GRANTED)
    assert entry is not None and entry.value is not None
    found = decode(entry.value, Grant)
    assert (found.of_epoch, found.version, found.granted) == expected
