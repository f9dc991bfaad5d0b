"""The rest of a run against its ledger: tasks, grants, weights, checkpoints, positions, the shape of the streams."""

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from tests.support.audit.books import Books
from tests.support.audit.msgpack import unpack
from tests.support.audit.raw import Raw, Stored
from tests.support.audit.stream import read_message

VersionKey = tuple[int, int]


def version_of(record: dict[str, Any]) -> VersionKey:
    """(epoch, number) of a record's version."""
    return record["version"]["epoch"], record["version"]["number"]


@dataclass(frozen=True)
class Entry:
    """A ledger entry with its place on the stream."""

    stored: Stored
    body: dict[str, Any]

    @property
    def version(self) -> VersionKey:
        return version_of(self.body)


@dataclass
class Promises:
    """Checks that need more than the ledger and the samples."""

    raw: Raw
    trainer: str
    entries: list[Entry]
    """In stream order, all epochs."""
    problems: list[str] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)
    """Numbers of versions that the run goes on from although their entries are lost, as its gaps say."""

    granted: int = 0
    """Most tasks that were granted before one of its gaps."""

    def _say(self, text: str) -> None:
        self.problems.append(text)

    def _key(self, key: str) -> tuple[dict[str, Any], int] | None:
        stored = self.raw.keys.get(key)
        return None if stored is None else (unpack(stored.body), stored.sequence)

    def _later(self, key: str) -> tuple[dict[str, Any], int] | None:
        stored = self.raw.later.get(key)
        return None if stored is None else (unpack(stored.body), stored.sequence)

    def chain(self) -> list[dict[str, Any]]:
        """One entry a version number, the newest epoch's; checks the order in which they were written."""
        newest: dict[int, dict[str, Any]] = {}
        fence = 0
        for entry in self.entries:
            epoch, number = entry.version
            sequence = entry.stored.sequence
            if "gap" in entry.body:
                newest = {other: body for other, body in newest.items() if other <= number}
                self.granted = max(self.granted, entry.body["granted"])
                self.missing = {one for one in self.missing if one <= number}
                self.missing |= {one for first, last in entry.body["gap"]["missing"] for one in range(first, min(last, number) + 1)}
                continue
            if entry.body["fence"] < fence:
                self._say(f"ledger sequence {sequence}: fence {entry.body['fence']} after fence {fence}")
            fence = max(fence, entry.body["fence"])
            before = newest.get(number)
            if before is not None and before["version"]["epoch"] >= epoch:
                self._say(f"ledger sequence {sequence}: version {epoch}.{number} after version {version_of(before)[0]}.{number}")
            if before is not None and before["used"] != entry.body["used"]:
                self._say(f"ledger sequence {sequence}: version {epoch}.{number} was trained from other groups than in the epoch before")
            if number > 1 and number - 1 not in newest and number - 1 not in self.missing:
                self._say(f"ledger sequence {sequence}: version {epoch}.{number} before any version {number - 1}")
            newest[number] = entry.body
        chain = [newest[number] for number in sorted(newest)]
        self.missing -= set(newest)
        for a, b in itertools.pairwise(chain):
            if b["cursor"] < a["cursor"]:
                self._say(f"version {b['version']['number']}: cursor {b['cursor']} after cursor {a['cursor']}")
        if chain and chain[0]["version"]["number"] != 1 and 1 not in self.missing:
            self._say(f"the ledger begins with version {chain[0]['version']['number']}")
        return chain

    def streams(self) -> None:
        """No holes but for a trimmed prefix; nothing drops its oldest messages by itself."""
        for name, stream in (("samples", self.raw.samples), ("ledger", self.raw.ledger)):
            there = {message.sequence for message in stream.messages}
            holes = [sequence for sequence in range(stream.first, stream.last + 1) if sequence not in there]
            if holes:
                self._say(
                    f"stream {name}: {len(holes)} messages are missing between {stream.first} and {stream.last}, the first is {holes[0]}"
                )
            if stream.discard != "new" and name == "samples":
                self._say(f"stream {name}: it discards {stream.discard} messages when it is full, expected new ones")
        if self.raw.ledger.first != 1:
            self._say(f"stream ledger: it begins at sequence {self.raw.ledger.first}")

    def readers(self, books: Books) -> None:
        """Positions stay behind checkpoints, and the stream behind positions."""
        first = self.raw.samples.first
        for key, stored in self.raw.later.items():
            needed = unpack(stored.body)["oldest_needed"] if key.startswith("positions/") else first
            if needed < first:
                self._say(f"{key} needs sequence {needed}, the sample stream begins at {first}")
        latest, position = self._later(f"latest/{self.trainer}"), self._later(f"positions/{self.trainer}")
        if position and not latest and (position[0]["oldest_needed"] > 1 or version_of(position[0])[1] > 0):
            self._say(f"the position moved to {position[0]['oldest_needed']} without a checkpoint")
        if first > 1 and not latest:
            self._say(f"the sample stream begins at {first}, but there is no checkpoint")
        if latest and position:
            ahead = position[0]["oldest_needed"] > latest[0]["oldest_needed"] or version_of(position[0]) > version_of(latest[0])
            same = version_of(position[0]) == version_of(latest[0]) and position[0]["oldest_needed"] == latest[0]["oldest_needed"]
            if ahead or (same and position[1] < latest[1]):
                self._say(f"the position {_place(position)} moved before the checkpoint {_place(latest)}")
            kept = [latest[0], *(latest[0].get("older") or ())]
            named = version_of(position[0]) in {version_of(one) for one in kept}  # else it is that of a newer checkpoint
            if named and position[1] > latest[1] and position[0]["oldest_needed"] > min(one["oldest_needed"] for one in kept):
                self._say(f"the position {_place(position)} is above what the oldest of {len(kept)} kept checkpoints needs")
        number = latest[0]["version"]["number"] if latest else 0
        carried = set(latest[0]["carried"]) if latest else set()
        for entry in books.after(number):
            lost = [sequence for group in entry["used"] for sequence in group["sequences"] if sequence < first and sequence not in carried]
            if lost:
                self._say(f"a restart from version {number} needs sequence {min(lost)}, the sample stream begins at {first}")
        before = self._key(f"latest/{self.trainer}")
        if before:
            self._checkpoint(books, before[0])

    def _checkpoint(self, books: Books, latest: dict[str, Any]) -> None:
        number = latest["version"]["number"]
        last = max([0, *self.missing, *(entry["version"]["number"] for entry in books.chain)])
        if number > last:
            return self._say(f"the checkpoint is of version {number}, the ledger ends at {last}")
        own = next((entry for entry in books.chain if entry["version"]["number"] == number), None)
        if own is not None and latest["cursor"] < own["cursor"]:
            self._say(f"the checkpoint of version {number} has read to {latest['cursor']}, its entry to {own['cursor']}")
        if not 1 <= latest["oldest_needed"] <= latest["cursor"] + 1:
            self._say(f"the checkpoint of version {number} needs sequence {latest['oldest_needed']} and has read to {latest['cursor']}")
        open_later = [
            sequence
            for entry in books.after(number)
            for group in entry["used"]
            for sequence in group["sequences"]
            if sequence <= latest["cursor"] and sequence not in latest["carried"]
        ]
        if open_later and min(open_later) < latest["oldest_needed"]:
            self._say(
                f"the checkpoint of version {number} says it needs nothing before {latest['oldest_needed']}, "
                f"but sequence {min(open_later)} is trained later"
            )

    def weights(self) -> None:
        """Every version on offer has its entry, was written down first, and has the entry's digest."""
        known = {entry.version: entry for entry in self.entries if "gap" not in entry.body}
        begun = self._begun()
        gaps = [(entry.version[0], version_of({"version": entry.body["gap"]["highest"]})) for entry in self.entries if "gap" in entry.body]
        for stored in self.raw.weights.messages:
            manifest = unpack(stored.body)
            version = version_of(manifest)
            if version == (0, 0):
                continue
            if version in begun:
                if begun[version] not in ("", manifest["digest"]):
                    self._say(f"version {version[0]}.{version[1]} begins an epoch with other weights than the one it goes on from")
                continue
            if version not in known and any(version[0] < epoch and version[1] <= highest[1] for epoch, highest in gaps):
                continue  # said with the gap
            entry = known.get(version)
            name = f"{version[0]}.{version[1]}"
            if entry is None:
                self._say(f"version {name} was published, but is not in the ledger")
            elif entry.body["digest"] != manifest["digest"]:
                self._say(f"version {name} was published with digest {manifest['digest']}, the ledger has {entry.body['digest']}")
            elif stored.time_s < entry.stored.time_s:
                self._say(f"version {name} was published {entry.stored.time_s - stored.time_s:.6f} s before its ledger entry")

    def _begun(self) -> dict[tuple[int, int], str]:
        """Versions that begin an epoch after a gap, with the digest that their number had before; empty: it is not in the ledger."""
        digests: dict[int, str] = {}
        found: dict[tuple[int, int], str] = {}
        for entry in self.entries:
            epoch, number = entry.version
            if "gap" not in entry.body:
                digests[number] = entry.body["digest"]
            elif "first" in entry.body["gap"]:
                digests = {other: digest for other, digest in digests.items() if other <= number}
                found[epoch, number] = digests.get(number, "")
        return found

    def tasks(self, books: Books) -> None:
        """Every issued task has ended, is in the queue, or is all there on the stream; credits add up."""
        queued = {message.sequence - 1 for message in self.raw.tasks.messages}
        issued = self.raw.tasks.last
        there = self._complete(books)
        for task in range(issued):
            if task not in books.ended and task not in queued and task not in there:
                self._say(f"task {task} is lost: it has not ended, is not in the queue, and not all of its rollouts are on the stream")
        for task, how in books.ended.items():
            if how.startswith("dropped as lost "):
                self._say(f"task {task} is lost: nobody held it, and not all of its rollouts are on the stream; it was {how}")
            if task >= issued:
                self._say(f"task {task} {books.ended[task]}, but only {issued} tasks were issued")
        grant = self._key("granted")
        if grant is None:
            return self._say("no grant was ever given") if issued else None
        granted = grant[0]["granted"]
        if issued > granted:
            self._say(f"{issued} tasks were issued, {granted} were granted")
        most = len(there | set(books.ended)) + (books.settings.s + 1) * books.settings.b
        if granted > most:
            self._say(f"{granted} tasks were granted; by what has ended at most {most} could be")
        if books.chain and granted < books.chain[-1]["granted"] and len(self.entries) > 1 and granted < books.chain[-2]["granted"]:
            self._say(f"{granted} tasks are granted, the ledger had granted {books.chain[-2]['granted']} one version ago")

    def _complete(self, books: Books) -> set[int]:
        """Tasks with nothing more to come."""
        seen: dict[int, set[int]] = defaultdict(set)
        sizes: dict[int, int] = {}
        found = set()
        for message in (*books.messages.values(), *(read_message(stored) for stored in self.raw.carried)):
            if message.task is None or message.task >= self.raw.tasks.last:
                continue
            if message.ends_task:
                found.add(message.task)
            seen[message.task].update(message.rollouts)
            if message.ended is not None:
                seen[message.task].add(message.ended)
            if message.group_size:
                sizes[message.task] = message.group_size
        for entry in books.chain:
            for drop in entry["drops"]:
                seen[drop["task"]].update(drop["rollouts"])
        return found | {task for task, size in sizes.items() if len(seen[task]) >= size}

    def dead(self, books: Books) -> None:
        """Every message that was dropped as poison is kept for the operator."""
        kept = {unpack(stored.body)["sequence"] for stored in self.raw.dead.messages}
        for entry in books.chain:
            for drop in entry["drops"]:
                if drop["reason"] == "poison" and not drop["rollouts"] and drop["sequence"] not in kept:
                    self._say(f"sequence {drop['sequence']} was dropped as poison, but is not among the dead letters")


def _place(key: tuple[dict[str, Any], int]) -> str:
    record, revision = key
    return f"(version {record['version']['number']}, sequence {record['oldest_needed']}, revision {revision})"
