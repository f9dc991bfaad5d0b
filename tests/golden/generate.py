"""The records whose bytes are kept here, and the script that writes them: `python -m tests.golden.generate`.

A golden file is never rewritten once released: when a schema grows, old bytes must still be read. Running the script only adds
files that are missing; `--force NAME` replaces one, for a new major version of the schema.
"""

import sys
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from streamrl.schemas import control, weights
from streamrl.schemas.blobs import BlobRef
from streamrl.schemas.codec import encode
from streamrl.schemas.dead import DeadRecord
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.events import Event, MetricReport
from streamrl.schemas.images import Image
from streamrl.schemas.ledger import Choices, Drop, Gap, LedgerEntry, SourceTally, SpilledDrops, TrainedOn, Used
from streamrl.schemas.samples import EpochMark, Mark, RewardUpdate, Tombstone
from streamrl.schemas.tasks import Refused, RolloutTask, Sampling
from streamrl.schemas.versions import Version
from tests.support.golden_rows import SAMPLING, agents_samples, claimed_samples, graded_samples, image_samples, sampled_samples, samples

FOLDER = Path(__file__).parent


VERSION, EPOCH_2 = Version(1, 17), Version(2, 18)
PART = weights.PartRef("blob/17/0", 0, 48, "ef" * 32)
DIGEST, WORDS, LAYOUT = "d1430de7c9a85298", "0123456789abcdef", "847822ab7c2d7e8c"
LOGITS = weights.TensorSpec("logits", "float32", (3, 4), 0, 48, DIGEST)
ONE = (Used(40, (0,), (100,)),)
ENGINE = {"engine": "engine-0", "address": "http://127.0.0.1:1", "serving": VERSION, "slots": 8}
LATEST = ("main", VERSION, "checkpoints/main-v00000017-e1", 104, 99, "identity")


def task(**values: Any) -> RolloutTask:
    return RolloutTask(run="golden", index=41, source="main", **values)


def entry(**values: Any) -> LedgerEntry:
    given = {"version": VERSION, "source": "main", "used": ONE, "cursor": 104, "granted": 68, "retired": 36} | values
    return LedgerEntry(run="golden", trainer="main", **given)


def manifest(**values: Any) -> weights.Manifest:
    given = {"transport": "ipc", "tensors": (replace(LOGITS, words=WORDS),)} | values
    return weights.Manifest(run="golden", policy="policy", version=VERSION, parts=(PART,), digest=LAYOUT, nbytes=48, **given)


TASKS = {
    "task": task(
        row=7,
        data_epoch=2,
        prompt_ids=(5, 6),
        prompt=[{"role": "user", "content": "6*7?"}],
        label="42",
        tools=[{"name": "calculator"}],
        metadata={"level": 3},
        num_rollouts=3,
        sampling=Sampling(max_new_tokens=9),
        min_version=15,
        seed=123456789,
    ),
    "task-sampling": task(prompt_ids=(5, 6), sampling=SAMPLING),
    "task-images": task(image_blob=BlobRef(f"0-63/{'cd' * 32}", "cd" * 32, 0, 1), image_rows=(Image("ab" * 32, "image/png", 67),)),
    "task-refused": task(refused=Refused("row_broken", "line 3")),
    "task-epoch": task(min_version=17, min_epoch=2),
    "task-greedy": task(prompt_ids=(5, 6), num_rollouts=2, greedy_baseline=True),
}
ENDS = {
    "tombstone": Tombstone(task=41, reason="failed", rollout=1, group_size=3, detail="tool timed out", source="main"),
    "tombstone-claimed": Tombstone(
        task=41, reason="timeout", group_size=3, source="main", producer="producer-1", issued_s=10.5, claimed_s=11.5, deliveries=3
    ),
    "tombstone-grading": Tombstone(task=41, reason="timeout", rollout=1, group_size=3, source="main", grading=1 << 40),
    "reward": RewardUpdate(task=41, rollout=2, reward=0.5, revision=2, reward_parts={"answer": 0.5}),
    "reward-agent": RewardUpdate(task=41, rollout=2, reward=0.5, revision=2, reward_parts={"answer": 0.5}, agent="solver/0"),
    "reward-grading": RewardUpdate(task=41, rollout=2, reward=0.5, grading=1 << 40),
    "mark": Mark(name="resume", detail={"version": "1.17"}),
    "epoch": EpochMark(1, 13, 15),
    "dead": DeadRecord(stream="samples", sequence=102, subject="golden.samples.main", reason="no Arrow data", body=b"\x00\xff"),
}
LEDGER = {
    "ledger": entry(
        used=(Used(40, (0, 1), (100, 103)), Used(41, (0, 2), (101, 101))),
        drops=(Drop(99, 39, (0, 1), "stale", retires=True), Drop(102, -1, (), "poison", "no Arrow data")),
        seed=99,
        fingerprint="00112233445566ff",
        digest=DIGEST,
        warm=True,
        staleness=(1, 0),
        num_samples=4,
        num_tokens=31,
        metrics={"train/loss": 0.25},
        fence=3,
        time_s=1.5,
    ),
    "ledger_spilled": entry(
        used=(), spilled=SpilledDrops(blob="ledger/main/1-17/4", sha256="cd" * 32, number=90_000, reasons={"late": 90_001})
    ),
    "ledger_decided": entry(source="warmup", warm=True, metrics={"train/answer_probability": 0.75}, score=0.75, reward=0.25),
    "ledger_cursor": entry(cursor_s=1_700_000_000.25),
    "ledger_lengths": entry(histograms={"lengths/trained": (0, 0, 2), "lengths/dropped": (1,)}),
    "ledger_sources": entry(sources={"sums": SourceTally(3, 0.5), "words": SourceTally(1)}),
    "ledger_reference": entry(digest=DIGEST, reference="98529adc9e7d0341"),
    "ledger_budget": entry(micro_tokens=8192),
    "ledger_trained_on": entry(
        version=EPOCH_2, used=(), cursor=10, granted=8, retired=2, trained_on=TrainedOn(ranks=4, shards=2, gather="step")
    ),
    "ledger_context": entry(
        version=Version(2, 19), used=(), cursor=10, granted=8, retired=2, trained_on=TrainedOn(ranks=4, shards=2, context=2)
    ),
    "ledger_choices": entry(
        version=EPOCH_2,
        source="tasks",
        micro_tokens=8192,
        choices=Choices(attention="packed", compiled=True, kept_layers=12, row_length=8192),
    ),
    "ledger_gap": entry(
        version=Version(2, 17),
        source="",
        used=(),
        fence=4,
        gap=Gap(lost="end", missing=((18, 20),), highest=Version(1, 20), known_by="manifest"),
    ),
    "ledger_gap_first": entry(
        version=Version(2, 17),
        source="",
        used=(),
        fence=4,
        gap=Gap(lost="samples", missing=(), highest=Version(1, 20), known_by="ledger", first=17),
    ),
}
WEIGHTS = {
    "manifest": manifest(tensors=(LOGITS,), transport="shm", mirrors={"bus": (PART,)}, host="host-1", published_s=2.5),
    "manifest-delta": manifest(
        kind="delta",
        parent=Version(1, 16),
        tensors=(LOGITS,),
        transport="bus",
        links={
            "bus": (
                weights.Link(version=Version(1, 16), parts=(PART,), pieces=(weights.Piece(0, 24, 24), weights.Piece(64, 0, 24))),
                weights.Link(version=VERSION, parent=Version(1, 16), parts=(PART,)),
            )
        },
    ),
    "manifest-words": manifest(),
    "manifest-copying": replace(manifest(), parts=(replace(PART, sha256="", handle=b"\x01", copying=weights.Copying(7, 48, (32, 48))),)),
    "wanted-slices": weights.WantedSlices(WORDS, VERSION),
    "stored-slices": weights.StoredSlices(
        WORDS,
        VERSION,
        contributions={
            "shm": weights.Contribution(
                run="golden",
                policy="policy",
                version=VERSION,
                slices=(
                    weights.TensorSlice("logits", "float32", (3, 4), 8, 4, DIGEST),
                    weights.TensorSlice("w", "float32", (4, 4), 8, 8, DIGEST, words=WORDS),
                ),
                links=(weights.Link(version=VERSION, parts=(PART,)),),
                transport="shm",
                host="host-1",
            )
        },
    ),
    "stored-slices-failed": weights.StoredSlices(WORDS, VERSION, error="no room"),
}
KEYS = {
    "data": control.DataRecord(rows=9, digest="ab"),
    "mixture": control.MixtureRecord(
        sources=("sums", "words"), segments=(control.MixtureSegment(first=64, version=3, weights=(3.0, 1.0), places=(48, 16)),)
    ),
    "grant": control.Grant(68, 17, 36, None),
    "grant-open": control.Grant(68, 17, 36, None, 37),
    "grant-epoch": control.Grant(68, 17, 36, None, 37, 2),
    "end": control.RunEnd(version=VERSION, steps=17, limit="max_seconds", fence=4),
    "budget": control.MicroBudget(16384, 8192),
    "budget-failed": control.MicroBudget(16384, 8192, 17),
    "position": control.Position("main", "samples", 99, VERSION),
    "latest": control.Latest(*LATEST),
    "latest_kept": control.Latest(
        *LATEST, (42,), (control.Latest("main", Version(1, 12), "checkpoints/main-v00000012-e1", 80, 71, "identity"),)
    ),
    "run": control.RunRecord(
        run="golden", config="{}", dataset_digest="ab", num_rows=9, code_version="0.1.0", fingerprint={"torch": "2.11"}, created_s=3.5
    ),
}
TOLD = {
    "engine": control.EnginePresence(**ENGINE, running=3, waiting=4),
    "engine-degraded": control.EnginePresence(**ENGINE, max_len=4096, degraded="every update pauses it"),
    "worker": control.WorkerPresence(worker="feeder-0", kind="feeder", pid=12, host="host-1", detail={"issued": 41}),
    "worker-since": control.WorkerPresence(
        worker="trainer-0", kind="trainer", state="waits for samples: 3 groups", pid=12, host="host-1", since_s=1234.5
    ),
    "event": Event(kind="swap", worker="engine-0", detail={"ms": 0.5}, time_s=4.5),
    "metrics-lengths": MetricReport(worker="producer-0", sum={"b": 2.0}, histograms={"lengths/finished": (0, 3, 1)}, time_s=5.5),
    "metrics": MetricReport(worker="engine-0", mean={"a": 1.0}, sum={"b": 2.0}, max={"c": 3.0}, last={"d": 4.0}, time_s=5.5),
    "metrics-left": MetricReport(worker="producer-2", sum={"producer/slot_generate_s": 2.0}, time_s=6.5, left=True),
    "metrics-tasks": MetricReport(worker="producer-0", sum={"producer/tasks_total": 2.0}, time_s=5.5, tasks=(7, 11)),
}


SAMPLES = {
    "samples-2": samples,
    "samples-2-claimed": claimed_samples,
    "samples-2-sampling": sampled_samples,
    "samples-2-agents": agents_samples,
    "samples-2-grading": graded_samples,
    "samples-2-images": image_samples,
}


def records() -> dict[str, Any]:
    """One of each struct that is put on the bus or kept under a key, by file name."""
    return TASKS | ENDS | LEDGER | WEIGHTS | KEYS | TOLD


def main(arguments: list[str]) -> None:
    files = {name: encode(record) for name, record in records().items()}
    files |= {name: encode_samples(make()) for name, make in SAMPLES.items()}
    for name, data in files.items():
        path = FOLDER / f"{name}.bin"
        if not path.exists() or arguments == ["--force", name]:
            path.write_bytes(data)
            sys.stdout.write(f"{path.name}: {len(data)} bytes\n")


if __name__ == "__main__":
    main(sys.argv[1:])
