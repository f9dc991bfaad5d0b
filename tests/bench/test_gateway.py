from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.gateway.report import build_report
from benchmarks.gateway.spec import ENGINE, GATEWAY, NUM_ROLLOUTS, GatewaySpec, config_of
from benchmarks.raw import Fact, Raw, Round, read
from benchmarks.report import render
from streamrl.cli import main
from streamrl.config.check import check
from tests.bench.known import raw_of

MIB = 1 << 20


def raw(added_s: float) -> Raw:
    """Three rounds, each slower than the one before."""
    rounds: list[Round] = []
    for number, p50_s in enumerate((0.001, 0.002, 0.008)):
        for label, more_s in ((ENGINE, 0.0), (GATEWAY, added_s)):
            values = {"p50_s": p50_s + more_s, "p99_s": 0.02, "calls": 1000.0, "cpu_s": 1.5, "load": 1.0}
            rounds.append(Round(cell="", contender=label, round=number, values=values))
    sizes = {"idle": 90 * MIB, "open": 100 * MIB, "used": 103 * MIB}
    facts = [Fact("memory", about, size) for about, size in sizes.items()]
    facts += [Fact("sessions", "opened_s", 2.5), Fact("turns", "stored", 3072)]
    return raw_of("gateway", GatewaySpec(), rounds, facts)


def test_what_is_added_is_compared_within_a_round() -> None:
    report = build_report(raw(0.0025))
    [target] = report.targets
    assert (target.got, target.met) == ("2.50 ms", True)
    assert "103 MiB after 3072 turns" in render(report)
    assert build_report(raw(0.004)).targets[0].met is False
    assert build_report(replace(raw(0.001), rounds=raw(0.001).rounds[:1])).targets[0].met is None


def test_its_run_has_credits_for_the_sessions_and_room_for_their_turns(tmp_path: Path) -> None:
    spec = GatewaySpec()
    config = config_of(spec, tmp_path)
    check(config)
    credits = (config.tasks.max_staleness + 1) * config.tasks.batch_tasks
    assert credits * NUM_ROLLOUTS >= spec.sessions
    assert config.model.max_len > spec.calls * spec.rounds / spec.sessions * (spec.tokens + 5) + 16


@pytest.mark.nats
@pytest.mark.process
def test_it_runs_from_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = "--rounds 1 --sessions 9 --seconds 0.3"
    assert main(["bench", "gateway", *arguments.split(), "--out", str(out)]) == 0
    assert [one.contender for one in read(out, "gateway").rounds] == [ENGINE, GATEWAY]
