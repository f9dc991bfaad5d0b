"""A real run whose rows have images: user code is given them, samples name them, a recording has them and trains the same again."""

import asyncio
from pathlib import Path

import pytest

from streamrl.bus.protocol import Bus
from streamrl.data.tokenizer import load_tokenizer
from streamrl.history.inspect_again import task_of_samples
from streamrl.history.inspect_samples import sample_text, show
from streamrl.history.record import record
from streamrl.history.record_log import RecordedLog
from streamrl.history.replay import verify
from streamrl.history.source import Source
from streamrl.launch.prepare import prepare
from streamrl.runtime.run_record import write_or_check
from streamrl.schemas.codec import decode
from streamrl.schemas.images import StoredImages, image_of, window_named
from streamrl.schemas.subjects import SAMPLES
from tests.support.harness import make_run, read_ledger, run_to_end
from tests.support.images import GIF, png, write_rows
from tests.support.producing import samples_in
from tests.support.streams import stored
from tests.support.world.world import table_config

pytestmark = [pytest.mark.nats, pytest.mark.process]


async def test_from_a_row_to_a_recording(tmp_path: Path, nats_bus: Bus, run_id: str) -> None:
    config = table_config(tmp_path, run={"name": run_id, "steps": 8}, **write_rows(tmp_path))
    run, config = make_run(tmp_path, config)
    await write_or_check(nats_bus, await prepare(config, run))
    await run_to_end(config, run, nats_bus, timeout_s=60.0)
    ledger = await read_ledger(nats_bus, run_id)
    assert len(ledger) == 8 and "blob_missing" not in {drop.reason for entry in ledger for drop in entry.drops}
    rows = samples_in(await stored(nats_bus, SAMPLES))
    blobs = {name: decode(await nats_bus.sample_blobs.get(name), StoredImages).images for name in await nats_bus.sample_blobs.names()}
    for row in rows:
        assert row.images is not None and tuple(map(image_of, blobs[row.images.name])) == row.image_rows
        assert row.metadata["seen"] == [one.sha256 for one in row.image_rows], "what the function was given"
    given = set(blobs.values())
    assert (png(0),) in given and (png(105),) in given and (png(7), GIF) in given
    windows = [window_named(name) for name, images in blobs.items() if images == (png(0),)]
    assert len(windows) == len(set(windows)), "ten rows have it"

    two = next(row for row in rows if len(row.image_rows) == 2)
    shown = " ".join(sample_text(show(two, 1, load_tokenizer(run.model_dir).decode)).split())
    assert f"2 images: image/png of {two.image_rows[0].num_bytes} bytes, image/gif of {len(GIF)} bytes" in shown

    await record(nats_bus, config, run, tmp_path / "recording", run_record=None)
    await nats_bus.sample_blobs.delete(next(iter(blobs)))
    log = RecordedLog(tmp_path / "recording")
    assert {await log.sample_blobs.get(name) for name in blobs}
    assert len(list((tmp_path / "recording/sample_blobs").iterdir())) == len(given)
    name = next(name for name, images in blobs.items() if images == (png(0),)).rpartition("/")[2]
    assert decode((tmp_path / "recording/sample_blobs" / name).read_bytes(), StoredImages).images == (png(0),), "as docs/data.md has it"
    replay = await asyncio.wait_for(verify(config, log, run.model_dir), 60)
    assert replay.ok and replay.versions == 8, replay.lines
    live = await verify(config, nats_bus, run.model_dir)
    assert live.ok and live.versions == 8, "no image is needed to train the same again"

    facts = {"model_dir": run.model_dir, "checkpoints": tmp_path, "foreign": "", "record": None, "initial_digest": ""}
    source = Source(config=config, log=log, **facts)
    task, note = await task_of_samples(source, [two], load_tokenizer(run.model_dir))
    assert task.images == two.image_rows and not note
    for path in (tmp_path / "pics").iterdir():
        path.write_bytes(png(55))
    task, note = await task_of_samples(source, [two], load_tokenizer(run.model_dir))
    assert task.images == two.image_rows and "no row of" in note, "of the same name, another image"
