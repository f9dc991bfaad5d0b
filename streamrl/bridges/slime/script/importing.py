"""A training script of slime as a configuration, with a report of what is not the same."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from streamrl.bridges.slime.bash.reader import read_script
from streamrl.bridges.slime.bash.training import Script, Training
from streamrl.bridges.slime.script import serving, training, work
from streamrl.bridges.slime.script.arguments import Arguments
from streamrl.bridges.slime.script.draft import Draft, Options
from streamrl.bridges.slime.script.flag import canonical
from streamrl.bridges.slime.script.report import Finding, Report, finding
from streamrl.bridges.slime.script.toml import document
from streamrl.config.check import check
from streamrl.config.load import convert
from streamrl.errors import ConfigError

ALL = "all"
"""Of --leave-out: whatever is refused."""
_GROUPS: tuple[Callable[[Draft], None], ...] = (
    serving.write_model,
    work.write_batches,
    work.write_staleness,
    work.write_data,
    serving.write_mesh,
    work.write_lengths,
    serving.write_micro_batches,
    serving.write_hooks,
    serving.write_engines,
    serving.write_sampling,
    serving.write_reward,
    serving.write_evaluation,
    training.write_loss,
    training.write_optimizer,
    training.write_checkpoints,
    training.write_logs,
    training.check_unset,
)


class Imported(msgspec.Struct, frozen=True):
    """The configuration as TOML, empty where something is refused, and the report."""

    toml: str
    report: Report


def import_script(
    path: Path,
    *,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    leave_out: Sequence[str] = (),
    options: Options | None = None,
) -> Imported:
    """Read a script and write what it asks for.

    Args:
        path: the script.
        arguments: what it is started with.
        variables: of the environment that it is started in; nothing else of an environment is read.
        cwd: the folder that it is started in; None: the working directory.
        leave_out: flags, or variables with words that are not known, to do without; `all`: whatever is refused.
        options: what the script does not say.

    Raises:
        ConfigError: the script cannot be read, has no training command or several, or lacks what is to be left out.
    """
    folder = Path(os.path.abspath(cwd or Path.cwd()))
    script = read_script(Path(os.path.abspath(path)), arguments=arguments, variables=variables or {}, cwd=folder)
    command = _command(script, path)
    given = Arguments(command.words)
    wanted = [_wanted(name, given) for name in leave_out]
    for name in wanted:
        given.leave_out(name)
    draft = _drafted(given, command, options or Options())
    while ALL in wanted and (more := _refused_flags(given, draft)):
        for name in more:
            given.leave_out(name)
        draft = _drafted(given, command, options or Options())
    findings = [_accepted(one, wanted) for one in (*given.findings, *draft.findings)]
    said = {one.subject for one in findings if one.outcome == "left out"}
    rest = [one for one in given.left_out.values() if one.spelled not in said]
    findings += [finding("left out", one.spelled, "is not in the configuration", "", one.place) for one in rest]
    findings += _of_script(script, command, accepted=ALL in wanted)
    where = f"{command.place.file}:{command.place.line}"
    report = Report(
        where, tuple(sorted(dict.fromkeys(findings), key=lambda one: (one.file, one.line))), len(given.given) + len(given.left_out)
    )
    return Imported("" if report.refused else _written(draft, report), report)


def _command(script: Script, path: Path) -> Training:
    found = script.trainings
    if not found:
        ended = f"; it ends with exit at {script.ended}" if script.ended else ""
        raise ConfigError(
            f"expected a command that runs slime's train.py or train_async.py, got none in {path}{ended}",
            hint="hand over the script that starts the training itself; what ssh, eval and here-documents run is not read",
            path=str(path),
        )
    if len(found) > 1:
        places = ", ".join(str(one.place) for one in found)
        raise ConfigError(
            f"expected one training command, got {len(found)}, at {places}",
            hint="keep one of them, or set what chooses between them with --var NAME=VALUE",
            path=str(path),
        )
    return next(iter(found))


def _wanted(name: str, given: Arguments) -> str:
    """What is to be left out: `all`, a flag with or without its dashes, or the name of a variable."""
    flag = canonical(name)
    meant = next((one for one, found in given.given.items() if flag in (one, found.spelled)), "")
    if name == ALL or meant:
        return meant or name
    if any(_names(one, flag) for one in given.findings):
        return flag
    if any(_names(one, name) for one in given.findings):
        return name
    raise ConfigError(
        f"--leave-out {name}: the training command has no such flag",
        hint="name it as the report does, such as --leave-out use-opd, or `all`",
        flag=name,
    )


def _names(one: Finding, name: str) -> bool:
    """Whether a refusal is of this flag, or of words from this variable."""
    return one.outcome == "refused" and (one.subject == name or name in re.findall(r"\w+", one.subject))


def _refused_flags(given: Arguments, draft: Draft) -> list[str]:
    subjects = {one.subject for one in (*given.findings, *draft.findings) if one.outcome == "refused"}
    return [name for name, one in given.given.items() if one.spelled in subjects]


def _accepted(one: Finding, wanted: Sequence[str]) -> Finding:
    """A refusal that the reader does without; that a flag is missing stays one."""
    if one.outcome != "refused" or not one.line or not (ALL in wanted or any(_names(one, name) for name in wanted)):
        return one
    return replace(one, outcome="left out", nearest="")


def _drafted(given: Arguments, command: Training, options: Options) -> Draft:
    draft = Draft(given, command, options)
    for write in _GROUPS:
        write(draft)
    for name, one in given.given.items():
        if one.flag.fate == "refused":
            draft.refuse(name, one.flag.says, one.flag.nearest)
        elif one.flag.fate == "approximated" and name not in draft.spoken:
            draft.say(name, one.flag.says)
    if not any(one.outcome == "refused" for one in (*given.findings, *draft.findings)):
        _check(draft)
    _say_what_is_unused(given, draft)
    return draft


def _say_what_is_unused(given: Arguments, draft: Draft) -> None:
    """A flag that no key is from, and of which nothing was said, does nothing beside the others, unless it says what slime does anyway."""
    said = {one.subject for one in (*given.findings, *draft.findings)} | draft.spoken | draft.used
    for name, one in given.given.items():
        as_ever = one.flag.default is not None and given.text(name) is not None and _same(given.text(name), one.flag.default)
        if one.flag.fate == "mapped" and not {name, one.spelled} & said and not as_ever:
            draft.findings.append(finding("assumed", one.spelled, "counts for nothing beside the other flags", "", one.place))


def _same(text: str | None, default: object) -> bool:
    try:
        return text == default or float(text or "nan") == default
    except ValueError:
        return False


def _check(draft: Draft) -> None:
    """What streamrl refuses of the whole is refused with the flags that it is from."""
    try:
        check(convert(draft.tree(), where="the configuration that the flags make"))
    except ConfigError as error:
        key = str(error.values.get("key", ""))
        near = [*draft.flags.get(key, ()), *(flag for name, flags in draft.flags.items() if key and name.startswith(key) for flag in flags)]
        if near:
            draft.refuse(next(filter(draft.arguments.on, near), near[0]), error.message, error.hint)
        else:
            draft.findings.append(finding("refused", key or "the configuration", error.message, error.hint))


def _of_script(script: Script, command: Training, *, accepted: bool) -> list[Finding]:
    found = [
        finding("assumed", one.why, "what it sets is not known, and what was set before it is taken to stay", one.hint, one.place)
        for one in script.unread
    ]
    for name, (default, place) in script.defaults.items():
        says = f"is taken to be unset, so that it is {default!r}; --var {name}=VALUE for another"
        found.append(finding("assumed", name, says, "", place))
    if command.uncertain:
        outcome = "left out" if accepted else "refused"
        says = f"is run only if {command.uncertain.why.removesuffix(' is not known')} allows it"
        found.append(finding(outcome, command.entry, says, "set what decides it with --var NAME=VALUE", command.place))
    if command.dangling:
        says = "begins with flags: a \\ at the end of the line before it is missing, so that they are no part of the training command"
        found.append(finding("refused", "a command", says, "end that line with \\", command.dangling))
    return found


def _written(draft: Draft, report: Report) -> str:
    get = draft.get
    tasks, rollouts, steps = get("tasks.batch_tasks"), get("tasks.num_rollouts", 1), get("trainer.minibatches")
    head = [
        f"Made by `streamrl import-slime` from the {report.num_flags} flags of {report.command}.",
        f"A batch: {tasks} tasks x {rollouts} rollouts = {tasks * rollouts} samples, optimizer steps: {steps}.",
        f"The run: {get('run.steps')} batches, {get('run.steps') * steps} optimizer steps.",
    ]
    for one in report.findings:
        head.append(f"{one.outcome}: {one.place + ' ' if one.place else ''}{one.subject}: {one.says}")
    return document(draft.entries, {"evaluation.sets": draft.sets} if draft.sets else {}, head)
