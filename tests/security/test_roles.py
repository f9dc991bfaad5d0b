"""What each role may and may not do, on a real server: every operation of the bus, asked with every role's credentials."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar, cast

import pytest

from streamrl.bus.jetstream import admin
from streamrl.bus.jetstream.bus import JetStreamBus
from streamrl.bus.permissions import OPERATOR, ROLES
from streamrl.bus.topology import blobs_name, sample_bucket, stored_subject
from streamrl.errors import Forbidden
from streamrl.schemas.versions import Version
from streamrl.weights.pins import Pins
from tests.security.conftest import RUN, TO, As, client_of, furnish, wire_of
from tests.support.errors import raises

pytestmark = pytest.mark.nats

PRODUCES = {"producer", "gateway"}
WORKERS = {"trainer", "producer", "gateway", "rewarder", "engine", "feeder", "evaluator"}
Operation = Callable[[JetStreamBus], Awaitable[object]]
T = TypeVar("T")


def closing(entries: AsyncIterator[T]) -> aclosing[AsyncGenerator[T, None]]:
    """`aclosing` of what the bus gives, which is a generator."""
    return aclosing(cast("AsyncGenerator[T, None]", entries))


async def first(entries: AsyncIterator[T]) -> T:
    async with closing(entries) as found:
        return await anext(found)


def claimed(stream: str) -> Operation:
    async def claim(bus: JetStreamBus) -> None:
        [lease] = await bus.claim("main", max=1, wait_s=2.0, stream=stream)
        await lease.keep()
        await lease.retry()

    return claim


def publish(subject: str) -> Operation:
    return lambda bus: bus.publish(subject, b"x")


def put(key: str) -> Operation:
    return lambda bus: bus.kv.put(key, b"x")


def read(stream: str) -> Operation:
    return lambda bus: first(bus.read(stream, after=0))


def state(stream: str) -> Operation:
    return lambda bus: bus.state(stream)


def ask(subject: str, body: object = b"") -> Operation:
    """Ask JetStream's API, as the role's own connection calls it."""
    return lambda bus: wire_of(bus).request(subject.replace("$JS.API", wire_of(bus).api), body)


STORES: dict[str, tuple[Operation, set[str]]] = {
    "samples": (publish(TO.samples("main")), PRODUCES),
    "tombstones": (publish(TO.tombstones("main")), {*PRODUCES, "rewarder", "trainer"}),
    "rewards": (publish(TO.rewards), {*PRODUCES, "rewarder"}),
    "requests for rewards": (publish(TO.grading("main")), PRODUCES),
    "marks": (publish(TO.marks), {"trainer"}),
    "tasks": (publish(TO.tasks("main")), {"feeder"}),
    "ledger": (publish(TO.ledger("main")), {"trainer"}),
    "weights": (publish(TO.weights("policy")), {"trainer"}),
    "dead": (publish(TO.dead), {"trainer"}),
    "metrics": (publish(TO.metrics("x")), WORKERS),
    "finished": (publish(TO.events("finished")), {"trainer"}),
    "evaluation": (publish(TO.events("evaluation")), {"evaluator", "trainer"}),
    "weights taken": (publish(TO.events("weights")), {"engine", "trainer"}),
    "engine started": (publish(TO.events("engine")), {"engine", "trainer"}),
    "stalled": (publish(TO.events("stalled")), {*PRODUCES, "rewarder", "feeder", "trainer"}),
    "blob": (lambda bus: bus.blobs.put("new", b"x"), {"trainer"}),
    "blob of a sample": (lambda bus: bus.sample_blobs.put("new", b"x"), {*PRODUCES, "feeder"}),
    "grant": (put("granted"), {"trainer"}),
    "checkpoint": (put("latest/main"), {"trainer"}),
    "position": (put("positions/main"), {"trainer"}),
    "fence": (put("fences/main"), {"trainer"}),
    "the run's end": (put("ends/main"), {"trainer"}),
    "checkpoint of a rollout": (put("checkpoints/7/0"), {*PRODUCES, "trainer"}),
    "attempts of a task": (put("attempts/7"), {*PRODUCES, "trainer"}),
    "run record": (put("run"), set()),
    "rows found": (put("data"), {"feeder"}),
    "mixture": (put("mixture"), {"feeder"}),
    "totals": (put("totals"), set()),
    "presence of an engine": (put("presence/engines/x"), {"engine"}),
    "presence of a worker": (put("presence/workers/x"), WORKERS),
    "a turn of a session": (lambda bus: bus.turns.put("8/0/0", b"x"), {"gateway"}),
    "notice": (publish(TO.events("notice")), {"gateway", "trainer"}),
    "pin": (lambda bus: Pins(bus.kv, "policy").hold(Version(0, 3), "holder", role="evaluation"), {"engine", "evaluator"}),
}
READS: dict[str, tuple[Operation, set[str]]] = {
    "samples": (read("samples"), {"trainer", "reader"}),
    "a sample": (lambda bus: bus.fetch("samples", 1), {"trainer", "reader"}),
    "ledger": (read("ledger"), {"trainer", "evaluator", "feeder", "reader"}),
    "the ledger's end": (lambda bus: bus.last(TO.ledger("main")), {"trainer", "evaluator", "feeder", "reader"}),
    "weights": (read("weights"), {"trainer", "engine", "reader"}),
    "events": (read("events"), {*PRODUCES, "rewarder", "evaluator", "reader"}),
    "metrics": (read("metrics"), {"reader"}),
    "dead letters": (read("dead"), {"reader"}),
    "a blob": (lambda bus: bus.blobs.get("old"), {"trainer", "engine", "reader"}),
    "a blob of a sample": (lambda bus: bus.sample_blobs.get("old"), {"trainer", *PRODUCES, "reader"}),
    "turns of sessions": (lambda bus: bus.turns.values("7/"), {"gateway"}),
    "a turn of a session": (lambda bus: bus.turns.get("7/0/0"), {"gateway"}),
    "keys": (lambda bus: bus.kv.keys("presence/"), {*WORKERS, "reader"}),
    "a key": (lambda bus: bus.kv.get("granted"), {*WORKERS, "reader"}),
    "watched keys": (lambda bus: first(bus.kv.watch("g")), {*WORKERS, "reader"}),
    "a watched key": (lambda bus: first(bus.kv.watch_key("granted")), {*WORKERS, "reader"}),
    "pinned versions": (lambda bus: Pins(bus.kv, "policy").versions(), {*WORKERS, "reader"}),
    "the queue's end": (state("tasks"), {"feeder", "trainer", "reader"}),
    "a queued task": (lambda bus: bus.fetch("tasks", 1), {"feeder", "trainer"}),
    "the end of the requests": (state("grading"), {"rewarder", "trainer", "reader"}),
    "a queued request": (lambda bus: bus.fetch("grading", 1), set()),
}
OWN = {"name": "own"}
CHANGES: dict[str, tuple[Operation, set[str]]] = {
    "release a pin": (lambda bus: Pins(bus.kv, "policy").release(Version(0, 4), "holder"), {"engine", "evaluator"}),
    "claim a task": (claimed("tasks"), PRODUCES),
    "claim a request": (claimed("grading"), {"rewarder"}),
    "remove the turns of a task": (lambda bus: bus.turns.remove("7/"), {"gateway", "trainer"}),
    "trim samples": (lambda bus: admin.purge(wire_of(bus), f"{RUN}-samples", {"seq": 1}), {"trainer"}),
    "trim the ledger": (lambda bus: admin.purge(wire_of(bus), f"{RUN}-ledger", {"seq": 1}), set()),
    "empty the queue": (lambda bus: admin.purge(wire_of(bus), f"{RUN}-tasks", {"seq": 1}), set()),
    "empty the requests": (lambda bus: admin.purge(wire_of(bus), f"{RUN}-grading", {"seq": 1}), set()),
    "remove a blob": (lambda bus: bus.blobs.delete("old"), {"trainer"}),
    "remove a blob of a sample": (lambda bus: bus.sample_blobs.delete("old"), {"trainer"}),
    "empty the blobs of samples": (ask(f"$JS.API.STREAM.PURGE.{blobs_name(sample_bucket(RUN))}", {"seq": 1}), {"trainer"}),
    "remove a sample": (ask(f"$JS.API.STREAM.MSG.DELETE.{RUN}-samples", {"seq": 10**6}), set()),
    "remove a task": (ask(f"$JS.API.STREAM.MSG.DELETE.{RUN}-tasks", {"seq": 10**6}), set()),
    "remove a request": (ask(f"$JS.API.STREAM.MSG.DELETE.{RUN}-grading", {"seq": 10**6}), set()),
    "delete a stream": (ask(f"$JS.API.STREAM.DELETE.{RUN}-nothing"), set()),
    "make a stream": (ask("$JS.API.STREAM.CREATE.other", {"name": "other", "subjects": ["other.>"], "storage": "memory"}), set()),
    "change a stream": (ask(f"$JS.API.STREAM.UPDATE.{RUN}-nothing", {"name": f"{RUN}-nothing"}), set()),
    "delete the consumer of the tasks": (ask(f"$JS.API.CONSUMER.DELETE.{RUN}-tasks.other"), set()),
    "delete the consumer of the requests": (ask(f"$JS.API.CONSUMER.DELETE.{RUN}-grading.main"), set()),
    "make a consumer of the tasks": (lambda bus: bus.claim("extra", max=1, wait_s=0.0), set()),
    "make a consumer of the requests": (lambda bus: bus.claim("extra", max=1, wait_s=0.0, stream="grading"), set()),
    **{
        f"make a consumer of {stream}": (ask(f"$JS.API.CONSUMER.CREATE.{stream}.own", {"stream_name": stream, "config": OWN}), set())
        for stream in (f"{RUN}-samples", f"{RUN}-ledger", f"{RUN}-weights", f"{RUN}-events", f"KV_{RUN}", f"OBJ_{RUN}")
    },
    "list the streams": (ask("$JS.API.STREAM.NAMES"), set()),
    "stop the account's JetStream": (ask("$JS.API.ACCOUNT.PURGE.RUN"), set()),
}
OPERATIONS = {
    **{f"store {name}": operation for name, operation in STORES.items()},
    **{f"read {name}": operation for name, operation in READS.items()},
    **CHANGES,
}


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_may_do_its_own_work_and_nothing_else(role: str, as_role: As) -> None:
    await furnish(await as_role(OPERATOR))
    bus = await as_role(role)
    wrong: list[str] = []
    for name, (operation, roles) in OPERATIONS.items():
        try:
            async with asyncio.timeout(60):
                await operation(bus)
            if role not in roles:
                wrong.append(f"{role} can {name}")
        except Forbidden as error:
            if role in roles:
                wrong.append(f"{role} cannot {name}: {error.message}")
            elif f"user '{role}' lacks this right" not in error.hint:
                wrong.append(f"no hint for {name}: {error.hint}")
        except TimeoutError:
            wrong.append(f"{role} gets no answer to {name}")
    assert wrong == []


async def test_every_role_is_refused_something_that_another_may_do() -> None:
    assert all({role for _, roles in OPERATIONS.values() for role in roles} - {one} for one in ROLES)
    assert {role for _, roles in OPERATIONS.values() for role in roles} == set(ROLES)


async def test_a_role_cannot_listen_to_others(as_role: As) -> None:
    """Neither to what they publish nor to the replies they get."""
    operator, producer = await as_role(OPERATOR), await as_role("producer")
    heard: list[str] = []

    async def hear(message: object) -> None:
        heard.append(str(message))

    for subject in (f"{RUN}.>", "_INBOX_trainer.>", "$JS.EVENT.>", ">", stored_subject(f"{RUN}-ledger"), "$STORED.>", "_R_.>"):
        await client_of(producer).subscribe(subject, cb=hear)
    await client_of(producer).flush()
    await operator.publish(TO.ledger("main"), b"x")
    await producer.publish(TO.samples("main"), b"x")
    assert heard == []


async def test_who_watches_one_key_is_sent_no_other(as_role: As) -> None:
    """Checkpoints of rollouts lie beside the grant, up to 1 MiB each; a producer hears of those of others no more than of its own."""
    operator, producer, other = await as_role(OPERATOR), await as_role("producer"), await as_role("producer")
    await other.kv.put("checkpoints/1/0", b"before")
    await operator.kv.put("granted", b"1")
    async with asyncio.timeout(60), closing(producer.kv.watch_key("granted")) as entries:
        assert (await anext(entries)).value == b"1"
        before = client_of(producer).stats["in_bytes"]
        for rollout in range(50):
            await other.kv.put(f"checkpoints/7/{rollout}", bytes(10_000))
        await operator.kv.put("granted", b"2")
        assert (await anext(entries)).value == b"2"
        assert client_of(producer).stats["in_bytes"] - before < 10_000


async def test_a_producer_of_a_source_nobody_made_is_told_at_once(as_role: As) -> None:
    producer = await as_role("producer")
    async with asyncio.timeout(60):
        with raises(Forbidden, subject="$STREAMRL.API.CONSUMER.CREATE.run-tasks.extra.run.tasks.extra"):
            await producer.claim("extra", max=1, wait_s=0.0)


async def test_a_task_whose_delivery_the_server_forgot_is_left_to_be_delivered_again(as_role: As) -> None:
    """The producer may not delete it from the queue, as the operator's connection does then."""
    operator, producer = await as_role(OPERATOR), await as_role("producer")
    await operator.publish(TO.tasks("main"), b"task")
    [lease] = await producer.claim("main", max=1, wait_s=2.0)
    lease.reply = lease.reply.replace(f"{RUN}-tasks.main", f"{RUN}-tasks.nobody")
    await lease.done()
    assert (await operator.state("tasks")).messages == 1
