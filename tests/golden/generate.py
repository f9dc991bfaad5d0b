"""The records whose bytes are kept here, and the script that writes them: `python -m tests.golden.generate`.

A golden file is never rewritten once released: when a schema grows, old bytes must still be read. Running the script only adds
files that are missing; `--force NAME` replaces one, for a new major version of the schema.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from streamrl.schemas.blobs import BlobRef
from streamrl.schemas.codec import encode
from streamrl.schemas.control import (
    DataRecord,
    EnginePresence,
    Grant,
    Latest,
    MicroBudget,
    MixtureRecord,
    MixtureSegment,
    Position,
    RunRecord,
    WorkerPresence,
)
from streamrl.schemas.dead import DeadRecord
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.events import Event, MetricReport
from streamrl.schemas.images import Image
from streamrl.schemas.ledger import Choices, Drop, Gap, LedgerEntry, SourceTally, SpilledDrops, TrainedOn, Used
from streamrl.schemas.samples import (
    EpochMark,
    Mark,
    RewardUpdate,
    Sample,
    Tombstone,
)
from streamrl.schemas.tasks import Refused, RolloutTask, Sampling
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import (
    Contribution,
    Copying,
    Link,
    Manifest,
    PartRef,
    Piece,
    StoredSlices,
    TensorSlice,
    TensorSpec,
    WantedSlices,
)
from tests.support.golden_rows import SAMPLING, agents_samples, claimed_samples, graded_samples, image_samples, sampled_samples, samples

FOLDER = Path(__file__).parent


VERSION = Version(1, 17)
PART = PartRef("blob/17/0", 0, 48, "ef" * 32)
LOGITS = TensorSpec("logits", "float32", (3, 4), 0, 48, "d1430de7c9a85298")
TASK = RolloutTask(run="golden", index=41, source="main")
TOMBSTONE = Tombstone(task=41, reason="timeout", group_size=3, source="main")
REWARD = RewardUpdate(task=41, rollout=2, reward=0.5)
ENTRY = LedgerEntry(
    run="golden",
    trainer="main",
    version=VERSION,
    source="main",
    used=(Used(40, (0,), (100,)),),
    cursor=104,
    granted=68,
    retired=36,
)
SHARDED = replace(
    ENTRY, version=Version(2, 18), used=(), cursor=10, granted=8, retired=2, trained_on=TrainedOn(ranks=4, shards=2, gather="step")
)
MANIFEST = Manifest(
    run="golden",
    policy="policy",
    version=VERSION,
    tensors=(LOGITS,),
    parts=(PART,),
    transport="shm",
    digest="847822ab7c2d7e8c",
    nbytes=48,
)
WORDS = replace(MANIFEST, tensors=(replace(LOGITS, words="0123456789abcdef"),), transport="ipc")
ENGINE = EnginePresence(engine="engine-0", address="http://127.0.0.1:1", serving=VERSION, slots=8)
LATEST = Latest("main", VERSION, "checkpoints/main-v00000017-e1", 104, 99, "identity")
PRODUCER = MetricReport(worker="producer-0", sum={"b": 2.0}, time_s=5.5)

CHANGES: tuple[tuple[Struct, dict[str, dict[str, Any]]], ...] = (
    (
        TASK,
        {
            "task": {
                "row": 7,
                "data_epoch": 2,
                "prompt_ids": (5, 6),
                "prompt": [{"role": "user", "content": "6*7?"}],
                "label": "42",
                "tools": [{"name": "calculator"}],
                "metadata": {"level": 3},
                "num_rollouts": 3,
                "sampling": Sampling(max_new_tokens=9),
                "min_version": 15,
                "seed": 123456789,
            },
            "task-sampling": {"prompt_ids": (5, 6), "sampling": SAMPLING},
            "task-images": {
                "image_blob": BlobRef(f"0-63/{'cd' * 32}", "cd" * 32, 0, 1),
                "image_rows": (Image("ab" * 32, "image/png", 67),),
            },
            "task-refused": {"refused": Refused("row_broken", "line 3")},
            "task-greedy": {"prompt_ids": (5, 6), "num_rollouts": 2, "greedy_baseline": True},
        },
    ),
    (
        TOMBSTONE,
        {
            "tombstone": {"reason": "failed", "rollout": 1, "detail": "tool timed out"},
            "tombstone-claimed": {"producer": "producer-1", "issued_s": 10.5, "claimed_s": 11.5, "deliveries": 3},
            "tombstone-grading": {"rollout": 1, "grading": 1 << 40},
        },
    ),
    (
        REWARD,
        {
            "reward": {"revision": 2, "reward_parts": {"answer": 0.5}},
            "reward-agent": {"revision": 2, "reward_parts": {"answer": 0.5}, "agent": "solver/0"},
            "reward-grading": {"grading": 1 << 40},
        },
    ),
    (
        ENTRY,
        {
            "ledger": {
                "used": (Used(40, (0, 1), (100, 103)), Used(41, (0, 2), (101, 101))),
                "drops": (Drop(99, 39, (0, 1), "stale", retires=True), Drop(102, -1, (), "poison", "no Arrow data")),
                "seed": 99,
                "fingerprint": "00112233445566ff",
                "digest": "d1430de7c9a85298",
                "warm": True,
                "staleness": (1, 0),
                "num_samples": 4,
                "num_tokens": 31,
                "metrics": {"train/loss": 0.25},
                "fence": 3,
                "time_s": 1.5,
            },
            "ledger_spilled": {
                "used": (),
                "spilled": SpilledDrops(blob="ledger/main/1-17/4", sha256="cd" * 32, number=90_000, reasons={"late": 90_001}),
            },
            "ledger_decided": {
                "source": "warmup",
                "warm": True,
                "metrics": {"train/answer_probability": 0.75},
                "score": 0.75,
                "reward": 0.25,
            },
            "ledger_cursor": {"cursor_s": 1_700_000_000.25},
            "ledger_lengths": {"histograms": {"lengths/trained": (0, 0, 2), "lengths/dropped": (1,)}},
            "ledger_sources": {"sources": {"sums": SourceTally(3, 0.5), "words": SourceTally(1)}},
            "ledger_reference": {"digest": "d1430de7c9a85298", "reference": "98529adc9e7d0341"},
            "ledger_budget": {"micro_tokens": 8192},
            "ledger_choices": {
                "version": Version(2, 18),
                "source": "tasks",
                "micro_tokens": 8192,
                "choices": Choices(attention="packed", compiled=True, kept_layers=12, row_length=8192),
            },
            "ledger_gap": {
                "version": Version(2, 17),
                "source": "",
                "used": (),
                "fence": 4,
                "gap": Gap(lost="end", missing=((18, 20),), highest=Version(1, 20), known_by="manifest"),
            },
        },
    ),
    (
        SHARDED,
        {
            "ledger_trained_on": {},
            "ledger_context": {"version": Version(2, 19), "trained_on": TrainedOn(ranks=4, shards=2, context=2)},
        },
    ),
    (
        MANIFEST,
        {
            "manifest": {"mirrors": {"bus": (PART,)}, "host": "host-1", "published_s": 2.5},
            "manifest-delta": {
                "kind": "delta",
                "parent": Version(1, 16),
                "transport": "bus",
                "links": {
                    "bus": (
                        Link(version=Version(1, 16), parts=(PART,), pieces=(Piece(0, 24, 24), Piece(64, 0, 24))),
                        Link(version=VERSION, parent=Version(1, 16), parts=(PART,)),
                    )
                },
            },
        },
    ),
    (
        WORDS,
        {
            "manifest-words": {},
            "manifest-copying": {"parts": (replace(PART, sha256="", handle=b"\x01", copying=Copying(7, 48, (32, 48))),)},
        },
    ),
    (
        LATEST,
        {
            "latest": {},
            "latest_kept": {
                "carried": (42,),
                "older": (Latest("main", Version(1, 12), "checkpoints/main-v00000012-e1", 80, 71, "identity"),),
            },
        },
    ),
    (ENGINE, {"engine": {"running": 3, "waiting": 4}, "engine-degraded": {"max_len": 4096, "degraded": "every update pauses it"}}),
    (
        PRODUCER,
        {
            "metrics-lengths": {"histograms": {"lengths/finished": (0, 3, 1)}},
            "metrics-tasks": {"sum": {"producer/tasks_total": 2.0}, "tasks": (7, 11)},
        },
    ),
)
"""A record, and by file name what differs from it."""

SINGLE: dict[str, Struct] = {
    "mark": Mark(name="resume", detail={"version": "1.17"}),
    "epoch": EpochMark(1, 13, 15),
    "data": DataRecord(rows=9, digest="ab"),
    "mixture": MixtureRecord(
        sources=("sums", "words"), segments=(MixtureSegment(first=64, version=3, weights=(3.0, 1.0), places=(48, 16)),)
    ),
    "wanted-slices": WantedSlices("0123456789abcdef", VERSION),
    "stored-slices": StoredSlices(
        "0123456789abcdef",
        VERSION,
        contributions={
            "shm": Contribution(
                run="golden",
                policy="policy",
                version=VERSION,
                slices=(
                    TensorSlice("logits", "float32", (3, 4), 8, 4, "d1430de7c9a85298"),
                    TensorSlice("w", "float32", (4, 4), 8, 8, "d1430de7c9a85298", words="0123456789abcdef"),
                ),
                links=(Link(version=VERSION, parts=(PART,)),),
                transport="shm",
                host="host-1",
            )
        },
    ),
    "stored-slices-failed": StoredSlices("0123456789abcdef", VERSION, error="no room"),
    "grant": Grant(68, 17, 36, None),
    "grant-open": Grant(68, 17, 36, None, 37),
    "budget": MicroBudget(16384, 8192),
    "budget-failed": MicroBudget(16384, 8192, 17),
    "position": Position("main", "samples", 99, VERSION),
    "worker": WorkerPresence(worker="feeder-0", kind="feeder", pid=12, host="host-1", detail={"issued": 41}),
    "worker-since": WorkerPresence(
        worker="trainer-0", kind="trainer", state="waits for samples: 3 groups", pid=12, host="host-1", since_s=1234.5
    ),
    "run": RunRecord(
        run="golden",
        config="{}",
        dataset_digest="ab",
        num_rows=9,
        code_version="0.1.0",
        fingerprint={"torch": "2.11"},
        created_s=3.5,
    ),
    "event": Event(kind="swap", worker="engine-0", detail={"ms": 0.5}, time_s=4.5),
    "metrics": MetricReport(worker="engine-0", mean={"a": 1.0}, sum={"b": 2.0}, max={"c": 3.0}, last={"d": 4.0}, time_s=5.5),
    "metrics-left": MetricReport(worker="producer-2", sum={"producer/slot_generate_s": 2.0}, time_s=6.5, left=True),
    "dead": DeadRecord(stream="samples", sequence=102, subject="golden.samples.main", reason="no Arrow data", body=b"\x00\xff"),
}
"""Records that are like no other, by file name."""

SAMPLES: dict[str, Callable[[], list[Sample]]] = {
    "samples-2": samples,
    "samples-2-claimed": claimed_samples,
    "samples-2-sampling": sampled_samples,
    "samples-2-agents": agents_samples,
    "samples-2-grading": graded_samples,
    "samples-2-images": image_samples,
}


def records() -> dict[str, Any]:
    """One of each struct that is put on the bus or kept under a key, by file name."""
    return {name: replace(base, **fields) for base, table in CHANGES for name, fields in table.items()} | SINGLE


def main(arguments: list[str]) -> None:
    files = {name: encode(record) for name, record in records().items()}
    files |= {name: encode_samples(rows()) for name, rows in SAMPLES.items()}
    for name, data in files.items():
        path = FOLDER / f"{name}.bin"
        if not path.exists() or arguments == ["--force", name]:
            path.write_bytes(data)
            sys.stdout.write(f"{path.name}: {len(data)} bytes\n")


if __name__ == "__main__":
    main(sys.argv[1:])
