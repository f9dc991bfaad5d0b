"""`inspect`: stored samples as text, their rewards computed again, a prompt for a live engine."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.cli.trace import parse_place, say
from streamrl.config.code import check_trust, reward_addresses
from streamrl.errors import ConfigError, LogTruncated, NotFound

if TYPE_CHECKING:
    from streamrl.data.tokenizer import Tokenizer
    from streamrl.history.source import Source
    from streamrl.history.trace import Life
    from streamrl.schemas.samples import Sample

    Found = list[tuple[int, Sample]]


def add_verbs(verbs: Any) -> None:
    """Add the verb to argparse's sub-parsers."""
    inspect = verbs.add_parser("inspect", help="show stored samples as text, score them again, or ask a live engine")
    inspect.add_argument("run", metavar="RUN|DIR", help="name or directory of the run, or a recording of one")
    inspect.add_argument("task", nargs="?", metavar="TASK[/ROLLOUT]", help="task index, and one rollout of its group; both count from 0")
    inspect.add_argument("--sequence", type=int, metavar="SEQ", help="instead of a task: a message of the sample stream")
    inspect.add_argument("--tokens", action="store_true", help="every token with id, log-prob, version and mask")
    inspect.add_argument(
        "--reward", nargs="?", const="", metavar="FILE.py:NAME", help="score the episodes again, by the run's reward or this function"
    )
    inspect.add_argument("--prompt", metavar="TEXT", help="instead of a task: send this to a live engine of a run that is up")
    inspect.add_argument("--row", type=int, metavar="N", help="instead of a task: send the prompt of this row of the run's data")
    inspect.add_argument("--seed", type=int, default=0, help="of the answer to --prompt or --row")
    inspect.add_argument("--trust-code", action="store_true", help="run the reward that a recording, or another user's run, names")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.add_argument("--dir", default="runs", help="directory that holds the runs")
    inspect.set_defaults(run_verb=run_inspect)


def run_inspect(arguments: argparse.Namespace) -> int:
    """Print what was asked for."""
    wanted = [name for name in ("task", "sequence", "prompt", "row") if getattr(arguments, name) is not None]
    if len(wanted) != 1:
        got = " and ".join("TASK" if name == "task" else f"--{name}" for name in wanted) or "none of them"
        raise ConfigError(f"expected one of TASK[/ROLLOUT], --sequence, --prompt and --row, got {got}", hint="for example 41/3")
    asks = wanted[0] in ("prompt", "row")
    if asks and (arguments.reward is not None or arguments.tokens):
        raise ConfigError("--reward and --tokens are for stored samples, which --prompt and --row are not", hint="leave them out")
    asyncio.run(_ask(arguments) if asks else _stored(arguments))
    return 0


async def _ask(arguments: argparse.Namespace) -> None:
    from streamrl.data.tokenizer import load_tokenizer
    from streamrl.history.inspect_again import answer_text, ask, prompt_ids
    from streamrl.history.record import RECORDING_FILE
    from streamrl.history.source import open_source
    from streamrl.runtime.run_bus import check_up
    from streamrl.runtime.rundir import RunDir

    if not (Path(arguments.run) / RECORDING_FILE).is_file():
        check_up(RunDir.find(arguments.run, base=arguments.dir))
    async with open_source(arguments.run, base=arguments.dir, looking=True) as source:
        tokenizer = load_tokenizer(source.model_dir)
        ids = prompt_ids(source, tokenizer, arguments.prompt, arguments.row)
        found = await ask(source, tokenizer, ids, seed=arguments.seed)
    _print(found) if arguments.json else print(answer_text(found))


async def _stored(arguments: argparse.Namespace) -> None:
    from streamrl.data.tokenizer import load_tokenizer
    from streamrl.history.source import open_source

    place = parse_place(arguments.task) if arguments.task is not None else None
    async with open_source(arguments.run, base=arguments.dir, looking=True) as source:
        tokenizer = load_tokenizer(source.model_dir)
        if place is not None:
            life, found = await _of_task(source, *place)
        else:
            life, found = None, await _of_message(source, arguments.sequence)
        if arguments.reward is not None:
            await _score(source, arguments, found, tokenizer)
            return
    _show(arguments, found, life, tokenizer, whole=place is None or place[1] is not None)


def _show(arguments: argparse.Namespace, found: Found, life: Life | None, tokenizer: Tokenizer, *, whole: bool) -> None:
    from streamrl.history.inspect_samples import group_text, sample_text, show

    shown = [show(sample, sequence, tokenizer.decode, life=life, tokens=arguments.tokens) for sequence, sample in found]
    if arguments.json:
        _print(shown)
        return
    texts = [group_text(shown)] if len(shown) > 1 else []
    texts += [sample_text(one) for one in shown] if whole or arguments.tokens or len(shown) == 1 else []
    print("\n\n".join(texts))


async def _of_task(source: Source, task: int, rollout: int | None) -> tuple[Life, Found]:
    from streamrl.history.search import TaskFinder
    from streamrl.history.trace import life_of, samples_in

    finder = TaskFinder(source.log, source.bus, source.subjects, source.trainer, say=say)
    await finder.check_issued(task)
    log = await finder.find(task)
    life = life_of(log, source.subjects.run, group_size=source.config.group_size, rollout=rollout)
    if rollout is not None and rollout >= life.group_size:
        raise ConfigError(f"expected a rollout from 0 to {life.group_size - 1} of task {task}, got {rollout}", hint="count from 0")
    counts = {one.rollout: one.sequence for one in life.rollouts}
    found = [
        (sequence, sample) for (one, sequence), rows in sorted(samples_in(log).items()) if counts.get(one) == sequence for sample in rows
    ]
    if not found:
        why = "; ".join(dict.fromkeys([life.detail, *(one.why for one in life.rollouts if one.why), *life.notes]))
        named = f"{task}" if rollout is None else f"{task}/{rollout}"
        raise ConfigError(
            f"expected a task with samples, task {named} has none: {why}", hint=f"`streamrl trace RUN {named}` tells its life"
        )
    return life, found


async def _of_message(source: Source, sequence: int) -> Found:
    from streamrl.schemas.decoding import decode_samples
    from streamrl.schemas.subjects import SAMPLES, kind_of

    state = await source.log.state(SAMPLES)
    try:
        message = await source.log.fetch(SAMPLES, sequence)
    except (NotFound, LogTruncated) as error:
        there = f"it has {state.first} to {state.last}" if state.last >= state.first else "it has none"
        raise ConfigError(f"expected a message of the sample stream, of which {there}, got {sequence}", hint="count from 1") from error
    if kind_of(message.subject) != "samples":
        raise ConfigError(
            f"expected a message of samples, message {sequence} is one of {kind_of(message.subject)}",
            hint="`streamrl trace RUN TASK` shows what it says",
        )
    rows = decode_samples(message.body, where=f"{message.subject} sequence {sequence}").rows()
    return [(sequence, sample) for sample in sorted(rows, key=lambda row: (row.rollout, row.sample))]


async def _score(source: Source, arguments: argparse.Namespace, found: Found, tokenizer: Tokenizer) -> None:
    from streamrl.history.inspect_again import reward_config, reward_text, score_again, task_of_samples
    from streamrl.rewards.factory import is_user_code

    config = source.config
    if not arguments.reward:
        named = {"reward.kind": config.reward.kind} if is_user_code(config.reward) else {}
        named |= reward_addresses(config)
        whose = f"the recording {arguments.run}" if source.run is None else source.run.foreign
        check_trust(named, whose, trusted=arguments.trust_code)
        config = source.run.with_secret_options(config) if source.run is not None else config
    reward = reward_config(config, arguments.reward)
    samples = [sample for _, sample in found]
    if any(all(span.version is None for span in sample.spans) for sample in samples):
        raise ConfigError("expected episodes, got demonstrations of the warm-up, which no model sampled", hint="choose a later task")
    task, note = await task_of_samples(source, samples, tokenizer)
    again = await score_again(source, reward, samples, task, tokenizer, by_row=not arguments.reward)
    _print({"reward": reward.kind, "task": task.index, "note": note, "samples": again}) if arguments.json else print(
        reward_text(task.index, reward.kind, again, note)
    )


def _print(value: object) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
