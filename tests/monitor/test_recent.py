from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.metrics import MetricsConfig
from streamrl.monitor.metrics_file import CURRENT, MetricsFile
from streamrl.monitor.recent import Recent
from streamrl.monitor.series import Row


def window(time_s: float, cut: float, **values: float) -> Row:
    return Row(time_s=time_s, kind="window", values={"tokens/cut_total": cut, **values})


def test_the_last_minute_is_added_up_and_a_folder_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    rows, recent = MetricsFile(tmp_path, MetricsConfig()), Recent(tmp_path)
    recent.look(0.0)
    assert (recent.shares, recent.goodput) == ({}, {})
    old = window(900.0, 1.0)
    rows.write(
        [old, window(1000.0, 10.0, **{"tokens/open": 7.0, "trainer/share/compute": 1.0, "starvation/trainer": 0.0, "lag/stream_s": 1.0})]
    )
    recent.look(1001.0)
    assert recent.shares == {"trainer/share/compute": 1.0, "starvation/trainer": 0.0}
    assert recent.goodput == {"tokens/cut_total": 10.0, "tokens/open": 7.0}
    worker = Row(time_s=1010.0, kind="window", of="engine-0", values={"tokens/cut_total": 1000.0, "engine/share/idle": 1.0})
    batch = Row(time_s=1011.0, kind="batch", values={"tokens/trained_total": 50.0, "tokens/waiting": 4.0})
    rows.write([window(1010.0, 100.0, **{"tokens/open": 3.0}), worker, batch])
    for _ in range(2):
        recent.look(1012.0)
        assert recent.shares == {}
        assert recent.goodput == {"tokens/cut_total": 110.0, "tokens/open": 3.0, "tokens/trained_total": 50.0, "tokens/waiting": 4.0}
    recent.look(1065.0)
    assert recent.goodput["tokens/cut_total"] == 100.0
    recent.look(2000.0)
    assert (recent.shares, recent.goodput) == ({}, {})
    (tmp_path / "file").touch()
    recent = Recent(tmp_path / "file")
    recent.look(0.0)
    assert recent.goodput == {}


def test_files_put_aside_and_torn_lines_are_passed_over(tmp_path: Path) -> None:
    rows, recent = MetricsFile(tmp_path, MetricsConfig(file_bytes=1 << 16)), Recent(tmp_path)
    for number in range(2000):
        rows.write([window(float(number), 1.0)])
        if number % 7 == 0:
            recent.look(0.0)
    recent.look(0.0)
    assert len(list(tmp_path.iterdir())) > 1
    assert recent.goodput["tokens/cut_total"] == pytest.approx(2000, rel=0.02), "at most what was written since the look before is lost"
    with (tmp_path / CURRENT).open("ab") as file:
        file.write(b'{"of":"","time_s":1}\n\xff\n{"time_s":1.0,"kind":"window","of":"","version":"","step":0,"tok')
    before = recent.goodput
    recent.look(0.0)
    assert recent.goodput == before
    (tmp_path / CURRENT).write_bytes(b"")
    recent.look(0.0)
    assert recent.goodput == before
