"""The page's server, and what it shows of other runs."""

import asyncio
import math
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from msgspec.structs import replace

from streamrl.config.tree import Config, RunConfig, TasksConfig
from streamrl.errors import LaunchError, NotFound
from streamrl.monitor.glance import account_words
from streamrl.monitor.numbers import Account, Glance, Learning, Verdict
from streamrl.monitor.run_state import RunState, write_state
from streamrl.monitor.series import EVALUATION, WINDOW, Row
from streamrl.monitor.summary import summarize, write_summary
from streamrl.monitor.view import RunView
from streamrl.page.access import page_token, place_of
from streamrl.page.address import page_folder
from streamrl.page.index import open_index
from streamrl.page.others import MOST_COMPARED, Others
from streamrl.page.server import served
from streamrl.page.tables import rolling
from streamrl.runtime.rundir import RunDir
from tests.page.conftest import batch, batches, indexed, page, write


async def status(client: aiohttp.ClientSession, url: str, **given: Any) -> int:
    async with client.get(url, **given) as answer:
        return answer.status


async def told(client: aiohttp.ClientSession, url: str) -> Any:
    async with client.get(url) as answer:
        return await answer.json()


SECRET = ("/", "/api/run", "/api/live", "/api/series?names=rollout/raw_reward", "/api/drops", "/static/page.js", "/nothing")


async def test_only_who_brings_the_token_to_loopback_by_get_is_let_in(run: RunDir) -> None:
    write(run, batches(1, 3))
    async with page(run) as (base, token, client), aiohttp.ClientSession() as stranger:
        for path in SECRET:
            async with stranger.get(base + path) as answer:
                assert (answer.status, "streamrl" in await answer.text()) == (403, True)
            assert await status(client, base + path, headers={"Host": "rebound.example:80"}) == 403
            for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
                async with client.request(method, base + path) as answer:
                    assert answer.status == 405
        for wrong in ("", "x", token[:-1], token + "x", "é"):
            # A wrong token counts, whatever the cookie.
            assert await status(client, f"{base}/", params={"token": wrong}, allow_redirects=False) == 403
            assert await status(stranger, base, cookies={"streamrl": wrong}) == 403
        async with stranger.get(f"{base}//elsewhere.example/?token={token}", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (303, f"/{place_of(token)}/")
            cookie = answer.headers["Set-Cookie"]
            assert "HttpOnly" in cookie and "SameSite" in cookie
        for path in ("/nothing", "/static/../server.py", "/static/%2e%2e/server.py", "/static/vendor/"):
            assert await status(client, base + path) == 404


async def test_the_cookie_stays_within_the_pages_own_folder_whatever_the_port(run: RunDir) -> None:
    """Browsers bring cookies to every port of a host: nobody else on this machine may get one that opens the page."""
    heard: list[dict[str, str]] = []

    async def hear(request: web.Request) -> web.Response:
        heard.append(dict(request.cookies))
        return web.Response()

    other = web.Application()
    other.router.add_get("/{path:.*}", hear)
    write(run, batches(1, 3))
    async with page(run) as (base, token, client), served(other, 0) as port:
        async with client.get(f"{base}/../?token={token}") as answer:
            assert (answer.status, str(answer.url)) == (200, f"{base}/"), "the address that is printed leads there"
        assert await status(client, f"{base}/api/run") == 200
        for path in ("", "api/run", "static/page.js"):
            assert await status(client, f"http://127.0.0.1:{port}/{path}") == 200
    assert heard == [{}] * 3


async def test_every_answer_is_for_this_page_alone_and_its_log_may_be_away(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    async with page(run) as (base, token, client):
        for path in ("/", "/api/run", "/nothing", f"/?token={token}x"):
            async with client.get(base + path) as answer:
                assert answer.headers["Content-Security-Policy"].startswith("default-src 'self';")
                assert (answer.headers["X-Content-Type-Options"], answer.headers["Cache-Control"]) == ("nosniff", "no-store")
    monkeypatch.setattr("streamrl.page.log._ANSWER_S", 0.05)
    write(run, batches(1, 3))
    async with page(run) as (base, _, client):
        for path in ("/api/drops", "/api/letters", "/api/batches/1", "/api/batches/1/tasks/2"):
            async with client.get(base + path) as answer:
                assert answer.status == 503
                assert "cannot be read now" in await answer.text()
        assert (await told(client, f"{base}/api/versions"))["engines"] == []


async def test_series_are_what_the_rows_say(run: RunDir) -> None:
    write(run, batches(1, 3))
    async with page(run) as (base, _, client):
        found = await told(client, f"{base}/api/series?table=batch&x=version&names=rollout/raw_reward,train/loss")
        assert (found["x"], found["rows"]) == ([1, 2, 3], 3)
        assert found["values"] == {"rollout/raw_reward": [0.5] * 3, "train/loss": [None] * 3}
        run_told = await told(client, f"{base}/api/run")
        assert (run_told["run"], run_told["tables"]["batch"]) == ("demo", ["rollout/raw_reward", "staleness/max"])
        smooth = await told(client, f"{base}/api/series?table=batch&x=version&names=staleness/max&smooth=2")
        assert smooth["values"]["staleness/max"] == [1.0, 1.5, 1.0], "0, 1 and 2 of three batches, each with the one before"
        for query, code in (
            ("x=elapsed_s&names=", 400),
            ("names=nobody", 400),
            ("x=../..&names=", 400),
            ("table=../..&names=", 200),
            ("points=-1&last=x&names=", 200),
        ):
            assert await status(client, f"{base}/api/series?{query}") == code


async def test_tokens_are_an_axis_of_every_table_by_the_version_of_its_rows(run: RunDir) -> None:
    write(run, [batch(1e9 + number, number, {"rollout/tokens_trained": 10.0, "train/loss": 1.0}) for number in (1, 2, 3)])
    asked = ((2e9, 3, 0.75), (2e9 + 1, 1, 0.25), (2e9 + 2, 9, 1.0))  # that of version 1 ends late
    write(run, [Row(time_s=at, kind=EVALUATION, version=f"0.{number}", values={"eval/heldout": value}) for at, number, value in asked])
    write(run, [Row(time_s=1e9 + at, kind=WINDOW, version=version, values={"lag/stream_s": 4.0}) for at, version in ((0, ""), (2, "0.2"))])
    async with page(run) as (base, _, client):
        for table, name, x in (
            ("batch", "train/loss", [10, 20, 30]),
            ("evaluation", "eval/heldout", [10, 30, 30]),
            ("window", "lag/stream_s", [0, 20]),
        ):
            found = await told(client, f"{base}/api/series?table={table}&x=tokens&names={name}")
            assert found["x"] == x
        by_version = await told(client, f"{base}/api/series?table=evaluation&x=version&names=eval/heldout")
        assert (by_version["x"], by_version["values"]["eval/heldout"]) == ([1, 3, 9], [0.25, 0.75, 1.0])


async def test_what_is_looked_at_first_is_the_supervisors_or_the_summarys_and_else_nothing(run: RunDir) -> None:
    async with page(run) as (base, _, client):
        assert (await told(client, f"{base}/api/run"))["glance"] == {}
        account = Account(rollouts_trained=3, rollouts_ended=4, trained_share=0.75)
        summary = replace(summarize(RunView("demo"), wall_s=1.0), account=account)
        write_summary(summary, run.summary_path)
        write_state(run, RunState(state="finished", step=8))
        found = (await told(client, f"{base}/api/run"))["glance"]
        assert (found["verdict"], found["account"]) == (summary.verdict, account_words(account))
        glance = Glance(verdict=Verdict(learning=Learning.EARLY, text="early"), account=Account(), steps_per_minute=3.0)
        write_state(run, RunState(state="finished", step=9, glance=glance))
        found = (await told(client, f"{base}/api/run"))["glance"]
        assert (found["verdict"], found["account"], found["steps_per_minute"]) == ("early", [], 3.0)


async def test_a_page_that_nobody_looks_at_rests_until_somebody_does(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.page.server._REST_S", 3600.0)
    monkeypatch.setattr("streamrl.page.server._POLL_S", 0.05)
    write(run, batches(1, 3))

    async def rows() -> int:
        return (await told(client, f"{base}/api/series?names=rollout/raw_reward"))["rows"]

    async with page(run, works=True) as (base, _, client):
        monkeypatch.setattr("streamrl.page.attention.LOOKED_AT_S", 0.0)  # nobody is there from now on but at the moment of asking
        await asyncio.sleep(0.5)  # it has looked for the last time
        write(run, batches(4, 6))
        async with asyncio.timeout(60):
            while await rows() != 6:
                await asyncio.sleep(0.05)


async def test_live_events_come_at_once_and_pages_beyond_the_most_are_told_so(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.page.server._LISTENERS", 1)
    async with page(run) as (base, _, client), client.get(f"{base}/api/live") as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        async with asyncio.timeout(60):
            assert (await answer.content.readline()).startswith(b'data: {"run":"demo"')
        assert await status(client, f"{base}/api/live") == 503


async def test_a_taken_port_or_an_empty_token_is_a_sentence(run: RunDir) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(LaunchError, match="to be free"):
        async with served(web.Application(), taken.getsockname()[1]):
            pass
    token = page_token(run)
    path = run.credentials / "page-token"
    assert (page_token(run), path.stat().st_mode & 0o777) == (token, 0o600)
    path.unlink()
    assert page_token(run) != token
    path.write_text("\n")
    with pytest.raises(LaunchError, match="empty file"):
        page_token(run)


def beside(run: RunDir, name: str, rows: list[Row] | None = None) -> RunDir:
    """Another run of the same directory, of 40 batches."""
    other = RunDir(run.path.parent / name)
    other.create()
    other.write_config(Config(run=RunConfig(name=name, dir=str(run.path.parent)), tasks=TasksConfig(batch_tasks=3)))
    write(other, batches(1, 40, reward=0.25) if rows is None else rows)
    return other


def timed(first: int, last: int, *, every_s: float, tokens: float) -> list[Row]:
    values = {"tokens/trained_total": tokens, "perf/step_time": every_s, "train/loss": 2.0}
    return [batch(1e9 + number * every_s, number, values) for number in range(first, last + 1)]


def contents(path: Path) -> dict[str, tuple[int, bytes]]:
    return {str(one): (one.stat().st_mtime_ns, one.read_bytes()) for one in path.rglob("*") if one.is_file()}


async def test_both_runs_are_there_by_version_and_by_time_and_the_other_one_is_not_changed(run: RunDir) -> None:
    write(run, timed(1, 100, every_s=2.0, tokens=10.0))
    rows = [*timed(1, 50, every_s=1.0, tokens=10.0), Row(time_s=2e9, kind=WINDOW, values={"lag/stream_s": 1.0})]
    other = beside(run, "other", rows)
    before = contents(other.path)
    with indexed(run) as index:
        others = Others(run, run.load_config(), index)
        assert others.names() == ["other"]
        found = await others.compare(["other"], "version")
        assert found.reading is None
        first, second = found.runs
        assert (first.name, first.batches, first.seconds) == ("demo", 100, 198.0)
        assert (second.name, second.batches, second.seconds, second.x) == ("other", 50, 49.0, list(range(1, 51)))
        assert (first.last["throughput"], second.last["throughput"]) == (5.0, 10.0)
        assert (first.last["loss"], first.last["reward"]) == (2.0, None)
        assert ["tasks.batch_tasks", "3"] in [[key, value] for key, _, value in found.differences]
        first, second = (await others.compare(["other"], "elapsed_s")).runs
        assert (first.x[0], first.x[-1], second.x[-1]) == (0.0, 198.0, 49.0)
    assert contents(other.path) == before
    assert set(other.path.iterdir()) == {path for path in other.path.iterdir() if path.name != "page"}


async def test_rows_that_come_later_and_a_run_that_is_deleted_and_made_anew_are_seen(run: RunDir) -> None:
    other = beside(run, "other")
    with open_index(run) as index:
        others = Others(run, run.load_config(), index)
        assert (await others.compare(["other"], "version")).runs[1].batches == 40
        write(other, batches(41, 45))
        assert (await others.compare(["other"], "version")).runs[1].batches == 45
        shutil.rmtree(other.path)
        with pytest.raises(NotFound, match="other"):
            await others.compare(["other"], "version")
        assert not (page_folder(run) / "others" / "other").exists()
        beside(run, "other", batches(1, 7))
        assert (await others.compare(["other"], "version")).runs[1].batches == 7
    # What a page has left behind is of a run that may be another one by now.
    shutil.rmtree(other.path)
    beside(run, "other", batches(1, 3))
    with open_index(run) as index:
        assert (await Others(run, run.load_config(), index).compare(["other"], "version")).runs[1].batches == 3


async def test_only_runs_of_the_same_directory_can_be_opened(run: RunDir, tmp_path: Path) -> None:
    elsewhere = RunDir(tmp_path / "elsewhere" / "secret")
    elsewhere.create()
    elsewhere.write_config(Config())
    write(elsewhere, batches(1, 3))
    beside(run, "other")
    (run.path.parent / "linked").symlink_to(elsewhere.path)
    with_links = beside(run, "with-links")
    shutil.rmtree(with_links.metrics)
    with_links.metrics.symlink_to(elsewhere.metrics)
    with_file = beside(run, "with-file")
    (with_file.metrics / "metrics.jsonl").unlink()
    (with_file.metrics / "metrics.jsonl").symlink_to(elsewhere.metrics / "metrics.jsonl")
    with_pipe = beside(run, "with-pipe")
    (with_pipe.metrics / "metrics.jsonl").unlink()
    os.mkfifo(with_pipe.metrics / "metrics.jsonl")
    (run.path.parent / "no-run").mkdir()
    (run.path.parent / "a-file").write_text("x")
    async with page(run) as (base, _, client):
        assert set((await told(client, f"{base}/api/others"))["runs"]) == {"other", "with-file", "with-pipe"}
        for name in (
            *("linked", "with-links", "with-file", "no-run", "a-file", "demo", "nobody"),
            *("..", "%2e%2e", "..%2Felsewhere%2Fsecret", "x" * 300),
        ):
            assert await status(client, f"{base}/api/compare?runs={name}") == 404, name
        async with client.get(f"{base}/api/compare?runs=with-pipe") as answer:
            assert (answer.status, (await answer.json())["runs"][1]["batches"]) == (200, 0)
        assert await status(client, f"{base}/api/compare?runs=other&x=../..") == 400
        assert (await told(client, f"{base}/api/compare?runs=other&x=elapsed_s"))["runs"][1]["values"]["reward"] == [0.25] * 40


async def test_a_configuration_that_cannot_be_read_and_many_runs_leave_the_curves(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    beside(run, "other").config_path.write_text('{"run":{"nobody":1}}')
    with open_index(run) as index:
        found = await Others(run, run.load_config(), index).compare(["other"], "version")
    assert found.runs[1].batches == 40
    assert "nobody" in found.trouble
    monkeypatch.setattr("streamrl.page.others.MOST_KEPT", 2)
    for name in "abc":
        beside(run, name)
    with open_index(run) as index:
        others = Others(run, run.load_config(), index)
        for name in ("a", "b", "a", "c"):
            await others.compare([name], "version")
        assert {path.name for path in (page_folder(run) / "others").iterdir()} == {"a", "c"}
        assert (await others.compare(["b"], "version")).runs[1].batches == 40


async def test_many_runs_are_compared_over_any_axis_and_more_than_the_most_are_refused(run: RunDir) -> None:
    def rows(every_s: float) -> list[Row]:
        given = [{"rollout/tokens_trained": 10.0 * every_s, "train/loss": float(number % 2)} for number in range(4)]
        return [batch(1e9 + number * every_s, number, values) for number, values in enumerate(given, start=1)]

    write(run, rows(1.0))
    names = [f"other-{number}" for number in range(MOST_COMPARED + 1)]
    for number, name in enumerate(names, start=2):
        beside(run, name, rows(float(number)))
    changed = RunDir(run.path.parent / names[1])
    changed.write_config(Config(run=RunConfig(name=names[1], dir=str(run.path.parent)), tasks=TasksConfig(batch_tasks=5)))
    async with page(run) as (base, _, client):
        listed = await told(client, f"{base}/api/others")
        assert (set(listed["runs"]), listed["most"]) == (set(names), MOST_COMPARED)
        asked = f"{base}/api/compare?runs={','.join(names[:-1])}"
        assert await status(client, f"{asked},{names[-1]}") == await status(client, f"{base}/api/compare") == 400
        for axis, ends in (("version", [4, 4]), ("step", [4, 4]), ("tokens", [40, 80]), ("elapsed_s", [3, 6])):
            runs = (await told(client, f"{asked}&x={axis}"))["runs"]
            assert [one["name"] for one in runs] == ["demo", *names[:-1]]
            assert [one["x"][-1] for one in runs[:2]] == ends
        found = await told(client, f"{asked}&smooth=2")
        assert found["runs"][3]["values"]["loss"] == [0.0, 0.5, 0.5, 0.5]
        batch_tasks = str(Config().tasks.batch_tasks)
        [row] = [row for row in found["differences"] if row[0] == "tasks.batch_tasks"]
        assert row[1:] == [batch_tasks, "3", "5", *["3"] * (MOST_COMPARED - 2)]


def test_a_rate_is_taken_over_the_rows_that_have_both_numbers() -> None:
    amounts, seconds = np.array([math.nan, 10.0, 20.0, math.nan, 30.0]), np.array([1.0, 1.0, 0.0, 1.0, 2.0])
    assert [None if math.isnan(one) else one for one in rolling(amounts, seconds, 20).tolist()] == [None, 10.0, None, None, 40 / 3]
    assert rolling(np.full(5, 6.0), np.array([1.0, 1, 1, 2, 2]), 2).tolist() == [6, 6, 6, 4, 3]
    assert rolling(np.empty(0), np.empty(0), 20).tolist() == []
