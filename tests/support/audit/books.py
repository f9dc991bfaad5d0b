"""The ledger against the sample stream: every rollout has one fate, every task one end, every age is as written."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from tests.support.audit.stream import Message, Rollout

_VAIN = ("dropped as duplicate ", "dropped as superseded_reward ", "dropped as late ")
"""Fates of a tombstone that has ended nothing."""
_REFUSED = {"inexact", "truncated", "too_short", "too_long", "repetitive"}
"""Reasons by which a rollout that came is left out of its group, which goes on without it."""


@dataclass(frozen=True)
class Settings:
    """Promises of the run's configuration. Letters: B groups a batch, S versions of staleness."""

    b: int
    s: int
    stale: str = "drop"
    greedy: bool = False
    """The last rollout of each task after the warm-up is greedy: others are compared with it, and it is never trained."""

    @property
    def bound(self) -> int:
        """Oldest age in versions that may be trained; under `wait` a backlog of S batches may form behind one that waited S versions."""
        return 2 * self.s if self.stale == "wait" else self.s


@dataclass
class Books:
    """The ledger's newest chain with the stream it was made from. Problems are collected, not raised."""

    settings: Settings
    messages: dict[int, Message]
    first: int
    """First sequence that the stream still has."""
    chain: list[dict[str, Any]]
    """One entry for each version number from 1 on, of the newest epoch that has it."""
    missing: set[int] = field(default_factory=set)
    """Numbers of versions whose entries are lost: what was decided with them is not known."""
    granted: int = 0
    """Tasks that had been granted before a gap, with entries that are lost: no grant is taken back."""
    problems: list[str] = field(default_factory=list)
    trained: dict[int, int] = field(default_factory=dict)
    """Task -> version number that trained it."""
    ended: dict[int, str] = field(default_factory=dict)
    """Task -> how it ended, by the ledger."""
    refused: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """Task -> (version whose entry says so, rollout) of what came and was left out by itself."""

    @property
    def cursor(self) -> int:
        """Last sequence that the ledger has decided on."""
        return self.chain[-1]["cursor"] if self.chain else 0

    def after(self, number: int) -> list[dict[str, Any]]:
        return [entry for entry in self.chain if entry["version"]["number"] > number]

    def _unknown(self) -> list[tuple[int, int]]:
        """Sequences that were decided on with entries that are lost: above the first of each pair, up to the second."""
        found: list[tuple[int, int]] = []
        before, cursor = 0, 0
        for entry in self.chain:
            number = entry["version"]["number"]
            if any(between in self.missing for between in range(before + 1, number)):
                found.append((cursor, entry["cursor"]))
            before, cursor = number, entry["cursor"]
        return found

    def check(self) -> None:
        """Everything that the ledger and the stream alone can show."""
        for entry in self.chain:
            for drop in entry["drops"]:
                if drop["reason"] in _REFUSED:
                    self.refused[drop["task"]] += [(entry["version"]["number"], rollout) for rollout in drop["rollouts"]]
        for entry in self.chain:
            self._entry(entry)
        self._ends()
        self._fates()
        self._counts()

    def _say(self, text: str) -> None:
        self.problems.append(text)

    def _entry(self, entry: dict[str, Any]) -> None:
        number, used = entry["version"]["number"], entry["used"]
        tasks = [group["task"] for group in used]
        if tasks != sorted(set(tasks)):
            self._say(f"version {number}: its groups are not sorted by task: {tasks}")
        if len(used) != self.settings.b and not self._last_of_warmup(entry):
            self._say(f"version {number}: expected {self.settings.b} groups, got {len(used)}")
        ages = entry.get("staleness", [])
        if len(ages) != len(used):
            return self._say(f"version {number}: expected {len(used)} ages, got {len(ages)}")
        rows = tokens = 0
        for group, age in zip(used, ages, strict=True):
            found = self._rollouts(number, group)
            if found is None:
                continue
            self._age(number, group["task"], found, age)
            if self.settings.greedy and entry["source"] != "warmup":
                found = self._without_greedy(number, group, found)
            rows += sum(rollout.rows for rollout in found)
            tokens += sum(rollout.tokens for rollout in found)
        if number > 0 and not any(self._trimmed(group) for group in used):
            for name, counted in (("num_samples", rows), ("num_tokens", tokens)):
                if entry[name] != counted:
                    self._say(f"version {number}: {name} is {entry[name]} in the ledger, the stream has {counted}")
        for drop in entry["drops"]:
            if drop["sequence"] > entry["cursor"]:
                self._say(f"version {number}: drops sequence {drop['sequence']} beyond its cursor {entry['cursor']}")
        self._stale(entry)

    def _last_of_warmup(self, entry: dict[str, Any]) -> bool:
        number = entry["version"]["number"]
        later = [other for other in self.chain if other["version"]["number"] > number]
        return entry["source"] == "warmup" and 0 < len(entry["used"]) < self.settings.b and all(o["source"] != "warmup" for o in later)

    def _trimmed(self, group: dict[str, Any]) -> bool:
        return any(sequence < self.first for sequence in group["sequences"])

    def _rollouts(self, number: int, group: dict[str, Any]) -> list[Rollout] | None:
        """The group's rollouts on the stream; None when some are trimmed or wrong."""
        task, found = group["task"], []
        if self._trimmed(group):
            return None
        for rollout, sequence in zip(group["rollouts"], group["sequences"], strict=True):
            message = self.messages.get(sequence)
            if message is None or message.task != task or rollout not in message.rollouts:
                self._say(f"version {number}: task {task} rollout {rollout} is not in the message at sequence {sequence}")
                return None
            found.append(message.rollouts[rollout])
        size = message.group_size
        gone = {m.ended for m in self.messages.values() if m.kind == "tombstones" and m.task == task and m.sequence <= self.cursor}
        gone |= {rollout for at, rollout in self.refused.get(task, ()) if at <= number}
        missing = set(range(size)) - set(group["rollouts"]) - gone
        if missing:
            self._say(f"version {number}: task {task} was trained without its rollouts {sorted(missing)}, which have not ended")
        return found

    def _without_greedy(self, number: int, group: dict[str, Any], found: list[Rollout]) -> list[Rollout]:
        *others, greedy = found
        size = self.messages[group["sequences"][-1]].group_size
        if group["rollouts"][-1] != size - 1 or greedy.oldest is not None or not any(one.oldest is not None for one in others):
            self._say(f"version {number}: task {group['task']} was trained without its greedy rollout {size - 1}, or that was, or nothing")
        return others

    def _age(self, number: int, task: int, rollouts: list[Rollout], written: int) -> None:
        source = number - 1
        highest = max(rollout.highest for rollout in rollouts)
        if highest > source:
            self._say(f"version {number}: task {task} has tokens of version {highest}, trained from version {source}")
        oldest = [rollout.oldest for rollout in rollouts if rollout.oldest is not None]
        newest = [rollout.newest for rollout in rollouts if rollout.newest is not None]
        age = source - min(oldest) if oldest else 0
        if age != written:
            self._say(f"version {number}: task {task} is {age} versions old by its spans, {written} by the ledger")
        counted = (source - max(newest) if newest else 0) if self.settings.stale == "mask" else age
        if counted > self.settings.bound:
            self._say(f"version {number}: task {task} was trained {counted} versions old, at most {self.settings.bound} are allowed")

    def _stale(self, entry: dict[str, Any]) -> None:
        """Check that drops with the reason `stale` were stale."""
        source = entry["version"]["number"] - 1
        found: dict[int, list[Rollout]] = defaultdict(list)
        for drop in entry["drops"]:
            message = self.messages.get(drop["sequence"])
            if drop["reason"] == "stale" and message is not None:
                found[drop["task"]] += [message.rollouts[k] for k in drop["rollouts"] if k in message.rollouts]
        for task, rollouts in found.items():
            oldest = [r.oldest for r in rollouts if r.oldest is not None]
            newest = [r.newest for r in rollouts if r.newest is not None]
            limit = max(newest, default=source) if self.settings.stale == "mask" else min(oldest, default=source)
            if source - limit <= self.settings.s:
                self._say(f"version {source + 1}: task {task} was dropped as stale at an age of {source - limit} versions")

    def _ends(self) -> None:
        for entry in self.chain:
            number = entry["version"]["number"]
            ends = [(drop["task"], f"dropped as {drop['reason']} before version {number}") for drop in entry["drops"] if drop["retires"]]
            ends += [(group["task"], f"trained into version {number}") for group in entry["used"]]
            self.trained.update({group["task"]: number for group in entry["used"]})
            for task, how in ends:
                if task in self.ended:
                    self._say(f"task {task} ended twice: {self.ended[task]}, then {how}")
                self.ended[task] = how

    def _fates(self) -> None:
        """Every rollout up to the cursor is in one entry, in one drop, or its task has not ended."""
        fates: dict[tuple[int, int], list[str]] = defaultdict(list)
        whole: dict[int, list[str]] = defaultdict(list)
        for entry in self.chain:
            number = entry["version"]["number"]
            for group in entry["used"]:
                for rollout, sequence in zip(group["rollouts"], group["sequences"], strict=True):
                    fates[sequence, rollout].append(f"trained into version {number}")
            for drop in entry["drops"]:
                for rollout in drop["rollouts"]:
                    fates[drop["sequence"], rollout].append(f"dropped as {drop['reason']} before version {number}")
                if not drop["rollouts"]:
                    whole[drop["sequence"]].append(f"dropped as {drop['reason']} before version {number}")
        unknown = self._unknown()
        failed = self._failed_gradings()
        for sequence, message in self.messages.items():
            if sequence > self.cursor or message.kind != "samples" or any(a < sequence <= b for a, b in unknown):
                continue
            if message.broken and len(whole[sequence]) != 1:
                self._say(f"the broken message at sequence {sequence} is in {len(whole[sequence])} drops, expected one")
            for rollout, found in message.rollouts.items():
                fate = fates[sequence, rollout] + whole[sequence]
                if not fate and found.grading:
                    ends = failed.get((message.task, rollout, found.grading), [])
                    fate = [said for end in ends for said in fates[end, rollout] if end > sequence and not said.startswith(_VAIN)]
                if len(fate) > 1:
                    self._say(f"sequence {sequence} task {message.task} rollout {rollout} has {len(fate)} fates: {'; '.join(fate)}")
                if not fate and message.task in self.ended:
                    self._say(
                        f"sequence {sequence} task {message.task} rollout {rollout} is in no entry and no drop, "
                        f"but its task {self.ended[message.task]}"
                    )
        for sequence, rollout in fates:
            message = self.messages.get(sequence)
            if sequence >= self.first and (message is None or (message.kind == "samples" and rollout not in message.rollouts)):
                self._say(f"the ledger names sequence {sequence} rollout {rollout}, which the stream does not have")

    def _failed_gradings(self) -> dict[tuple[int | None, int | None, int], list[int]]:
        """Sequences of the tombstones of rollouts whose grading failed, by task, rollout and request: they end rollouts that have come."""
        found: dict[tuple[int | None, int | None, int], list[int]] = defaultdict(list)
        for sequence, message in self.messages.items():
            if message.kind == "tombstones" and message.grading and message.ended is not None:
                found[message.task, message.ended, message.grading].append(sequence)
        return found

    def _counts(self) -> None:
        """Granted and retired of each entry; drops made right after a step are written with the next one."""
        retired = spare = 0
        for entry, following in zip(self.chain, [*self.chain[1:], None], strict=False):
            number = entry["version"]["number"]
            if following is not None and following["version"]["number"] != number + 1:
                following = None  # the next entry is lost, and with it the drops that it was to tell of
            retired += len(entry["used"]) + sum(drop["retires"] for drop in entry["drops"])
            reasons = Counter(drop["reason"] for drop in following["drops"] if drop["retires"]) if following else Counter()
            after = reasons["stale"] + reasons["unrewarded"] + reasons["expired"] if following else None
            if number - 1 in self.missing:  # what those entries retired is known by what they left, but for drops right after the step
                retired, spare = max(retired, entry["retired"] - (after or 0)), after or 0
            if entry["retired"] < retired or (after is not None and entry["retired"] > retired + spare + after):
                self._say(f"version {number}: {entry['retired']} tasks retired by the ledger, {retired} by its entries")
            promised = entry["retired"] + (self.settings.s + 1) * self.settings.b
            if entry["granted"] != promised and not promised < entry["granted"] <= self.granted:
                self._say(f"version {number}: {entry['granted']} tasks granted, {entry['retired']} retired ones allow {promised}")
