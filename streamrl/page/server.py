"""The page's server: files of the browser's part, and JSON of what the index and the log hold. On loopback, by GET only."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from aiohttp import web
from aiohttp.typedefs import Handler

from streamrl.config.tree import Config
from streamrl.errors import BusError, LaunchError, NotFound, StreamRLError
from streamrl.monitor.glance import account_words
from streamrl.monitor.run_state import INTERRUPTED, RUNNING, RunState, read_state
from streamrl.monitor.series import WINDOW
from streamrl.monitor.summary import read_summary
from streamrl.page.access import add_headers, guard, place_of
from streamrl.page.attention import Attention
from streamrl.page.branch import told_of
from streamrl.page.index import COMMITS, LEDGER_TABLE, MOST_POINTS, SERIES_AXES, Index, Progress
from streamrl.page.lengths import lengths_of
from streamrl.page.log import RunLog
from streamrl.page.objectives import objectives_of, worst_over
from streamrl.page.others import AXES, MOST_COMPARED, Others, newest_rate
from streamrl.runtime.lock import holder
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.subjects import RUN_ID
from streamrl.telemetry.names import DROP_REASONS, METRICS, declared

if TYPE_CHECKING:
    from streamrl.page.samples import Samples

logger = logging.getLogger(__name__)

_STATIC = Path(__file__).with_name("static")
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_POLL_S, _REST_S = 2.0, 30.0
"""Between two looks at the metrics files, while somebody looks at the page and else."""
_SEND_S = 1.0
_STILL_THERE = 15
"""Looks without news after which a line is kept open with a comment."""
_MOST_NAMES = 64
_MOST_COMMITS = 200
_MOST_LINES, _LINE_POINTS = 8, 500
"""Engines in a chart, and points of each."""
_MOST_BATCHES = 1000
"""In which one request looks for samples."""
_LISTENERS = 32
"""Pages that are open at once; those beyond are told to come later."""


class Page:
    """What the page of one run shows.

    Args:
        run: its directory.
        config: of the run.
        index: filled by `work`.
        log: read by `work`.
        attention: is told of every request that was let in.
    """

    def __init__(self, run: RunDir, config: Config, index: Index, log: RunLog, attention: Attention) -> None:
        self._run = run
        self._config = config
        self._index = index
        self._log = log
        self._attention = attention
        self._others = Others(run, config, index)
        self._listeners = 0
        self._seen: tuple[tuple[object, ...], bytes] = ((), b"")
        self.reading = True
        """Whether rows that were there at the start are still being read."""

    async def work(self) -> None:
        """Keep the index up to date until cancelled. A disk that is full costs what is new, and a line in the log."""
        following = asyncio.create_task(self._log.follow())
        try:
            while True:
                try:
                    self.reading = await asyncio.to_thread(self._index.read_rows)
                except OSError as error:
                    logger.warning("event=rows_not_read error=%s", error)
                    await asyncio.sleep(5.0)
                if not self.reading and self._attention.there:
                    await asyncio.sleep(_POLL_S)
                elif not self.reading:
                    await self._attention.wait(_REST_S)
                if following.done():
                    following.result()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    def progress(self) -> Progress:
        """How much of the metrics files has been read."""
        return self._index.progress()

    def app(self, token: str) -> web.Application:
        """The routes, for those who bring the token."""
        app = web.Application(middlewares=[self._looked, _errors])
        for name, file in _files().items():
            app.router.add_get(f"/static/{name}" if name != "index.html" else "/", _sender(*file))
        app.router.add_get("/api/run", self._get_run)
        app.router.add_get("/api/live", self._live)
        app.router.add_get("/api/series", self._get_series)
        app.router.add_get("/api/versions", self._get_versions)
        app.router.add_get("/api/served", self._get_served)
        app.router.add_get("/api/notes", self._get_notes)
        app.router.add_get("/api/drops", self._get_drops)
        app.router.add_get("/api/letters", self._get_letters)
        app.router.add_get("/api/samples", self._get_samples)
        app.router.add_get("/api/others", self._get_others)
        app.router.add_get("/api/compare", self._get_comparison)
        app.router.add_get(r"/api/batches/{number:\d{1,12}}", self._get_batch)
        app.router.add_get(r"/api/batches/{number:\d{1,12}}/tasks/{task:\d{1,18}}", self._get_group)
        whole = web.Application(middlewares=[guard(token)])
        whole.on_response_prepare.append(add_headers)
        whole.add_subapp(f"/{place_of(token)}", app)
        return whole

    @web.middleware
    async def _looked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._attention.seen()
        return await handler(request)

    @cached_property
    def _samples(self) -> Samples:
        # Imported when somebody looks: Arrow and the tokenizer are half of what a page costs that nobody looks at.
        from streamrl.page.samples import Samples

        return Samples(self._run, self._config, self._index, self._log)

    def _state(self) -> dict[str, Any]:
        state = read_state(self._run)
        known = state.state if state is not None else ""
        running = holder(self._run) is not None
        if known == RUNNING and not running:
            known = INTERRUPTED
        progress = self._index.progress() if self.reading else None
        newest = self._index.columns(LEDGER_TABLE, ["version", "epoch"], last=1)
        branch = told_of(self._run, self._index.branch) if self._index.branch is not None else None
        if branch is not None:  # it holds the lock while it trains, and has no other state
            known = "finished" if branch["ended"] else RUNNING if running else INTERRUPTED
        return {
            "run": self._run.name,
            "branch": branch,
            "state": known or "starting",
            "step": state.step if state is not None else self._index.step if branch is not None else 0,
            "steps": state.steps if state is not None and state.steps else self._config.run.steps,
            "error": state.error if state is not None else "",
            "batches": self._index.rows(LEDGER_TABLE),
            "version": f"{newest['epoch'][-1]:.0f}.{newest['version'][-1]:.0f}" if len(newest["version"]) else "",
            "changes": self._index.changes,
            "num_tables": len(self._index.tables()),
            "reading": progress,
            "trouble": self._log.trouble,
            "newest": self._index.newest,
            "trained_per_s": newest_rate(self._index),
            "sampled_per_s": self._index.rate(WINDOW, "tokens/sampled_total"),
            **(_judged_of_none() if branch is not None else self._judged(state, running=running)),
            "lengths": lengths_of(state),
        }

    def _judged(self, state: RunState | None, *, running: bool) -> dict[str, Any]:
        return {
            "objectives": objectives_of(self._config.slo, self._log.findings if running else None, self._index.newest),
            "glance": _glance(self._run, state),
            "worst": {} if running else worst_over(self._run, self._config.slo),
        }

    async def _told(self) -> bytes:
        """The state as it is sent; the same object while it is the same."""
        signs = await asyncio.to_thread(self._signs)
        if signs != self._seen[0]:
            state = await asyncio.to_thread(self._state)
            self._seen = signs, msgspec.json.encode(state)
        return self._seen[1]

    def _signs(self) -> tuple[object, ...]:
        """What the state is made of, as far as it takes next to nothing to tell whether it is another one."""
        try:
            written = self._run.state_path.stat().st_mtime_ns
        except OSError:
            written = 0
        progress = self._index.progress() if self.reading else None
        over = self._run.summary_path.is_file(), holder(self._run) is not None
        return self._index.changes, written, progress, self._log.trouble, self._log.findings, over

    async def _get_run(self, request: web.Request) -> web.Response:
        tables = await asyncio.to_thread(self._index.metrics)
        names = {name for columns in tables.values() for name in columns}
        order = [*(name for name in METRICS if name in names), *sorted(names - METRICS.keys())]
        metrics = {name: {"unit": one.unit, "meaning": one.meaning} for name in order if (one := declared(name)) is not None}
        return _json(
            {
                **await asyncio.to_thread(self._state),
                "tables": tables,
                "metrics": metrics,
                "reasons": DROP_REASONS,
            }
        )

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: the state whenever it has changed, at most once a second; a comment now and then keeps the line open."""
        if self._listeners >= _LISTENERS:
            return web.Response(status=503, text="too many pages of this run are open\n", headers={"Retry-After": "30"})
        self._listeners += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        before, quiet = b"", 0
        try:
            await response.prepare(request)
            while request.transport is not None and not request.transport.is_closing():
                self._attention.seen()
                sent = await self._told()
                quiet = 0 if sent is not before else quiet + 1
                if sent is not before:
                    await response.write(b"data: " + sent + b"\n\n")
                elif quiet % _STILL_THERE == 0:
                    await response.write(b": still there\n\n")
                before = sent
                await asyncio.sleep(_SEND_S)
        except ConnectionError:
            pass  # the page was closed
        finally:
            self._listeners -= 1
        return response

    async def _get_series(self, request: web.Request) -> web.Response:
        """`?table=&names=a,b&x=time_s&points=&last=&thin=mean&rates=a`: columns of one table, to extremes or means; `rates` a second.

        `smooth=20`: each value is the mean of 20 rows.
        """
        query = request.query
        names = [name for name in query.get("names", "").split(",") if name][:_MOST_NAMES]
        rates = frozenset(query.get("rates", "").split(","))
        x = query.get("x", "time_s")
        if unknown := [name for name in names if declared(name) is None]:
            raise web.HTTPBadRequest(text=f"no metric is called {unknown[0][:100]!r}\n")
        if x not in SERIES_AXES:
            raise web.HTTPBadRequest(text=f"expected x to be {', '.join(SERIES_AXES)}, got {x[:100]!r}\n")
        table, mean = query.get("table", "batch"), query.get("thin") == "mean"
        if table not in await asyncio.to_thread(self._index.tables):
            return _json({"table": table, "x": [], "values": {name: [] for name in names}, "rows": 0})
        most, last, smooth = _number(query, "points", MOST_POINTS), _number(query, "last", 0), _number(query, "smooth", 1)
        return _json(
            await asyncio.to_thread(
                lambda: self._index.series(table, names, x=x, most=most, last=last, mean=mean, rates=rates, smooth=smooth)
            )
        )

    async def _get_versions(self, request: web.Request) -> web.Response:
        return _json(await asyncio.to_thread(versions_of, self._index))

    async def _get_served(self, request: web.Request) -> web.Response:
        return _json(await asyncio.to_thread(served_of, self._index))

    async def _get_notes(self, request: web.Request) -> web.Response:
        return _json(list(self._log.notes)[::-1])

    async def _get_drops(self, request: web.Request) -> web.Response:
        return _json(await self._samples.drops())

    async def _get_letters(self, request: web.Request) -> web.Response:
        return _json(await self._samples.letters())

    async def _get_others(self, request: web.Request) -> web.Response:
        """Names of the runs that can be compared, and how many at once."""
        return _json({"runs": await asyncio.to_thread(self._others.names), "most": MOST_COMPARED})

    async def _get_comparison(self, request: web.Request) -> web.Response:
        """`?runs=a,b&x=version&smooth=20`: this run and others of its directory of runs, over one of `AXES`."""
        x = request.query.get("x", AXES[0])
        if x not in AXES:
            raise web.HTTPBadRequest(text=f"expected x to be {' or '.join(AXES)}, got {x[:100]!r}\n")
        names = list(dict.fromkeys(filter(None, request.query.get("runs", "").split(","))))
        if not 0 < len(names) <= MOST_COMPARED:
            raise web.HTTPBadRequest(text=f"expected 1 to {MOST_COMPARED} runs to compare with, got {len(names)}\n")
        if unknown := [name for name in names if not RUN_ID.fullmatch(name)]:
            raise NotFound(f"expected names of runs, got {unknown[0][:100]!r}")
        return _json(await self._others.compare(names, x, smooth=_number(request.query, "smooth", 1)))

    async def _get_batch(self, request: web.Request) -> web.Response:
        return _json(await self._samples.batch(int(request.match_info["number"])))

    async def _get_samples(self, request: web.Request) -> web.Response:
        """`?upto=&skip=&batches=&...`, and the fields of `streamrl.page.search.Wanted`: samples of several batches, the newest first."""
        from streamrl.page.search import Wanted

        query = {name: value for name, value in request.query.items() if value}
        upto, skip, batches = _number(query, "upto", -1), _number(query, "skip", 0), min(_number(query, "batches", 1), _MOST_BATCHES)
        try:
            fields = {name: value for name, value in query.items() if name not in ("upto", "skip", "batches")}
            wanted = msgspec.convert(fields, Wanted, strict=False)
        except msgspec.ValidationError as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        return _json(await self._samples.search(wanted, upto=None if upto < 0 else upto, batches=batches, skip=skip))

    async def _get_group(self, request: web.Request) -> web.Response:
        return _json(await self._samples.group(int(request.match_info["number"]), int(request.match_info["task"])))


def _judged_of_none() -> dict[str, Any]:
    """Nothing: whether a branch learns cannot be told by rewards that were recorded, and it had neither engines nor a stream to judge."""
    return {"objectives": {"level": None, "lines": []}, "glance": {}, "worst": {}}


def _glance(run: RunDir, state: RunState | None) -> dict[str, Any]:
    """The numbers that people look at first, of the supervisor or, where it has left none, of the summary; empty: neither has any."""
    if state is not None and (glance := state.glance) is not None:
        account, verdict = glance.account, glance.verdict.text if glance.verdict is not None else ""
        return {**msgspec.to_builtins(glance), "verdict": verdict, "account": account_words(account)}
    summary = read_summary(run.summary_path)
    if summary is None or summary.account is None:
        return {}
    return {"verdict": summary.verdict, "account": account_words(summary.account), "heldout": summary.heldout_last}


def versions_of(index: Index) -> dict[str, Any]:
    """What each engine has served: how many versions, whether their digests are the ledger's, and the newest of them."""
    ledger = index.columns(LEDGER_TABLE, ["version", "epoch", "digest_high", "digest_low"])
    engines: list[dict[str, Any]] = []
    for table in index.tables(COMMITS):
        names = ["time_s", "version", "epoch", "digest_high", "digest_low", "lag_s", "stage_s", "commit_ms"]
        commits = index.columns(table, names)
        at = np.searchsorted(ledger["version"], commits["version"])
        inside = at < len(ledger["version"])
        at = np.where(inside, at, 0)
        known = inside & ~np.isnan(commits["digest_high"])
        same = known.copy()
        if len(ledger["version"]):
            known &= (ledger["version"][at] == commits["version"]) & (ledger["epoch"][at] == commits["epoch"])
            same = known & (ledger["digest_high"][at] == commits["digest_high"]) & (ledger["digest_low"][at] == commits["digest_low"])
        verdict = np.where(same, "same", np.where(known, "other", "unknown"))
        last = slice(-_MOST_COMMITS, None)
        rows = [
            {"time_s": time_s, "version": f"{epoch:.0f}.{number:.0f}", "digest": digest, "lag_s": lag, "stage_s": stage, "commit_ms": took}
            for time_s, epoch, number, digest, lag, stage, took in zip(
                *(commits[name][last].tolist() for name in ("time_s", "epoch", "version")),
                verdict[last].tolist(),
                *(_nullable(commits[name][last]) for name in ("lag_s", "stage_s", "commit_ms")),
                strict=True,
            )
        ]
        counts = {word: int((verdict == word).sum()) for word in ("same", "other", "unknown")}
        engines.append({"engine": table.removeprefix(COMMITS), "counts": counts, "commits": rows[::-1]})
    newest = f"{ledger['epoch'][-1]:.0f}.{ledger['version'][-1]:.0f}" if len(ledger["version"]) else ""
    return {"trained": newest, "engines": engines}


def served_of(index: Index) -> dict[str, Any]:
    """By table, the versions over time: of the ledger, and of the engines that have taken one last; and how many engines are left out."""
    tables = index.tables(COMMITS)
    newest = {table: index.columns(table, ["time_s"], last=1)["time_s"][-1] for table in tables}
    chosen = sorted(tables, key=lambda table: newest[table], reverse=True)[:_MOST_LINES]
    lines = {table: index.series(table, ["version"], most=_LINE_POINTS) for table in (LEDGER_TABLE, *sorted(chosen))}
    return {"lines": lines, "hidden": len(tables) - len(chosen)}


def _nullable(values: Any) -> list[float | None]:
    return [None if np.isnan(value) else value for value in values.tolist()]


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except NotFound as error:
        return web.Response(status=404, text=f"{error}\n")
    except BusError as error:
        return web.Response(status=503, text=f"{error}\n")
    except (StreamRLError, OSError) as error:
        return web.Response(status=500, text=f"{error}\n")


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _number(query: Mapping[str, str], name: str, otherwise: int) -> int:
    text = query.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else otherwise


def _files() -> dict[str, tuple[bytes, str]]:
    """The browser's files, by their place below `static/`; nothing else can be asked for."""
    paths = sorted(path for path in _STATIC.rglob("*") if path.suffix in _TYPES)
    return {path.relative_to(_STATIC).as_posix(): (path.read_bytes(), _TYPES[path.suffix]) for path in paths}


def _sender(body: bytes, content_type: str) -> Handler:
    async def send(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=content_type, charset="utf-8")

    return send


@contextlib.asynccontextmanager
async def served(app: web.Application, port: int) -> AsyncGenerator[int]:
    """Serve on loopback while open; gives the port. Raises LaunchError when it cannot be had."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        try:
            await site.start()
        except OSError as error:
            raise LaunchError(
                f"expected port {port} of 127.0.0.1 to be free for the page, got: {error.strerror}",
                hint="take another one, or 0 for any free one: page.port, or --port",
                port=port,
            ) from error
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
