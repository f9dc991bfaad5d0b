from __future__ import annotations

import subprocess
import sys

import pytest

from streamrl.bus.jetstream import admin
from streamrl.bus.topology import Topology, streams
from streamrl.config.tree import BusConfig
from streamrl.errors import SchemaError
from streamrl.schemas.subjects import Subjects

TO = Subjects("run")


def test_every_subject_of_a_run_has_its_stream() -> None:
    own = {"tasks": TO.tasks("main"), "grading": TO.grading("main"), "ledger": TO.ledger("trainer"), "weights": TO.weights("policy")}
    own |= {"events": TO.events("swap"), "metrics": TO.metrics("trainer-0"), "dead": TO.dead}
    of_samples = (TO.samples("main"), TO.tombstones("main"), TO.rewards, TO.marks)
    for stream, subject in (*own.items(), *(("samples", subject) for subject in of_samples)):
        assert Topology.of("run", BusConfig()).stream_of(subject).name == stream


def test_what_must_not_be_lost_refuses_when_full_and_remembers_ids_for_long() -> None:
    specs = streams(BusConfig(samples_bytes=123))
    for name in ("samples", "ledger", "dead", "tasks", "grading"):
        assert specs[name].full == "refuse" and specs[name].dedupe_s >= 1800
    assert specs["samples"].max_bytes == 123
    assert [spec.name for spec in specs.values() if spec.queue] == ["tasks", "grading"]


def test_streams_of_two_runs_never_share_a_name_or_a_subject() -> None:
    names: set[str] = set()
    subjects: set[str] = set()
    for run in ("a", "a-samples", "samples", "a_b"):
        for config in admin.all_configs(Topology.of(run, BusConfig()), BusConfig()):
            assert config["name"] not in names and not subjects & set(config["subjects"])
            names.add(config["name"])
            subjects.update(config["subjects"])


def test_a_run_id_that_is_no_subject_token_is_refused() -> None:
    for run in ("", "a.b", "a b", "a*"):
        with pytest.raises(SchemaError):
            Topology.of(run, BusConfig())


@pytest.mark.process
def test_importing_the_bus_loads_no_client_and_no_torch() -> None:
    check = "import sys, streamrl.bus, streamrl.bus.memory, streamrl.bus.server; print([m for m in ('nats', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, text=True).stdout.strip() == "[]"
