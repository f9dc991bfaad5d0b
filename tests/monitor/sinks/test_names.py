import json
import re

from scripts.docs.grafana import ROWS, grafana_dashboard
from streamrl.monitor.series import Row
from streamrl.monitor.sinks.names import prometheus_name
from streamrl.monitor.sinks.protocol import Once
from streamrl.runtime.kinds import inherited
from streamrl.telemetry.names import METRICS


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
