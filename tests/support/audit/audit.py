"""Prove from a run's raw streams that its promises held.

    python tests/support/audit/audit.py --url nats://... --user U --password P --run RUN

Independent of the product: it uses nats-py and pyarrow and imports nothing of streamrl. It reads and never writes; a run may go on
meanwhile.
"""

import argparse
import asyncio
import hashlib
import json
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the folder above `tests` is not on the path
    sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.support.audit.books import Books, Settings
from tests.support.audit.msgpack import unpack
from tests.support.audit.promises import Entry, Promises
from tests.support.audit.raw import Raw, Stored, read_run
from tests.support.audit.stream import read_message


@dataclass
class Report:
    """The result of an audit. `problems` are sentences with numbers; if there are none, every promise held."""

    problems: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.problems


async def audit(url: str, user: str, password: str, run: str, *, complete: bool = False, directory: Path | None = None) -> Report:
    """Read a run's streams and check them."""
    return examine(await read_run(url, user, password, run, directory), complete=complete)


def examine(raw: Raw, *, complete: bool = False) -> Report:
    record = raw.keys.get("run")
    if record is None:
        return Report(["the run has no record under the key `run`"])
    config = json.loads(unpack(record.body)["config"])
    tasks = config["tasks"]
    settings = Settings(
        b=tasks["batch_tasks"], s=tasks["max_staleness"], stale=tasks["stale"], greedy=config["loss"]["advantage"] == "remax"
    )
    trainer = config["trainer"]["name"]
    subject = f"{raw.run}.ledger.{trainer}"
    problems: list[str] = []
    entries = [Entry(stored, _entry(stored, raw.blobs, problems)) for stored in raw.ledger.messages if stored.subject == subject]
    problems += [_gap(entry) for entry in entries if "gap" in entry.body]
    promises = Promises(raw, trainer, entries)
    messages = {stored.sequence: read_message(stored) for stored in raw.samples.messages}
    chain = promises.chain()
    books = Books(settings, messages, raw.samples.first, chain, promises.missing, promises.granted)
    books.check()
    promises.streams()
    promises.readers(books)
    promises.weights()
    promises.tasks(books)
    promises.dead(books)
    problems += promises.problems + books.problems
    if complete:
        steps = len(books.missing) + sum(entry["source"] != "warmup" for entry in books.chain)
        if steps < config["run"]["steps"]:
            problems.append(f"the run ended after {steps} of {config['run']['steps']} steps")
    counts = {
        "versions": len(books.chain),
        "epochs": len({entry.version[0] for entry in entries}),
        "fences": len({entry.body["fence"] for entry in entries}),
        "messages": len(messages),
        "issued": raw.tasks.last,
        "trained": len(books.trained),
        "dropped": len(books.ended) - len(books.trained),
        "drops": sum(len(entry["drops"]) for entry in books.chain),
        "oldest": max((max(entry["staleness"], default=0) for entry in books.chain), default=0),
    }
    return Report(problems, counts)


def _gap(entry: Entry) -> str:
    """An accepted loss is a loss all the same."""
    gap, (epoch, number) = entry.body["gap"], entry.version
    highest = f"{gap['highest']['epoch']}.{gap['highest']['number']}"
    return (
        f"ledger sequence {entry.stored.sequence}: {epoch}.{number} goes on after a gap ({gap['lost']}): versions up to {highest} were lost"
    )


def _entry(stored: Stored, blobs: dict[str, bytes], problems: list[str]) -> dict[str, Any]:
    """A ledger entry with its drops, which may be in a blob."""
    entry = unpack(stored.body)
    spilled = entry.get("spilled")
    if spilled is None:
        return entry
    where = f"ledger sequence {stored.sequence}: blob {spilled['blob']}"
    body = blobs.get(spilled["blob"])
    if body is None:
        problems.append(f"{where} is not there")
        return entry
    if hashlib.sha256(body).hexdigest() != spilled["sha256"]:
        problems.append(f"{where} has not the digest that the entry says")
        return entry
    drops = unpack(zlib.decompress(body))
    if len(drops) != spilled["number"] or entry["drops"]:
        problems.append(f"{where} has {len(drops)} drops and the entry {len(entry['drops'])}, expected {spilled['number']} and 0")
    return entry | {"drops": drops}


def main() -> int:
    parser = argparse.ArgumentParser(description="Audit a run from its raw streams.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--user", default="")
    parser.add_argument("--password", default="")
    parser.add_argument("--run", required=True)
    parser.add_argument("--complete", action="store_true", help="the run has ended: it must have trained all its steps")
    parser.add_argument("--directory", type=Path, help="the run's, whose checkpoints may carry messages of a stream that was full")
    given = parser.parse_args()
    found = audit(given.url, given.user, given.password, given.run, complete=given.complete, directory=given.directory)
    report = asyncio.run(found)
    sys.stdout.write("".join(f"{name}: {count}\n" for name, count in report.counts.items()))
    sys.stdout.write("".join(f"problem: {problem}\n" for problem in report.problems))
    sys.stdout.write("every promise held\n" if report.ok else f"{len(report.problems)} problems\n")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
