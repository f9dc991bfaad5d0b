"""`bench bus` at a tiny size: over every transport that is there all of it arrives; its report from numbers that are known."""

import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest

from benchmarks.bus import measure, servers
from benchmarks.bus.bus_thread import BusThread
from benchmarks.bus.lanes import Counts, Order
from benchmarks.bus.measure import LaneProcess, rounds
from benchmarks.bus.payload import Plain, group, mapping, plain, with_task
from benchmarks.bus.plan import BusOptions, Cell, Transport
from benchmarks.bus.redis_streams import codec
from benchmarks.bus.report import build_report, report_of
from benchmarks.bus.servers import missing
from benchmarks.machine import Machine
from benchmarks.names import names, numbers
from benchmarks.processes import cpu_of_tree, cpu_seconds
from benchmarks.raw import Fact, Header, Raw, Round, read, write
from benchmarks.report import Row, render, turn
from streamrl.bus import BusAddress, connect
from streamrl.bus.server import NatsServer
from streamrl.cli import main
from streamrl.config.tree import BusConfig
from streamrl.errors import BusError, BusUnavailable, ConfigError, DataError, LaunchError, LogTruncated
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.subjects import Subjects
from tests.support.errors import raises
from tests.support.needs import need

NEEDS = {Transport.REDIS_ORJSON: "redis", Transport.REDIS_PICKLE: "redis", Transport.ZMQ_MSGPACK: "zmq", Transport.RAY: "ray"}
TINY = BusOptions(samples=(1, 3), tokens=(40, 64), rounds=1, round_tokens=1000, min_tasks=2, max_tasks=7)


@pytest.mark.nats
@pytest.mark.parametrize("transport", [t if t is not Transport.RAY else pytest.param(t, marks=pytest.mark.slow) for t in NEEDS])
def test_every_sample_arrives(transport: Transport) -> None:
    need(NEEDS[transport])
    options = msgspec.structs.replace(TINY, transports=(transport,))
    all_arrived(options, [one for one in rounds(options) if isinstance(one, Round)])


def all_arrived(options: BusOptions, found: Sequence[Round]) -> None:
    """Every cell of every round was measured over the one transport, and what was sent was read."""
    [transport] = options.transports
    assert {one.contender for one in found} == {transport}
    cells = [cell for _ in range(options.rounds) for cell in options.cells]
    assert [(one.round, one.cell) for one in found] == [(n, cell.name) for n in range(options.rounds) for cell in options.cells]
    for one, cell in zip(found, cells, strict=True):
        values = one.values
        assert values["tasks"] == values["messages"] == options.num_tasks(cell)
        assert values["samples"] == values["tasks"] * cell.samples
        assert values["tokens"] == values["samples"] * cell.tokens
        assert min(values["wall_s"], values["consumer_s"]) > 0
        # Of servers and Ray's actor the kernel counts ticks of 10 ms; a process that died would have counted backwards.
        assert values["producer_s"] > 0 or (transport is Transport.RAY and values["producer_s"] == 0)
        assert values["server_s"] == 0 if transport is Transport.ZMQ_MSGPACK else values["server_s"] >= 0
        assert (values["nbytes"] >= 6 * values["tokens"]) or transport is Transport.RAY


def test_all_carry_the_same_facts() -> None:
    samples = with_task(group(Cell(3, 40), 1), 17)
    facts = [mapping(sample) for sample in samples]
    assert [fact["task"] for fact in facts] == [17, 17, 17]

    def listed(value: Any) -> Any:
        return json.loads(json.dumps(value, default=str))

    assert [listed(mapping(row)) for row in decode_samples(encode_samples(samples)).rows()] == listed(facts)
    for transport in (Transport.REDIS_ORJSON, Transport.REDIS_PICKLE):
        if not missing(transport):
            encode, decode = codec(transport)
            assert listed(decode(encode(facts))) == listed(facts)
    wire = msgspec.msgpack.encode([plain(sample) for sample in samples])
    assert [listed(msgspec.structs.asdict(one)) for one in msgspec.msgpack.decode(wire, type=list[Plain])] == listed(facts)
    arrays = mapping(samples[0], arrays=True)
    assert {**arrays, **{name: arrays[name].tolist() for name in ("tokens", "loss_mask", "logprobs")}} == facts[0]


def test_what_is_missing_is_left_out_with_a_line_that_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers.importlib.util, "find_spec", lambda name: None)
    assert missing(Transport.STREAMRL) == ""
    assert "'.[ray]'" in missing(Transport.RAY)
    assert "redis and orjson" in missing(Transport.REDIS_ORJSON) and "'.[bench]'" in missing(Transport.REDIS_ORJSON)
    monkeypatch.setattr(servers.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "apt install redis-server" in missing(Transport.REDIS_PICKLE)
    with raises(ConfigError, left_out=ANY):
        list(rounds(msgspec.structs.replace(TINY, transports=(Transport.REDIS_PICKLE,))))
    monkeypatch.setattr(measure, "_round", lambda options, transports, number: [])
    assert [fact.about for fact in rounds(TINY) if isinstance(fact, Fact)] == ["redis-orjson", "redis-pickle"]


def test_a_sample_too_many_or_too_few_is_an_error() -> None:
    counts = Counts(Order(Cell(2, 10), 0, 3))
    for _ in range(3):
        assert not counts.complete
        counts.add(samples=2, tokens=20, nbytes=1)
    assert counts.complete
    ran = counts.ran(start_s=1.0, end_s=3.0, cpu_s=0.5)
    assert (ran.messages, ran.samples, ran.tokens, ran.nbytes) == (3, 6, 60, 3)
    counts.add(samples=1, tokens=10, nbytes=1)
    with raises(BusError, samples=7, tokens=70):
        counts.ran(start_s=1.0, end_s=3.0, cpu_s=0.5)


@pytest.mark.process
def test_a_process_that_dies_is_an_error(tmp_path: Path) -> None:
    lane = LaneProcess("consumer", Transport.STREAMRL, str(tmp_path / "nowhere.json"))
    with lane, pytest.raises(LaunchError, match=r"streamrl consumer.* exit code 1"):
        lane.prepare(Order(Cell(1, 1), 0, 1))


@pytest.mark.process
def test_cpu_time_of_other_processes() -> None:
    code = "import os, time; t = time.process_time()\nwhile time.process_time() - t < 0.3: pass\nprint(flush=True); input()"
    before = cpu_of_tree()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert cpu_seconds(child.pid) >= 0.25
        assert cpu_of_tree() - before >= 0.25
        child.kill()
    assert cpu_seconds(child.pid) == 0.0


@pytest.mark.nats
def test_the_command_measures_writes_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    size = ["--samples", "1,3", "--tokens", "40,64", "--rounds", "1", "--round-tokens", "1000", "--transports", "streamrl"]
    assert main(["bench", "bus", *size, "--out", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(row["contender"], row["rounds"]) for row in report["rows"]] == [("streamrl", 1)] * 4
    found = read(out, "bus")
    all_arrived(msgspec.convert(found.header.spec, BusOptions), found.rounds)
    assert {path.name for path in out.iterdir()} == {"raw.jsonl", "report.json", "table.md", "bus.png"}
    assert main(["bench", "bus", "--report", str(out)]) == 0
    assert capsys.readouterr().out.startswith("| samples x tokens |")
    assert main(["bench", "bus", *size, "--out", str(out)]) != 0
    assert "expected a new directory" in capsys.readouterr().err


def test_numbers_and_names_are_parsed() -> None:
    assert numbers("--tokens", "256, 2k,16k,2048") == (256, 2048, 16384)
    for text in ("2.5k", "x", "-1", "2kk"):
        with raises(ConfigError, option="--tokens", got=text):
            numbers("--tokens", text)
    assert names("--transports", "", Transport) == tuple(Transport)
    assert names("--transports", "ray,streamrl,ray", Transport) == (Transport.RAY, Transport.STREAMRL)
    with raises(ConfigError, option="--transports", got="kafka"):
        names("--transports", "streamrl,kafka", Transport)
    assert [Cell(8, tokens).name for tokens in (256, 2048, 1500)] == ["8 x 256", "8 x 2k", "8 x 1500"]
    assert [Cell.named(Cell(8, tokens).name) for tokens in (256, 2048, 1500)] == [Cell(8, 256), Cell(8, 2048), Cell(8, 1500)]


def test_a_round_sends_about_as_many_tokens_of_every_shape_and_begins_with_another_transport() -> None:
    options = BusOptions(round_tokens=1_000_000, min_tasks=3, max_tasks=1000)
    assert [options.num_tasks(cell) for cell in (Cell(1, 256), Cell(8, 2048), Cell(64, 16384))] == [1000, 61, 3]
    three = [Transport.STREAMRL, Transport.RAY, Transport.ZMQ_MSGPACK]
    assert [turn(three, number)[0] for number in range(4)] == [*three, Transport.STREAMRL]
    assert all(sorted(turn(three, number)) == sorted(three) for number in range(3))


@pytest.mark.nats
def test_a_thread_without_a_loop_publishes_and_reads_while_its_caller_computes(tmp_path: Path) -> None:
    marks = Subjects("run").marks
    server = NatsServer(tmp_path / "bus")
    server.start()
    try:
        with BusThread(lambda: connect(server.address, "run", BusConfig(patience_s=60))) as bus:
            under_way = [bus.submit(lambda bus, index=index: bus.publish(marks, b"%d" % index)) for index in range(100)]
            deadline = time.monotonic() + 60
            while not all(future.done() for future in under_way) and time.monotonic() < deadline:
                sum(range(1000))
            assert [future.result(timeout=0).sequence for future in under_way] == list(range(1, 101))
            read = bus.iterate(lambda bus: bus.read("samples", after=90))
            assert [message.sequence for message in itertools.islice(read, 10)] == list(range(91, 101))
            del read
            bus.run(lambda bus: bus.trim("samples", through=50))
            with pytest.raises(LogTruncated):
                next(bus.iterate(lambda bus: bus.read("samples", after=3)))
    finally:
        server.stop()
    address = BusAddress(url="nats://127.0.0.1:1")
    with pytest.raises(BusUnavailable), BusThread(lambda: connect(address, "run", patience_s=0.2)):
        pass


TASKS = 10


def measured(transport: Transport, cell: Cell, number: int, tokens_per_s: float, messages: int = TASKS) -> Round:
    samples = TASKS * cell.samples
    tokens = samples * cell.tokens
    cpu = {"producer_s": tokens * 10e-9, "server_s": tokens * 20e-9, "consumer_s": tokens * 30e-9}
    counts = {"tasks": TASKS, "messages": messages, "samples": samples, "tokens": tokens, "nbytes": 9 * tokens}
    return Round(cell=cell.name, contender=transport, round=number, values={"wall_s": tokens / tokens_per_s, **cpu, **counts})


@pytest.fixture
def run() -> Raw:
    large, middle = Cell(64, 2048), Cell(8, 2048)
    found = [measured(Transport.STREAMRL, large, number, speed, messages=2 * TASKS) for number, speed in enumerate((15e6, 9e6, 12e6))]
    for number, (ours, other) in enumerate(((8e6, 4e6), (9e6, 3e6), (1e6, 1e6))):
        found += [measured(Transport.REDIS_ORJSON, middle, number, other), measured(Transport.STREAMRL, middle, number, ours)]
    facts = Machine(processor="a processor", cores=2, python="3.11", packages={"redis": "8"}, date="2026-11-21", load=0.5)
    header = Header(benchmark="bus", command="streamrl bench bus --rounds 3", machine=facts, spec={"rounds": 3})
    return Raw(header=header, rounds=found, facts=[Fact("left out", "ray", "no Python package ray: pip install 'streamrl[ray]'")])


def medians(row: Row, *names: str) -> list[float]:
    return [row.values[name].p50 for name in names]


def test_medians_ratios_and_targets(run: Raw) -> None:
    report = build_report(run)
    assert [(row.cell, row.contender) for row in report.rows] == [
        ("8 x 2k", Transport.STREAMRL),
        ("8 x 2k", Transport.REDIS_ORJSON),
        ("64 x 2k", Transport.STREAMRL),
    ]
    _, redis, large = report.rows
    speed = large.values["tokens_per_s"]
    assert (speed.p50, speed.low, speed.high) == pytest.approx((12e6, 9e6, 15e6))
    assert large.rounds == 3
    assert medians(large, "samples_per_s", "messages", "body_bytes") == pytest.approx([12e6 / 2048, 2, 9])
    assert medians(large, "producer_ns", "server_ns", "consumer_ns") == pytest.approx([10, 20, 30])
    # A ratio is one of speeds of the same round, not of medians.
    ratio = redis.values["ratio"]
    assert (ratio.p50, ratio.low, ratio.high) == pytest.approx((2, 1, 3))
    assert [(target.got, target.met) for target in report.targets] == [("12,000,000", True), ("2.00", True)]
    only = [one for one in run.rounds if one.cell == "8 x 2k" and one.contender == Transport.STREAMRL]
    report = build_report(msgspec.structs.replace(run, rounds=only))
    assert [target.met for target in report.targets] == [None, None]
    slow = build_report(msgspec.structs.replace(run, rounds=[measured(Transport.STREAMRL, Cell(64, 2048), 0, 9.9e6)]))
    assert [target.met for target in slow.targets] == [False, None]
    assert "| NO " in render(slow) and "| not measured |" in render(slow)
    text = render(build_report(run))
    assert "| 64 x 2k          | streamrl     | 5,859     | 12.0 (9.00 - 15.0)" in text
    assert "| 2.00 (1.00 - 3.00) |" in text
    assert "| 10.0 + 20.0 + 30.0 = 60.0" in text
    assert "Left out: ray: " in text
    assert "`streamrl bench bus --rounds 3`" in text and "2 cores, load before 0.5" in text and "2026-11-21" in text


def test_files_are_made_from_the_raw_one(run: Raw, tmp_path: Path) -> None:
    write(tmp_path, run.header, [*run.facts, *run.rounds])
    report = report_of(tmp_path)
    assert report == build_report(run)
    assert msgspec.json.decode((tmp_path / "report.json").read_bytes())["rows"][0]["contender"] == "streamrl"
    assert (tmp_path / "table.md").read_text() == render(report)
    assert (tmp_path / "bus.png").read_bytes().startswith(b"\x89PNG")


def test_without_files_there_is_a_clear_error_and_what_was_measured_until_one_is_kept(run: Raw, tmp_path: Path) -> None:
    with raises(DataError, directory=str(tmp_path), benchmark="bus"):
        report_of(tmp_path)

    def records() -> Iterator[Round]:
        yield from run.rounds[:2]
        raise LaunchError("the server died")

    with pytest.raises(LaunchError):
        write(tmp_path, run.header, records())
    assert read(tmp_path, "bus") == msgspec.structs.replace(run, rounds=run.rounds[:2], facts=[])
    with raises(DataError, directory=str(tmp_path), benchmark="loop"):
        read(tmp_path, "loop")


@pytest.mark.parametrize(("broken", "said"), [(b'{"type":"round"', "line 1"), (b'{"type":"window"}\n', "line 1"), (b"", "headers of")])
def test_a_broken_file_is_an_error(broken: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "raw.jsonl").write_bytes(broken)
    with pytest.raises(DataError, match=said):
        read(tmp_path, "bus")
