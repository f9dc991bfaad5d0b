import logging
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.telemetry.clock import ClockReports, StateClock
from streamrl.telemetry.logs import LineFormatter, RepeatedTracebacks, bound_logs, configure_logging, mask_secrets
from streamrl.telemetry.names import METRICS, Reduction
from streamrl.telemetry.states import STATES, seconds, share


class Hand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_slots_times_seconds_add_up_however_they_move() -> None:
    hand, dice = Hand(), random.Random(1)
    clock = StateClock("a", slots=5, now=hand)
    states = ["a"] * 5
    spent = dict.fromkeys("abc", 0.0)
    for _ in range(500):
        step_s = dice.random()
        hand.now_s += step_s
        for state in states:
            spent[state] += step_s
        slot, state = dice.randrange(5), dice.choice("abc")
        clock.move(states[slot], state)
        states[slot] = state
    found = clock.take()
    assert found == pytest.approx(spent)
    assert sum(found.values()) == pytest.approx(5 * (hand.now_s - 100.0))


def test_states_are_entered_and_read_by_several_threads() -> None:
    seen: list[float] = []

    def now() -> float:
        seen.append(time.monotonic())
        return seen[-1]

    clock = StateClock("a", slots=4, now=now)
    taken = 0.0

    def go() -> None:
        for _ in range(2000):
            clock.move("a", "b")
            clock.move("b", "a")

    threads = [threading.Thread(target=go) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken += sum(clock.take().values())
    last = clock.take()
    assert last.keys() == {"a", "b"}
    assert taken + sum(last.values()) == pytest.approx(4 * (seen[-1] - seen[0]), rel=1e-6)


async def test_what_the_bus_does_not_take_is_reported_later() -> None:
    hand = Hand()
    clock = StateClock("setup", slots=3, now=hand)
    said: list[dict[str, float]] = []
    works = False

    async def put(values: object) -> bool:
        assert isinstance(values, dict)
        said.append(values)
        return works

    reports = ClockReports(clock, "producer", put)
    hand.now_s += 1.0
    await reports.report()
    works = True
    hand.now_s += 1.0
    await reports.report()
    hand.now_s += 1.0
    await reports.report()
    assert said == [{"producer/slot_setup_s": amount, "producer/slots": 3.0} for amount in (3.0, 6.0, 3.0)]


def test_seconds_go_to_the_state_that_was_entered_last() -> None:
    hand = Hand()
    clock = StateClock("setup", now=hand)
    hand.now_s += 2.0
    assert clock.enter("compute") == "setup"
    hand.now_s += 3.0
    with clock.within("wait_bus"):
        hand.now_s += 0.5
    hand.now_s += 1.0
    assert clock.take() == {"setup": 2.0, "compute": 4.0, "wait_bus": 0.5}
    hand.now_s += 7.0
    assert clock.take() == {"setup": 0.0, "compute": 7.0, "wait_bus": 0.0}
    clock = StateClock("compute")
    with pytest.raises(KeyError), clock.within("wait_bus"):
        raise KeyError
    assert clock.state == "compute"
    for kind, states in STATES.items():
        for state in (*states, "down"):
            assert METRICS[seconds(kind, state)].reduction is Reduction.SUM
            assert METRICS[share(kind, state)].unit == "fraction"


@pytest.fixture
def restored() -> Iterator[None]:
    """The root logger as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers, root.level = handlers, level
    logging.captureWarnings(False)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("url=nats://me:s3cret@host:4222 up", "url=nats://***@host:4222 up"),
        ("token=abc.def next", "token=*** next"),
        ("{'password': 'abc', 'user': 'me'}", "{'password': '***', 'user': 'me'}"),
        ('"password": "abc"', '"password": "***"'),
        ("num_tokens=5 tokens=7 token_ids=3", "num_tokens=5 tokens=7 token_ids=3"),
    ],
)
def test_secrets_are_masked_and_nothing_else(text: str, shown: str) -> None:
    assert mask_secrets(text) == shown


def test_a_message_is_one_line_and_a_traceback_is_masked() -> None:
    formatter = LineFormatter("engine-0")
    record = logging.LogRecord("streamrl.x", logging.WARNING, __file__, 1, "event=lost error=%s", ("a\nb",), None)
    line = formatter.format(record)
    assert line.endswith("WARNING engine-0 streamrl.x: event=lost error=a | b")
    try:
        raise ValueError("password=abc")
    except ValueError:
        record = logging.LogRecord("streamrl.x", logging.ERROR, __file__, 1, "event=crashed", (), sys.exc_info())
    text = formatter.format(record)
    assert "Traceback" in text and "password=***" in text
    assert "abc" not in text


def test_a_process_logs_to_its_file_and_only_once(restored: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        configure_logging("feeder-0", file=tmp_path / "feeder-0.log", stderr=False)
    logging.getLogger("streamrl.test").info("event=issued tasks=%d", 3)
    logging.getLogger("streamrl.test").debug("event=unseen")
    assert [line.partition(" INFO ")[2].split() for line in (tmp_path / "feeder-0.log").read_text().splitlines()] == [
        ["feeder-0", "streamrl.test:", "event=issued", "tasks=3"]
    ]
    assert capsys.readouterr().err == ""


def failed(created_s: float, error: type[Exception] = ValueError) -> logging.LogRecord:
    try:
        raise error("no")
    except error:
        record = logging.LogRecord("streamrl.x", logging.WARNING, __file__, 1, "event=rollout_failed task=%d", (7,), sys.exc_info())
    record.created = created_s
    return record


def test_the_same_traceback_is_counted_after_a_few_and_others_are_written() -> None:
    limit = RepeatedTracebacks(most=5)
    passed = [bool(limit.filter(failed(100.0 + number / 100))) for number in range(1000)]
    assert sum(passed) == 5
    assert limit.filter(failed(110.0, KeyError))
    plain = logging.LogRecord("streamrl.x", logging.WARNING, __file__, 1, "event=plain", (), None)
    assert all(limit.filter(plain) is True for _ in range(100))
    told = failed(161.0)
    assert limit.filter(told)
    assert "event=rollout_failed task=7 (995 more like it were not written)\n" in LineFormatter("producer-0").format(told)
    assert limit.filter(failed(162.0)) is True


def test_a_logger_that_fails_all_the_time_writes_little(restored: None, tmp_path: Path) -> None:
    path = tmp_path / "producer-0.log"
    configure_logging("producer-0", file=path, stderr=False)
    for number in range(2000):
        try:
            raise ValueError(f"task {number}")
        except ValueError as error:
            logging.getLogger("streamrl.test").warning("event=rollout_failed task=%d", number, exc_info=error)
    assert path.read_text().count("Traceback") == 5


def test_a_log_that_is_too_large_goes_on_in_a_new_file_and_one_former_is_kept_where_it_can_be(tmp_path: Path) -> None:
    path, former, other = tmp_path / "a.log", tmp_path / "a.log.1", tmp_path / "b.log"
    other.write_text("short")
    with path.open("ab", buffering=0) as writer:
        for text in (b"first" * 10, b"second" * 10):
            writer.write(text)
            bound_logs([path, other, tmp_path / "gone.log"], most_bytes=40)
            assert (path.read_bytes(), former.read_bytes()) == (b"", text)
        writer.write(b"on")
    assert path.read_bytes() == b"on"
    assert other.read_text() == "short"
    path.write_bytes(b"x" * 100)
    former.unlink()
    former.mkdir()
    bound_logs([path], most_bytes=10)
    assert path.stat().st_size == 0
