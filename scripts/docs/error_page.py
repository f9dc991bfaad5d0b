"""The page of all errors. Its messages are what the code says: `scripts.docs.provoked` makes each one happen while the page is written."""

from __future__ import annotations

import ast
import asyncio
import inspect
import logging
import os
import re
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from scripts.docs import provoked, provoked_runs
from streamrl import errors
from streamrl.errors import StreamRLError

ROOT = Path(__file__).parents[2]
FOLDERS = ("streamrl", "producers", "consumers", "schemas")
Provocation = Callable[[], object]

HEAD = """# Errors

Made by `make docs`, which makes each of these messages happen; do not edit it.

Every error that streamrl raises on purpose is one of these classes (`streamrl/errors.py`). A message says what was expected, what was
got and where; the hint says what to do. On the command line both are printed without a traceback, and the exit code is 1. `values` has
the same facts for programs, and an error survives pickling.

A worker that fails is started again (`supervise.max_restarts`), but for a `ConfigError` or `CannotResume` (exit code 2), because it
would fail in the same way, `Fenced` (exit code 3), because it would fight its successor, and `WeightsDiverged` (exit code 4), because it
would train the same again. Exit code 0, and 5 of a worker that a signal has told to drain, are no ends either while the run goes on:
it is started again, but for a trainer that was told to drain, which stops the run. What it said is in `runs/<name>/logs/<worker>.log`,
and the end of that on the screen once the run is given up.
"""


class Entry(msgspec.Struct, frozen=True):
    """The page's entry for one class."""

    meaning: str
    action: str
    shown: tuple[Provocation, ...] = ()


ENTRIES: dict[type[StreamRLError], Entry] = {
    errors.StreamRLError: Entry(
        "The base of all. It is not raised itself; catch it to catch whatever streamrl says on purpose.",
        "Read the hint.",
    ),
    errors.ConfigError: Entry(
        "The TOML file, `--set`, a flag, or a file that one of them names cannot be used. Nothing has been started yet; in a worker it "
        "is an environment that does not fit the run, such as a missing model directory.",
        "Correct what it names. All keys are in [configuration.md](configuration.md).",
        (provoked.unknown_key, provoked.contradiction, provoked.no_such_run),
    ),
    errors.DataError: Entry(
        "A set of `data.train` or `data.heldout` cannot be used, or a row where all are read before anything starts.",
        "Correct the row in the file and line that it names, or name other fields with `data.prompt_key` and `data.label_key`.",
        (provoked.row_without_label,),
    ),
    errors.SchemaError: Entry(
        "Bytes are not what their header says, or a value does not fit its struct. On the sample stream nobody dies of it: the message "
        "becomes a [dead letter](dead-letters.md) and its task ends.",
        "Look at the message with `streamrl dead show`; producers of your own publish with this package's functions.",
        (provoked.no_arrow, provoked.undeclared_metric),
    ),
    errors.BusError: Entry(
        "The bus refused or lost an operation, and none of the classes below says it better.",
        "Is `bus.url` a NATS server of 2.11 or later with JetStream, with streams that streamrl made?",
        (provoked.too_large,),
    ),
    errors.BusUnavailable: Entry(
        "No server answers within `bus.patience_s`, or it refuses the credentials or the certificate. Shorter outages are waited out and "
        "seen in the log only.",
        "`streamrl status` says whether the run is up; `streamrl doctor --run RUN` asks its bus. For outages that last longer raise "
        "`bus.patience_s`.",
        (provoked.nobody_there,),
    ),
    errors.Forbidden: Entry(
        "The role's credentials lack a right. [security.md](security.md) has the rights of each.",
        "Use the credentials of the role whose work it is; on a cluster of your own, grant the right.",
        (provoked.not_its_right,),
    ),
    errors.Conflict: Entry(
        "A compare-and-set lost: somebody else wrote first. The services handle it themselves: a feeder reads the position again, "
        "a trainer finds out whether it is fenced.",
        "In code of your own: read again and decide anew.",
        (provoked.somebody_was_first,),
    ),
    errors.StreamFull: Entry(
        "A byte budget is used up, and nothing was stored. Producers wait (`stalled: stream full`) and try again; see "
        "[operations.md](operations.md#when-a-stream-is-full).",
        "Usually nothing. If it lasts: is there a reader that holds the stream (a tap, a slow trainer)? Raise `bus.samples_bytes`, "
        "`bus.blobs_bytes` or, for images and experts, `bus.sample_blobs_bytes`, for a new run.",
        (provoked.no_room,),
    ),
    errors.LogTruncated: Entry(
        "A reader needs messages that the stream no longer holds: it was trimmed, deleted and made again, or lost its end with the power.",
        "Replay from a newer version with `--from V`, or from a recording made earlier. Against power loss: `bus.sync_always = true`.",
        (provoked.trimmed,),
    ),
    errors.NotFound: Entry(
        "No such key, blob or message. Engines take it for a version that was retired, and wait for the next.",
        "Is it a version older than `weights.keep` allows?",
        (provoked.retired_blob,),
    ),
    errors.EngineError: Entry(
        "An engine refused or failed a request, or its server did not start. A producer repeats the rollout, six times within 15 s; then "
        "the rollout ends as a tombstone.",
        "Read the engine's log. A refusal of the request names the limit.",
        (provoked.long_prompt,),
    ),
    errors.EngineSilent: Entry(
        "An engine has not answered a call for `producer.silent_call_s`, while it had no other request or made more tokens for each other "
        "call than this one may have; or it goes on beyond the tokens that it was asked for. The rollout is begun again once, and then has "
        "failed.",
        "Read the engine's log. If answers may take longer, raise `producer.silent_call_s`.",
        (provoked.endless_answer,),
    ),
    errors.EngineUnavailable: Entry(
        "An engine cannot be asked: its process is gone, it was stopped, or it fails whatever it is asked. The pool gives it no new "
        "requests until its presence is renewed; the task is tried again at another.",
        "Usually nothing. If no engine is left, read the engines' logs.",
        (provoked.gone_engine,),
    ),
    errors.EngineDied: Entry(
        "An engine whose server is a process of its own has lost it, or its server may hold a mixture of two versions. The engine worker "
        "starts a new one, `engine.sglang.restarts` times.",
        "If it repeats, read the whole of the server's log.",
        (provoked.server_that_ends,),
    ),
    errors.RewardError: Entry(
        "A server that `remote` or `judge` asks gave no reward within its tries and its time, or something that is none; or no sandbox "
        "runs programs for `python`. The rollout ends as a tombstone, with this as its reason; there is no silent 0.",
        "Read what the server said. `streamrl doctor TOML` looks whether it answers; docs/rewards.md has the limits.",
        (provoked.reward_from_nobody,),
    ),
    errors.ToolError: Entry(
        "A tool that a model has called gave nothing, where the agent wants that to fail the rollout (`chat.call_tools(fail=True)`), or "
        "too many calls of plain functions hang in a process. The rollout ends as a tombstone.",
        "Read what the tool said. Without `fail` the model is told instead.",
        (provoked.tool_that_fails,),
    ),
    errors.WeightSyncError: Entry(
        "A manifest or its bytes cannot be taken: another model, another digest, a publisher that is gone. The engine goes on serving "
        "what it has, and tries again or takes the next version.",
        "If it repeats: do trainer and engines use the same `model.path` and type? Do engines on other hosts find the bytes "
        "(`weights.also_on_bus`)?",
        (provoked.other_model,),
    ),
    errors.TrainingError: Entry(
        "A step cannot be taken, or a checkpoint cannot be loaded.",
        "Follow the hint; a restart trains by what the ledger has.",
        (provoked.checkpoint_of_another_model,),
    ),
    errors.CheckpointDamaged: Entry(
        "A checkpoint is gone, or its files are not what was written, by the digests in its `files.json`. A trainer goes back to an older "
        "one and says so; the other verbs end.",
        "Nothing for a run; it keeps the damaged one as `<name>.damaged` until there is a newer one. Is the disk failing?",
        (provoked.damaged_checkpoint,),
    ),
    errors.CannotResume: Entry(
        "Checkpoints, ledger and streams of a run do not fit together, and going on would hide a loss. No worker is started again for it.",
        "Follow the hint: put back what is missing, or say that the loss is accepted.",
        (provoked_runs.no_checkpoint,),
    ),
    errors.BatchDiffers: Entry(
        "The stream gave another batch than the ledger says it gave. A stream, ledger or configuration that was changed by hand "
        "shows itself here.",
        "`streamrl replay RUN --verify` names the group and the cause.",
        (provoked_runs.other_batches,),
    ),
    errors.WeightsDiverged: Entry(
        "An update made a parameter that is not finite, or `trainer.max_unlearned` more batches had no finite gradient than had one. "
        "The run ends: a restart would train to the same end. What diverged is no version; engines never see it.",
        "Lower `trainer.optimizer.learning_rate` or `clip_norm`, or bound the rewards, in a new run or a branch from an earlier version.",
        (provoked.endless_rate,),
    ),
    errors.OutOfMemory: Entry(
        "A device has not enough memory for a step. One rank whose optimizer has written nothing repeats the step with half of "
        "`trainer.micro_tokens` and says so, without an error; several ranks, and one that has written, end with it and begin again from "
        "their checkpoint with half of it.",
        "Lower `trainer.micro_tokens` to spare the next run that. Where a single sample does not fit: "
        "`trainer.activations = 0`, a lower `sampling.max_new_tokens`, or a larger device.",
        (provoked.one_sample_too_long,),
    ),
    errors.Diverged: Entry(
        'With `run.numerics = "bitwise"`: a step that was trained again gave other parameters than the ledger has. `fast` begins a new '
        "epoch instead.",
        "`streamrl replay RUN --verify` compares the numerics fingerprints and names the cause.",
        (provoked_runs.other_digits,),
    ),
    errors.Fenced: Entry(
        "Another trainer has taken over this role; what this one would have written was refused. It is the guard against two trainers, "
        "and not a fault.",
        "Nothing.",
        (provoked.another_trainer,),
    ),
    errors.LaunchError: Entry(
        "A process cannot be started or kept running: the run is up already, a port is taken, a binary is missing, or a worker ended "
        "too often.",
        "Follow the hint. After a worker that ended too often, read its log; `streamrl up` resumes the run.",
        (provoked.up_twice, provoked.port_in_use),
    ),
}


def errors_page() -> str:
    """The whole page."""
    tree = (inspect.getdoc(errors) or "").partition("```text\n")[2].partition("\n```")[0]
    raised = raised_in()
    parts = [HEAD, "```text", tree, "```", ""]
    with _quiet():
        for kind, entry in ENTRIES.items():
            parts += [f"## {kind.__name__}", "", entry.meaning, ""]
            for provocation in entry.shown:
                parts += [f"{inspect.getdoc(provocation)}", "", "```text", f"{kind.__name__}: {said(kind, provocation)}", "```", ""]
            parts += [f"**What to do:** {entry.action}", ""]
            if places := raised.get(kind.__name__):
                parts += [f"Raised in {', '.join(f'`{place}`' for place in places)}.", ""]
    return "\n".join(parts).rstrip() + "\n"


def said(kind: type[StreamRLError], provocation: Provocation) -> str:
    """Message and hint of the error of exactly `kind` that `provocation` ends in, without what differs from one time to the next.

    Raises:
        ValueError: it ends in no error, or in one of another class.
    """
    name = provocation.__name__
    with tempfile.TemporaryDirectory() as place, _inside(Path(place)):
        try:
            result = provocation()
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except StreamRLError as error:
            if type(error) is kind:
                return _settled(str(error), place)
            raise ValueError(f"expected {name} to end in {kind.__name__}, got {error!r}") from error
    raise ValueError(f"expected {name} to end in {kind.__name__}, it ended well")


def raised_in() -> dict[str, list[str]]:
    """The packages whose code raises or returns each class, by the class's name."""
    names = {kind.__name__ for kind in ENTRIES}
    found: dict[str, set[str]] = {}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if path.is_relative_to(ROOT / "streamrl") and (ROOT / "streamrl" / path.relative_to(ROOT / "streamrl").parts[0]).is_symlink():
                continue
            package = "/".join(path.relative_to(ROOT).parts[:-1][:2])
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.Raise, ast.Return)):
                    made = node.exc if isinstance(node, ast.Raise) else node.value
                    if isinstance(made, ast.Call) and isinstance(made.func, ast.Name) and made.func.id in names:
                        found.setdefault(made.func.id, set()).add(package)
    return {name: sorted(places) for name, places in found.items()}


def _settled(text: str, place: str) -> str:
    text = text.replace(place + "/", "").replace(str(Path(place).resolve()) + "/", "")
    text = re.sub(r"(127\.0\.0\.1(?::|', )|\bport )\d+", r"\g<1>4222", text)
    text = re.sub(r"\bprocess \d+", "process 4711", text)
    return re.sub(r"\b[0-9a-f]{16}\b", "<digest>", text)


@contextmanager
def _inside(place: Path) -> Generator[None]:
    before = Path.cwd()
    os.chdir(place)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _quiet() -> Generator[None]:
    """Silence the log of the provoked code."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
