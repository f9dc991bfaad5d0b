"""How a session of a run ended, written to the run directory and told to the user."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from streamrl.monitor.failed_share import failed_rollouts_line
from streamrl.monitor.numbers import Evaluation
from streamrl.monitor.plot import write_plot
from streamrl.monitor.screen import row_line
from streamrl.monitor.summary import Summary, learning_evaluations, problem_table, read_summary, summarize, summary_line, write_summary
from streamrl.monitor.view import RunView
from streamrl.runtime.rundir import RunDir

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one `up`."""

    run: RunDir
    state: str
    """`finished`, `stopped` (drained), `failed` or `killed`."""
    exit_code: int = 0
    """Of the command."""
    summary: Summary | None = None
    """None if nothing was trained, as far as is known."""
    evaluations: Sequence[Evaluation] = ()
    """Held-out evaluations, by version."""
    unread: bool = False
    """True: it ended before the ledger was read, so what was trained is not known here, or only as of the end of an earlier session."""

    @property
    def summary_json(self) -> str:
        """The content of `summary.json`; `null` if nothing was trained."""
        return msgspec.json.format(msgspec.json.encode(self.summary), indent=2).decode()

    def print(self, console: Console | None = None) -> None:
        """The problems before and after, the summary line, and where the files are; to stdout."""
        from rich.console import Console
        from rich.text import Text

        out = console or Console(soft_wrap=True)
        table = problem_table(self.evaluations)
        if table is not None:
            out.print(table)
        if self.summary is None:
            trained = "what it has trained is in its log" if self.unread else "nothing was trained"
            out.print(Text(f"{self.run.name} {self.state}; {trained}"))
            return
        before = ", before this session" if self.unread else ""
        out.print(Text(f"{self.run.name} {self.state}{before}: {summary_line(self.summary)}"))
        if self.summary.verdict:
            out.print(Text(f"  {self.summary.verdict}"))
        if failed := failed_rollouts_line(self.summary.failed_rollouts, self.summary.ended_rollouts, self.summary.newest_error):
            out.print(Text(f"  {failed}"))
        for row in self.summary.unusable_rows:
            out.print(Text(f"  {row_line(row)}"))
        for path in (self.run.summary_path, self.run.plot_path):
            if path.exists():
                out.print(Text(f"  {path}"))


async def conclude(run: RunDir, view: RunView, *, state: str, wall_s: float) -> Outcome:
    """Write `summary.json`, and the plot once there is something to plot."""
    outcome = summed_up(run, view, state=state, wall_s=wall_s)
    if view.reward_points and not outcome.unread:
        try:
            await asyncio.to_thread(write_plot, view, run.plot_path)
        except OSError as error:
            logger.warning("event=plot_not_written error=%s", error)
    return outcome


def summed_up(run: RunDir, view: RunView | None, *, state: str, wall_s: float = 0.0, exit_code: int = 0) -> Outcome:
    """Write `summary.json` of what `view` has seen.

    None, or one that has not come to the ledger's end: that of an earlier session is told, if there is one.
    """
    if view is None or not view.live:
        return Outcome(run=run, state=state, exit_code=exit_code, summary=read_summary(run.summary_path), unread=run.exists)
    if not view.trained.num_batches:
        return Outcome(run=run, state=state, exit_code=exit_code)
    summary = summarize(view, wall_s=wall_s)
    try:
        write_summary(summary, run.summary_path)
    except OSError as error:  # of a full disk; it is told all the same
        logger.warning("event=summary_not_written error=%s", error)
    logger.info("event=summary state=%s %s", state, summary_line(summary))
    return Outcome(run=run, state=state, exit_code=exit_code, summary=summary, evaluations=learning_evaluations(view))
