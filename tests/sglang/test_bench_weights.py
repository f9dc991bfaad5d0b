"""`streamrl bench weights` from end to end: a real SGLang, a real load, every way to update. No time is asserted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]  # a server's start takes minutes on a crowded machine

PLAN = "steady:0.5,paced:1.5/0.5,steady:0.5,flip:1/0.5,steady:0.5,copy:1/0.5,steady:0.5,tensor:1/1,steady:0.5,"
PLAN += "distributed:1/0.5,steady:0.5,disk:1/1,steady:0.5"


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "streamrl", "bench", "weights", *map(str, arguments)]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=380)


@pytest.fixture(scope="module")
def measured(sglang_python, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    out = tmp_path_factory.mktemp("bench") / "out"
    return out, bench("--shape", "tiny", "--plan", PLAN, "--python", sglang_python, "--tokens", "32", "--out", out, "--json")


def test_every_way_to_update_is_measured(measured):
    out, ended = measured
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    report = json.loads(ended.stdout)
    assert [check["name"] for check in report["checks"] if not check["held"]] == []
    rows = {row["title"]: row for row in report["rows"]}
    assert {title: row["updates"] for title, row in rows.items()} == {
        "steady": 0,
        "paced, 0.5 s": 3,
        "flip, 0.5 s": 2,
        "copy, 0.5 s": 2,
        "tensor, 1 s": 1,
        "distributed, 0.5 s": 2,
        "disk, 1 s": 1,
    }
    assert all(row["failed"] == 0 and row["gap"]["n"] > 0 and row["tokens_per_s"] > 0 for row in rows.values())
    requests = report["requests"]
    assert requests["ended"] > 0
    assert [requests[name] for name in ("aborted", "retracted", "prefilled_again", "failed")] == [0, 0, 0, 0]
    nbytes = report["run"]["nbytes"]
    assert all(rows[title]["wire_bytes"] == nbytes for title in rows if title != "steady")
    records = [json.loads(line) for line in (out / "raw.jsonl").read_text().splitlines()]
    updates = [record for record in records if record["type"] == "update"]
    ours = [update for update in updates if update["mode"] not in ("tensor", "distributed", "disk")]
    assert len(ours) == 13
    assert all(update["publish_s"] < update["announced_s"] < update["staged_s"] < update["commit_s"] for update in ours)


def test_report_needs_the_raw_file_only(measured, tmp_path):
    out, _ = measured
    shutil.copy(out / "raw.jsonl", tmp_path)
    ended = bench("--report", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == (tmp_path / "table.md").read_text().strip() == (out / "table.md").read_text().strip()
    assert (tmp_path / "weights.png").read_bytes() == (out / "weights.png").read_bytes()
    assert (tmp_path / "report.json").read_text() == (out / "report.json").read_text()
