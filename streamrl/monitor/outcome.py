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
from streamrl.monitor.summary import Summary, learning_evaluations, problem_table, summarize, summary_line, write_summary
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
    """None if nothing was trained."""
    evaluations: Sequence[Evaluation] = ()
    """Held-out evaluations, by version."""

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
            out.print(Text(f"{self.run.name} {self.state}; nothing was trained"))
            return
        out.print(Text(f"{self.run.name} {self.state}: {summary_line(self.summary)}"))
        if failed := failed_rollouts_line(self.summary.failed_rollouts, self.summary.ended_rollouts, self.summary.newest_error):
            out.print(Text(f"  {failed}"))
        for path in (self.run.summary_path, self.run.plot_path):
            if path.exists():
                out.print(Text(f"  {path}"))


async def conclude(run: RunDir, view: RunView, *, state: str, wall_s: float) -> Outcome:
    """Write `summary.json`, and the plot once there is something to plot."""
    if not view.trained.num_batches:
        return Outcome(run=run, state=state)
    summary = summarize(view, wall_s=wall_s)
    write_summary(summary, run.summary_path)
    if view.reward_points:
        await asyncio.to_thread(write_plot, view, run.plot_path)
    logger.info("event=summary state=%s %s", state, summary_line(summary))
    return Outcome(run=run, state=state, summary=summary, evaluations=learning_evaluations(view))
