"""Reports of metrics and the names that they have in the source, in sets of problems and in sinks; clocks of states; logs."""

import ast
import functools
import json
import logging
import math
import random
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from scripts.docs.grafana import ROWS, grafana_dashboard
from streamrl.config.evaluation_sets import HELDOUT
from streamrl.errors import BusUnavailable, SchemaError
from streamrl.monitor.numbers import Evaluation
from streamrl.monitor.series import Row, known, values_of
from streamrl.monitor.sinks.names import prometheus_name
from streamrl.monitor.sinks.protocol import Once
from streamrl.runtime.kinds import inherited
from streamrl.schemas.codec import decode
from streamrl.schemas.events import MetricReport
from streamrl.schemas.ledger import Drop
from streamrl.schemas.versions import Version
from streamrl.telemetry import names
from streamrl.telemetry.clock import ClockReports, StateClock
from streamrl.telemetry.logs import LineFormatter, RepeatedTracebacks, bound_logs, configure_logging, mask_secrets
from streamrl.telemetry.metrics import Fold, MetricsSink, report
from streamrl.telemetry.names import METRICS, Reduction, declared, metric, reward_part
from streamrl.telemetry.set_names import SET_METRICS, set_metric
from streamrl.telemetry.states import STATES, seconds, share
from tests.support.errors import raises

ROOT = Path(__file__).parents[2]


def test_reports_group_and_fold_values_by_their_declared_reduction() -> None:
    made = report("engine-0", {"engine/tokens_total": 5, "engine/swap_ms": 0.5, "train/loss": 1.5}, time_s=7.0)
    assert made == MetricReport(
        worker="engine-0", sum={"engine/tokens_total": 5.0}, max={"engine/swap_ms": 0.5}, mean={"train/loss": 1.5}, time_s=7.0
    )
    assert report("w", {"train/loss": math.nan, "train/tis": math.inf}, time_s=0.0).mean == {}
    fold = Fold()
    for loss, tokens, swap in ((1.0, 10, 0.5), (2.0, 20, 0.1), (6.0, 30, 0.2)):
        fold.add(report("w", {"train/loss": loss, "engine/tokens_total": tokens, "engine/swap_ms": swap}, time_s=0.0))
    fold.add(MetricReport(worker="w", last={"lag/stream_messages": 4.0}))
    fold.add(MetricReport(worker="w", last={"lag/stream_messages": 3.0}))
    assert fold.values == pytest.approx({"train/loss": 3.0, "engine/tokens_total": 60.0, "engine/swap_ms": 0.5, "lag/stream_messages": 3.0})
    with raises(SchemaError, name="train/los") as caught:
        report("w", {"train/los": 1.0}, time_s=0.0)
    assert "did you mean 'train/loss'?" in caught.value.hint


async def test_the_sink_publishes_messagepack() -> None:
    bodies: list[bytes] = []

    async def publish(body: bytes) -> None:
        bodies.append(body)

    await MetricsSink("trainer-0", publish).put({"train/loss": 2.0})
    received = decode(bodies[0], MetricReport)
    assert (received.worker, received.mean) == ("trainer-0", {"train/loss": 2.0})
    assert received.time_s > 0


async def test_a_bus_that_is_away_costs_the_report_only(caplog: pytest.LogCaptureFixture) -> None:
    async def publish(body: bytes) -> None:
        raise BusUnavailable("the bus is away")

    sink = MetricsSink("trainer-0", publish)
    with caplog.at_level(logging.WARNING):
        await sink.put({"train/loss": 2.0})
    assert sink.num_lost == 1
    assert "event=metrics_lost worker=trainer-0 lost=1" in caplog.text
    with pytest.raises(SchemaError):
        await sink.put({"no/such_name": 1.0})


SPENT = {"engine/saturated_s", *(names.seconds(kind, state) for kind, states in STATES.items() for state in (*states, names.DOWN))}


AREAS = "|".join(sorted({name.partition("/")[0] for name in METRICS}))
LITERAL = re.compile(rf"(?:{AREAS})(?:/[A-Za-z0-9_-]+)+")
BEGINNING = re.compile(rf"(?:{AREAS})/[A-Za-z0-9_/-]*")


def names_in(source: str) -> tuple[set[str], set[str]]:
    """The metric names that a module writes down, and the beginnings of those that it puts together with an f-string."""
    whole: set[str] = set()
    begun: set[str] = set()
    parts: set[int] = set()
    for node in ast.walk(ast.parse(source)) if BEGINNING.search(source) else ():
        if isinstance(node, ast.JoinedStr):
            parts.update(id(value) for value in node.values)
            first = node.values[0] if node.values else None
            if isinstance(first, ast.Constant) and BEGINNING.fullmatch(str(first.value)):
                begun.add(str(first.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts and LITERAL.fullmatch(node.value):
            whole.add(node.value)
    return whole, begun


@functools.cache
def names_of_modules() -> dict[Path, tuple[set[str], set[str]]]:
    """`names_in` of each module of the product."""
    paths = [path for folder in ("streamrl", "producers", "consumers") for path in (ROOT / folder).rglob("*.py")]
    return {path: names_in(path.read_text(encoding="utf-8")) for path in paths}


def reported_names() -> set[str]:
    return set[str]().union(*(whole for path, (whole, _) in names_of_modules().items() if path.name != "names.py"))


def test_names_are_found_where_they_are_written_and_where_they_are_put_together() -> None:
    assert names_in('m = {"train/loss": 1, f"rollout/{x}": 2, "rollout/response_len/mean": 3, "other/x": 4}') == (
        {"train/loss", "rollout/response_len/mean"},
        {"rollout/"},
    )


def test_every_metric_name_in_the_source_is_declared() -> None:
    used: set[str] = set()
    begun: set[tuple[str, str]] = set()
    for path, (whole, parts) in names_of_modules().items():
        used, begun = used | whole, begun | {(path.name, part) for part in parts}
    assert used - METRICS.keys() == names.LENGTHS.keys()
    assert {"rollout/raw_reward", "train/mis_kl", "rollout/response_len/max"} <= used
    # Sets of problems, advantages, drops: see below. Links: names of blobs.
    # Losses and corrections with slime's signatures name their metrics themselves.
    allowed = {
        ("estimators.py", "rollout/"),
        ("links.py", "weights/"),
        ("loss.py", "train/"),
        ("training.py", "train/"),
        ("names.py", "rollouts/dropped_total/"),
        ("names.py", "tokens/dropped_total/"),
        ("names.py", "staleness/"),
        ("series.py", "eval/"),
    }
    assert begun <= allowed, "each needs a test that what is put together is declared"


def test_names_follow_the_pattern_and_totals_add_up() -> None:
    for name, one in METRICS.items():
        assert re.fullmatch(r"[a-z]+(/[a-z0-9_]+)+", name), name
        is_sum = name.endswith("_total") or "_total/" in name or name in {"train/nonfinite_tokens", *SPENT}
        assert is_sum == (one.reduction is Reduction.SUM), name
        assert name.endswith("max") <= (one.reduction is Reduction.MAX), name
        assert one.unit and one.meaning, name
    assert metric("train/loss").name == "train/loss"
    for name in ("advantages", "returns", "values", "kl"):
        assert metric(f"rollout/{name}").reduction is Reduction.MEAN


def test_the_reasons_of_drops_are_declared_and_explained_and_other_words_are_counted_together() -> None:
    assert Drop.__doc__ is not None
    explained = set(re.findall(r"`([a-z_]+)`", Drop.__doc__))
    assert set(names.DROP_REASONS) == explained
    for reason in (*names.DROP_REASONS, "a word of mine", "x" * 10_000):
        assert metric(names.dropped(reason)).reduction is metric(names.dropped_tokens(reason)).reduction is Reduction.SUM
    assert names.dropped("a word of mine") == "rollouts/dropped_total/other"


def test_what_people_are_told_to_watch_is_reported_by_somebody() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    table = page.partition("## What to watch")[2].partition("\n## ")[0]
    told = {name for name in re.findall(r"`([a-z]+/[a-z0-9_/]+)`", table) if name in METRICS}
    assert len(told) > 15
    assert told - reported_names() == {names.DROPPED_SO_FAR}, "which is made of the ledger"


def test_what_is_called_a_total_is_an_amount_that_rows_add_up_to() -> None:
    totals = {name for name in METRICS if "_total" in name}
    assert {METRICS[name].reduction for name in totals} == {Reduction.SUM}
    assert METRICS[names.DROPPED_SO_FAR].reduction is Reduction.LAST


def test_what_is_declared_is_reported_by_somebody() -> None:
    reasons, parts = (*names.DROP_REASONS, names.OTHER_REASON), [(part, of) for part in names.AGE_PARTS for of in ("p50", "p95", "max")]
    states = [(kind, state) for kind, found in STATES.items() for state in (*found, names.DOWN)]
    reported = {make(reason) for reason in reasons for make in (names.dropped, names.dropped_tokens)}
    reported |= {f"rollout/{name}" for name in ("advantages", "advantages_abs", "returns", "values", "kl")}
    reported |= {names.staleness_part(begin, part, of) for begin in ("", "sample_") for part, of in parts}
    reported |= {make(kind, state) for kind, state in states for make in (names.seconds, names.share)}
    reported |= {
        names.DROPPED_SO_FAR,
        names.PARENT_DISTANCE,
        *(names.length_quantile(name, word) for name in names.LENGTHS for word in ("p50", "p95")),
    }
    assert METRICS.keys() - reported - reported_names() == set()


ENTERED_IN = {"trainer": ("consumers/training",), "engine": ("consumers/serving", "streamrl/engines"), "producer": ("producers",)}


@pytest.mark.parametrize("kind", STATES)
def test_every_state_is_entered_by_somebody(kind: str) -> None:
    source = "".join(path.read_text(encoding="utf-8") for folder in ENTERED_IN[kind] for path in (ROOT / folder).rglob("*.py"))
    assert [state for state in STATES[kind] if f'"{state}"' not in source] == []


ALL = Evaluation(
    version=Version(0, 3),
    accuracy=0.5,
    num=4,
    set="gsm8k-hard",
    passes={1: 0.5, 8: 0.75},
    majorities={8: 0.5},
    truncated_ratio=0.1,
    interval=(0.25, 0.75),
    failed_ratio=0.0,
    response_len=12.0,
    took_s=3.0,
)


@pytest.mark.parametrize("name", ["eval/", "eval/a b", "eval/a-pass@", "eval/a-pass@x", "eval/a/b", "eval/" + "a" * 65, "evil/a"])
def test_other_names_are_none(name: str) -> None:
    assert set_metric(name) is None


def test_every_value_of_an_evaluation_has_a_declared_name() -> None:
    values = values_of(ALL)
    assert known(values) == values
    assert set(values) == {
        *("eval/gsm8k-hard", "eval/gsm8k-hard-pass@1", "eval/gsm8k-hard-pass@8", "eval/gsm8k-hard-maj@8"),
        *("eval/gsm8k-hard-ci_low", "eval/gsm8k-hard-ci_high"),
        *("eval/gsm8k-hard-truncated_ratio", "eval/gsm8k-hard-failed_ratio", "eval/gsm8k-hard-response_len", "eval/gsm8k-hard-took_s"),
    }
    forms = {name.replace("gsm8k-hard", "{set}").replace("@1", "@{k}").replace("@8", "@{k}") for name in values}
    assert forms == SET_METRICS.keys()
    assert values_of(Evaluation(version=Version(0, 3), accuracy=None, num=4)) == {}
    found = metric("eval/gsm8k-hard-pass@8")
    assert found.meaning.startswith("pass@8: ") and "of 8 samples" in found.meaning
    assert "`gsm8k-hard`" in metric("eval/gsm8k-hard").meaning
    assert declared(f"eval/{HELDOUT}") is METRICS["eval/heldout"]
    assert prometheus_name("eval/gsm8k-hard-pass@8") == ("streamrl_eval_gsm8k_hard_pass_8", "")


def test_a_part_of_the_rewards_has_a_metric_whatever_its_name() -> None:
    for part in ("right", "short-enough", "a b/c", "", "x" * 99):
        name = reward_part(part)
        found = metric(name)
        assert (found.name, found.unit, prometheus_name(name)[1]) == (name, "reward", "")
    assert declared("rollout/reward_part/") is declared("rollout/reward_part/a/b") is declared("rollout/reward_part/a b") is None


def test_every_metric_has_a_name_of_its_own_that_prometheus_takes() -> None:
    names = [prometheus_name(name) for name in METRICS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z_][a-z0-9_]*", called) for called, _ in names)
    assert prometheus_name("rollouts/dropped_total/stale") == ("streamrl_rollouts_dropped_total", "stale")
    assert prometheus_name("train/nonfinite_tokens") == ("streamrl_train_nonfinite_tokens_total", "")


def test_the_dashboard_asks_for_declared_metrics_only() -> None:
    asked = {name for names in ROWS.values() for name in names}
    assert asked <= METRICS.keys()
    panels = json.loads(grafana_dashboard())["panels"]
    assert [one["title"] for one in panels if one["type"] == "row"] == list(ROWS)
    called = {re.search(r"streamrl_\w+", target["expr"])[0] for one in panels for target in one.get("targets", ())}  # type: ignore[index]
    assert called == {prometheus_name(name)[0] for name in asked}


def test_a_window_of_the_run_does_not_repeat_what_batches_say() -> None:
    once = Once()
    assert once.values(Row(time_s=1.0, kind="batch", values={"train/loss": 1.0})) == {"train/loss": 1.0}
    window = {"train/loss": 2.0, "lag/stream_s": 3.0}
    assert once.values(Row(time_s=2.0, kind="window", values=window)) == {"lag/stream_s": 3.0}
    assert once.values(Row(time_s=2.0, kind="window", of="trainer-0", values=window)) == window


def test_only_the_sink_of_wandb_gets_its_key() -> None:
    surroundings = {"WANDB_API_KEY": "k", "HF_TOKEN": "t", "PATH": "/bin"}
    assert inherited(surroundings, "sink-wandb") == {"WANDB_API_KEY": "k", "PATH": "/bin"}
    for kind in ("sink-tensorboard", "sink-prometheus", "trainer", "engine"):
        assert inherited(surroundings, kind) == {"PATH": "/bin"}


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


@pytest.mark.parametrize(("gpus", "said"), [(None, {}), (0.0, {"engine/gpus": 0.0}), (2.0, {"engine/gpus": 2.0})])
async def test_an_engine_reports_its_gpus_once_it_knows_them(gpus: float | None, said: dict[str, float]) -> None:
    heard: list[dict[str, float]] = []

    async def put(values: Mapping[str, float]) -> bool:
        heard.append({name: value for name, value in values.items() if not name.endswith("_s")})
        return True

    await ClockReports(StateClock("setup"), "engine", put, gpus=lambda: gpus).report()
    assert heard == [said]


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
