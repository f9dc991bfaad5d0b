"""What the holder of one role's password can do beside the client's own operations: answers and deliveries aimed where he may not write.

Each request that the role may make is sent with each reply subject that could harm somebody, and the run is compared with what it was.
"""

import asyncio
import hashlib
import itertools

import msgspec
import pytest
from nats.aio.msg import Msg

from streamrl.bus.address import API
from streamrl.bus.jetstream import admin
from streamrl.bus.jetstream.bus import JetStreamBus
from streamrl.bus.permissions import OPERATOR, ROLE_API, ROLES, allowed
from streamrl.bus.reading import stretch
from streamrl.bus.topology import blobs_name, keys_name, sample_bucket, stored_subject, turn_bucket
from tests.security.conftest import KEYS, RUN, TO, As, client_of, furnish, wire_of
from tests.support.processes import until

pytestmark = pytest.mark.nats

STREAMS = [f"{RUN}-{name}" for name in ("tasks", "samples", "grading", "ledger", "weights", "events", "metrics", "dead")]
STREAMS += [keys_name(RUN), blobs_name(RUN), blobs_name(sample_bucket(RUN)), keys_name(turn_bucket(RUN))]
APIS = (API, ROLE_API)
OWN_KEY = f"$KV.{RUN}.presence.workers.own"
FORGED = b"forged"


async def contents(operator: JetStreamBus, stream: str) -> dict[str, str]:
    """Digest of every message by sequence and subject."""
    found: dict[str, str] = {}
    info = (await admin.info(wire_of(operator), stream)).state
    for sequence in range(info.first_seq, info.last_seq + 1):
        answer = await wire_of(operator).request(f"$JS.API.DIRECT.GET.{stream}", {"seq": sequence})
        headers = answer.headers or {}
        if "Nats-Sequence" in headers:
            found[f"{sequence} {headers['Nats-Subject']}"] = hashlib.sha256(answer.data).hexdigest()
    return found


async def everything(operator: JetStreamBus) -> dict[str, dict[str, str]]:
    return {stream: await contents(operator, stream) for stream in STREAMS}


def writable(role: str) -> list[str]:
    """Subjects where the role may write, by their first tokens up to a wildcard."""
    rights = allowed(role, RUN)
    return [subject.split("*")[0] for subject in rights.asks if not subject.startswith("$JS.")]


def others(role: str, now: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """What is stored under subjects that the role may not write to."""
    own = tuple(writable(role))
    return {
        stream: {name: digest for name, digest in found.items() if not name.split(" ")[1].startswith(own)} for stream, found in now.items()
    }


def targets() -> list[str]:
    """Reply subjects that would do harm if an answer were taken for a message there."""
    verbs = ("STREAM.DELETE", "STREAM.PURGE", "STREAM.UPDATE")
    rest = [
        f"CONSUMER.DELETE.{RUN}-tasks.main",
        f"CONSUMER.DELETE.{RUN}-grading.main",
        "STREAM.CREATE.evil",
        f"STREAM.MSG.DELETE.{RUN}-ledger",
    ]
    harmful = [f"{api}.{ask}" for api in APIS for ask in [f"{verb}.{stream}" for stream in STREAMS for verb in verbs] + rest]
    harmful += [f"$KV.{RUN}.{key.replace('/', '.')}" for key in KEYS]
    harmful += [f"$O.{RUN}.M.x", f"$O.{RUN}.C.x", f"$KV.{turn_bucket(RUN)}.1.0.0", f"$KV.{turn_bucket(RUN)}.1.0.1"]
    harmful += [TO.tasks("main"), TO.samples("main"), TO.tombstones("main"), TO.rewards, TO.marks, TO.ledger("main"), TO.weights("policy")]
    harmful += [TO.dead, TO.events("finished"), TO.metrics("x"), f"$JS.ACK.{RUN}-tasks.main.1.1.1.1.0"]
    return harmful


def requests(role: str) -> list[tuple[str, bytes]]:
    """Each request that the role may make whose answer does not take what is its own to take."""
    found: list[tuple[str, bytes]] = []
    rights = allowed(role, RUN)
    for subject in (*rights.asks, *rights.batches):
        if not subject.startswith("$JS.API"):
            continue
        asked = subject.replace("$JS.API", ROLE_API).replace("*", "main")
        bodies = [b"", b'{"batch":1,"no_wait":true}', b'{"seq":1,"batch":2}', b'{"batch":1,"expires":200000000,"idle_heartbeat":50000000}']
        if ".STREAM.PURGE." in subject:
            bodies = [b'{"seq":1}']
        elif ".GET." in subject:
            bodies += [b'{"last_by_subj":"%s"}' % OWN_KEY.encode(), b'{"seq":1,"batch":50,"next_by_subj":"%s"}' % OWN_KEY.encode()]
        found += [(asked, body) for body in bodies]
    return found


async def settle(bus: JetStreamBus) -> None:
    await client_of(bus).flush()
    await asyncio.sleep(0.5)


@pytest.mark.parametrize("role", ROLES)
async def test_no_answer_can_be_aimed_where_the_role_may_not_write(role: str, as_role: As) -> None:
    operator, bus = await as_role(OPERATOR), await as_role(role)
    await furnish(operator)
    if OWN_KEY.startswith(tuple(writable(role))):
        await wire_of(bus).request(OWN_KEY, FORGED)
    before = others(role, await everything(operator))
    consumers = await wire_of(operator).request(f"$JS.API.CONSUMER.NAMES.{RUN}-tasks")
    sent = 0
    # A right of one's own reached by way of an answer is the same right.
    own = {subject.replace("$JS.API", ROLE_API) for subject in allowed(role, RUN).asks}
    for (subject, body), reply in itertools.product(requests(role), [target for target in targets() if target not in own]):
        await wire_of(bus).send(subject, body, reply)
        sent += 1
    await settle(bus)
    after = others(role, await everything(operator))
    assert after == before
    assert sent > 100
    names = (await wire_of(operator).request("$JS.API.STREAM.NAMES")).data
    assert b"evil" not in names and all(stream.encode() in names for stream in STREAMS)
    assert (await wire_of(operator).request(f"$JS.API.CONSUMER.NAMES.{RUN}-tasks")).data == consumers.data


@pytest.mark.parametrize("role", ROLES)
async def test_no_consumer_can_be_made_that_delivers_where_the_role_may_not_write(role: str, as_role: As) -> None:
    """With a heartbeat and flow control, which the server sends to that subject too."""
    operator, bus = await as_role(OPERATOR), await as_role(role)
    await furnish(operator)
    before = await everything(operator)
    push = {"ack_policy": "none", "deliver_policy": "all", "idle_heartbeat": 100_000_000, "flow_control": True}
    for number, (stream, api, target) in enumerate(itertools.product(STREAMS, APIS, targets())):
        config = push | {"name": f"push{number}", "deliver_subject": target}
        verb = ("CREATE", "DURABLE.CREATE")[number % 2]
        body = msgspec.json.encode({"stream_name": stream, "config": config})
        await wire_of(bus).send(f"{api}.CONSUMER.{verb}.{stream}.push{number}", body, f"_INBOX_{role}.x")
    await settle(bus)
    assert await everything(operator) == before
    for stream in STREAMS:
        names = msgspec.json.decode((await wire_of(operator).request(f"$JS.API.CONSUMER.NAMES.{stream}")).data)["consumers"] or []
        assert [name for name in names if name.startswith("push")] == []


@pytest.mark.parametrize("role", ROLES)
async def test_no_other_role_hears_an_answer_that_is_aimed_at_it(role: str, as_role: As) -> None:
    """Neither among its replies nor as news of a stream."""
    operator, bus = await as_role(OPERATOR), await as_role(role)
    await furnish(operator)
    heard: list[str] = []
    listening = [await as_role(other) for other in ROLES if other != role]
    for other in listening:

        async def hear(message: Msg) -> None:
            heard.append(message.subject)

        name = wire_of(other).address.user
        for subject in (f"_INBOX_{name}.>", *allowed(name, RUN).hears):
            await client_of(other).subscribe(subject, cb=hear)
        await client_of(other).flush()
    aims = [f"_INBOX_{other}.x" for other in ROLES if other != role]
    aims += [stored_subject(stream, subject) for stream in STREAMS for subject in (TO.ledger("main"), f"$KV.{RUN}.granted")]
    for (subject, body), reply in itertools.product(requests(role), aims):
        await wire_of(bus).send(subject, body, reply)
    await settle(bus)
    assert heard == []
    await operator.publish(TO.events("finished"), b"x")
    await operator.kv.put("granted", b"2")
    await settle(operator)
    assert len(heard) >= len(listening), "or nobody listened"


async def test_a_watcher_takes_no_answer_for_news(as_role: As) -> None:
    """An answer can be aimed at colleagues of the same role: what it says it is decides, not where it came."""
    operator, watcher, bus = await as_role(OPERATOR), await as_role("producer"), await as_role("producer")
    await operator.kv.put("granted", b"1")
    seen: list[tuple[str, bytes | None]] = []

    async def watch() -> None:
        async for entry in watcher.kv.watch_key("granted"):
            seen.append((entry.key, entry.value))

    watching = asyncio.create_task(watch())
    await until(lambda: seen)
    await bus.kv.put("presence/workers/own", FORGED)
    for _ in range(50):
        await bus.publish(TO.events("stalled"), FORGED)
    news = stored_subject(keys_name(RUN), f"$KV.{RUN}.granted")
    for stream in (keys_name(RUN), f"{RUN}-events"):
        for body in (b'{"seq":1,"batch":50}', b'{"seq":1}', b'{"seq":50}'):
            await wire_of(bus).send(f"{ROLE_API}.DIRECT.GET.{stream}", body, news)
    await wire_of(bus).send(f"{ROLE_API}.STREAM.INFO.{keys_name(RUN)}", b"", news)
    await settle(bus)
    await operator.kv.put("granted", b"2")
    await until(lambda: ("granted", b"2") in seen)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert [entry for entry in seen if entry[0] == "granted"] == [("granted", b"1"), ("granted", b"2")]
    assert FORGED not in [value for _, value in seen]


HEADERS = {
    "Nats-Sequence": "99",
    "Nats-Subject": TO.marks,
    "Nats-Stream": "elsewhere",
    "Nats-Last-Sequence": "98",
    "Nats-Num-Pending": "0",
    "Status": "503",
    "Description": "No Responders",
}


@pytest.mark.parametrize("names", [list(HEADERS), ["Status"], ["Nats-Sequence"], ["nats-sequence", "status"]])
async def test_a_writers_headers_do_not_lie_about_a_sample(names: list[str], as_role: As) -> None:
    """Neither to who reads what is there, nor to who follows, nor to who asks for it alone; and a status among them ends nothing."""
    operator, producer, trainer = await as_role(OPERATOR), await as_role("producer"), await as_role("trainer")
    read: list[tuple[int, str, bytes]] = []

    async def follow() -> None:
        async for message in trainer.read("samples", after=0):
            read.append((message.sequence, message.subject, message.body))

    following = asyncio.create_task(follow())
    await operator.publish(TO.samples("main"), b"0")
    await until(lambda: read)
    for number in range(1, 6):
        headers = {name: HEADERS.get(name, "503") for name in names}
        await client_of(producer).request(TO.samples("main"), b"%d" % number, headers=headers)
    expected = [(number + 1, TO.samples("main"), b"%d" % number) for number in range(6)]
    async with asyncio.timeout(60):
        await until(lambda: len(read) >= 6)
        anew = [(message.sequence, message.subject, message.body) async for message in stretch(trainer, "samples", first=1, last=6)]
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert read == expected == anew
    single = await trainer.fetch("samples", 4)
    assert (single.sequence, single.subject, single.body) == expected[3]


@pytest.mark.parametrize("value", ["all", "sub"])
async def test_no_header_removes_what_others_stored(value: str, as_role: As) -> None:
    """A rollup replaces a whole stream, or a subject, by the message that asks for it."""
    operator = await as_role(OPERATOR)
    await furnish(operator)
    for role in ROLES:
        bus = await as_role(role)
        before = others(role, await everything(operator))
        for subject in (subject.replace("*", "own") for subject in allowed(role, RUN).asks if not subject.startswith("$JS.")):
            await client_of(bus).publish(subject, FORGED, headers={"Nats-Rollup": value})
        await settle(bus)
        assert others(role, await everything(operator)) == before
