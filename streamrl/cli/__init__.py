"""The command line: `streamrl VERB ...`. Parsing only; each verb imports what it runs when it runs."""

from __future__ import annotations

import argparse
import errno
import io
import re
import sys
from collections.abc import Sequence

from streamrl import __version__
from streamrl.cli import (
    bench,
    check_hook,
    checks,
    convert,
    dead,
    evaluate,
    export,
    files,
    gateway,
    import_slime,
    inspect,
    logs,
    metrics,
    page,
    records,
    reward,
    rewarder,
    runs,
    top,
    trace,
    workers,
)
from streamrl.errors import StreamRLError, no_room

_INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors of streamrl are printed with their hint and without a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # as a name or an answer may have letters that the terminal lacks
    whole, words = parser(), list(sys.argv[1:] if argv is None else argv)
    arguments, unknown = whole.parse_known_args(words)
    if unknown:
        whole.error(f"unrecognized arguments: {' '.join(unknown)}{_set_hint(words)}")
    try:
        code: int = arguments.run_verb(arguments)
    except StreamRLError as error:
        _print_error(error)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe (head, less) has left. Closing stdout here keeps the interpreter from complaining about it at exit.
        sys.stderr.close()
        return 1
    except OSError as error:
        if (full := no_room(error)) is not None:
            _print_error(full)
            return 1
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        whose = "this process may have" if error.errno == errno.EMFILE else "this machine can have"
        print(f"error: no more open files than {whose}: {error}\nhint: raise the limit, see `ulimit -n`", file=sys.stderr)
        return 1
    return code


def _set_hint(words: Sequence[str]) -> str:
    """A line that sets the keys which stand among the words of a command line without their flag; empty: there are none.

    It looks at all words: a key in front of the configuration is taken for the file, and the file is what is not recognized then.
    """
    bare = [word for before, word in zip(("", *words), words, strict=False) if before != "--set"]
    settings = [word.lstrip("+") for word in bare if re.fullmatch(r"\+{0,2}[a-z_]+(\.\w+)+=.*", word, re.DOTALL)]
    return f"\nhint: keys are set with {' '.join(f'--set {word}' for word in settings)}" if settings else ""


def _print_error(error: StreamRLError) -> None:
    """In lines without commands for the terminal: it may quote what user code has said."""
    from streamrl.monitor.drawing import visible_lines

    print(visible_lines(f"error: {error}"), file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    whole = argparse.ArgumentParser(prog="streamrl", description="Reinforcement-learning post-training of LLMs as a stream.")
    whole.add_argument("--version", action="version", version=f"streamrl {__version__}")
    verbs = whole.add_subparsers(title="commands", metavar="COMMAND", required=True)
    files.add_verbs(verbs)
    runs.add_verbs(verbs)
    logs.add_verbs(verbs)
    metrics.add_verbs(verbs)
    page.add_verbs(verbs)
    top.add_verbs(verbs)
    workers.add_verbs(verbs)
    gateway.add_verbs(verbs)
    rewarder.add_verbs(verbs)
    checks.add_verbs(verbs)
    check_hook.add_verbs(verbs)
    records.add_verbs(verbs)
    export.add_verbs(verbs)
    evaluate.add_verbs(verbs)
    convert.add_verbs(verbs)
    import_slime.add_verbs(verbs)
    dead.add_verbs(verbs)
    reward.add_verbs(verbs)
    trace.add_verbs(verbs)
    inspect.add_verbs(verbs)
    bench.add_verbs(verbs)
    return whole
