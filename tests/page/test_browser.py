"""The page in a headless Chromium: it loads, goes on while a run trains, and asks nobody else for anything."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from streamrl.core.lengths import histogram
from streamrl.monitor.glance import account_words
from streamrl.monitor.numbers import Account, Glance, Learning, Verdict
from streamrl.monitor.run_state import RunState, write_state
from streamrl.monitor.series import EVALUATION, WINDOW, Row
from streamrl.page.access import page_token
from streamrl.page.address import address_of
from streamrl.page.index import COMMITS, LEDGER_TABLE, open_index
from streamrl.runtime.lock import lock_run
from streamrl.runtime.rundir import RunDir
from tests.page.conftest import batch, batches, page, write
from tests.page.test_branch import branched
from tests.page.test_server import beside
from tests.support.digits import TABLE, write_digits
from tests.support.looked_at import sets
from tests.support.needs import browser
from tests.support.processes import find, send, server_pid, until
from tests.support.programs import STREAMRL, Start, said

if TYPE_CHECKING:
    from playwright.async_api import Page, Route

pytestmark = [pytest.mark.needs("browser"), pytest.mark.process]
PATIENCE_MS = 60_000
LONG = "\u202e\u2067x\u0000" * 5_000
"""As long a line as the server sends, written from right to left."""
HOSTILE = '<img src=x onerror="document.title=`owned`"><script>document.title="owned"</script>'
ENDLESS = (
    *("run.steps=100000", "tasks.drop_zero_variance=false", "metrics.window_s=1", "supervise.backoff_s=0.1"),
    "debug.token_delay_s=0.05",  # or it trains as fast as both cores can while the page is looked at
)
HELD = ("slo.hold_s=1", "slo.starvation=0.001", "slo.p95_age=1000")


@asynccontextmanager
async def opened(address: str, *, scheme: Any = "light", cut: bool = False) -> AsyncIterator[Page]:
    """A tab with the page. No other host may be asked, and nothing be written to the console; where the server is `cut` off, nothing but
    Chromium's own lines on requests that had no answer.
    """
    from playwright.async_api import async_playwright

    async with async_playwright() as player:
        chromium = await player.chromium.launch(executable_path=browser(), args=["--no-sandbox", "--disable-gpu"])
        try:
            tab = await chromium.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 900})
            tab.set_default_timeout(PATIENCE_MS)
            told: list[str] = []
            asked: list[str] = []
            tab.on("console", lambda message: told.append(f"{message.type}: {message.text}"))
            tab.on("pageerror", lambda error: told.append(str(error)))
            tab.on("request", lambda request: asked.append(request.url))
            await tab.goto(address)
            yield tab
            origin = address.partition("?")[0]
            assert [url for url in asked if not url.startswith(origin)] == []
            assert [line for line in told if not (cut and line.startswith("error: Failed to load resource: net::"))] == []
        finally:
            await chromium.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_charts_are_drawn_in_both_colour_schemes_and_by_keyboard_alone(run: RunDir, scheme: str) -> None:
    write(run, batches(1, 300))
    async with page(run) as (base, token, _), opened(f"{base}/?token={token}", scheme=scheme) as tab:
        await tab.wait_for_selector("section[aria-label=Reward] canvas")
        ground = await tab.evaluate("getComputedStyle(document.body).backgroundColor")
        dark = sum(map(int, re.findall(r"\d+", ground)[:3])) < 3 * 128
        assert dark is (scheme == "dark")
        assert "token" not in tab.url
        for name in ("Versions", "Drops", "Samples", "All metrics"):
            link = tab.get_by_role("link", name=name)
            await link.focus()
            await tab.keyboard.press("Enter")
            await tab.wait_for_selector(f"nav a[aria-current=page]:text-is('{name}')")
        await tab.get_by_role("searchbox").fill("staleness")
        await tab.wait_for_selector("section[aria-label^='staleness/max'] canvas")


async def test_runs_are_drawn_beside_each_other_by_version_and_by_time(run: RunDir) -> None:
    write(run, batches(1, 300))
    beside(run, "other")
    beside(run, "third", batches(1, 7))
    async with page(run) as (base, token, _), opened(f"{base}/?token={token}") as tab:
        await tab.get_by_role("link", name="Compare").click()
        await tab.get_by_label("Add a run").select_option("other")
        await tab.wait_for_selector("section[aria-label=Reward] canvas")
        legend = tab.locator("section[aria-label=Reward] .u-legend")
        assert [name in await legend.inner_text() for name in ("demo", "other", "version")] == [True] * 3
        await tab.get_by_label("Over").select_option("elapsed_s")
        await tab.wait_for_selector("section[aria-label=Reward] .u-legend:has-text('seconds since')")
        assert await tab.locator("tr:has-text('batches') td").all_inner_texts() == ["batches", "300", "40"]
        await tab.get_by_label("Add a run").select_option("third")
        await tab.wait_for_selector("section[aria-label=Reward] .u-legend:has-text('third')")
        assert await tab.locator("tr:has-text('batches') td").all_inner_texts() == ["batches", "300", "40", "7"]
        await tab.get_by_role("button", name=re.compile("^other ")).click()
        await tab.locator("th:text-is('other')").first.wait_for(state="detached")
        await tab.wait_for_selector("tr:has-text('batches') td:text-is('7')")
        assert await tab.locator("td:text-is('tasks.batch_tasks')").count() == 1


async def test_a_branch_says_what_it_is_and_has_recorded_rewards_loss_and_its_distance(run: RunDir) -> None:
    write(run, batches(1, 6))
    twig = branched(run, 6)
    async with page(twig) as (base, token, _), opened(f"{base}/?token={token}") as tab:
        await tab.wait_for_selector("h2:text-is('A branch of demo from version 0.0')")
        for title in ("Recorded reward, of demo's samples", "Loss", "Distance to the parent, nats"):
            await tab.locator("section.chart").filter(has=tab.locator(f'h2:text-is("{title}")')).locator("canvas").wait_for()
        assert "branch of demo" in await tab.locator("#state").inner_text()
        assert "Versions" not in await tab.locator("nav a").all_inner_texts()
        await tab.get_by_role("link", name="Beside demo").click()
        await tab.wait_for_selector('section[aria-label=Reward] .u-legend:has-text("recorded with demo\'s samples")')
        for title, cells in {"reward": ["\u2013", "0.5"], "recorded reward": ["0.25", "\u2013"]}.items():
            row = tab.locator("tr").filter(has=tab.locator(f"td:text-is('{title}')"))
            assert (await row.locator("td").all_inner_texts())[1:] == cells


async def test_views_that_have_no_answer_say_so_and_are_drawn_once_they_have(run: RunDir) -> None:
    write(run, batches(1, 30))
    beside(run, "other")
    drawn = {"overview": "canvas", "metrics": "canvas", "compare/other": "canvas", "versions": "h2:text-is('Engines')"}
    async with page(run) as (base, token, _), opened(f"{base}/?token={token}", cut=True) as tab:
        await tab.wait_for_selector("section[aria-label=Reward] canvas")
        for place, selector in drawn.items():
            await tab.route(f"{base}/api/**", lambda route: route.abort())
            await tab.evaluate("place => { location.hash = place }", place)
            await tab.wait_for_selector("#failed:text-matches('does not answer')")
            await tab.unroute_all()
            await tab.wait_for_selector(f"main {selector}")
            await tab.wait_for_selector("#failed", state="hidden")


async def test_lanes_are_coloured_by_the_version_of_each_turn_with_tools_between(run: RunDir) -> None:
    write(run, batches(1, 3))
    turn = {"asked_s": 2.0, "began_s": 3.0, "finished_s": 4.0, "first_version": "0.3", "last_version": "0.3"}
    turns = [turn, {"asked_s": 7.0, "began_s": 0.0, "finished_s": 8.0, "first_version": "0.4", "last_version": "0.4"}]
    line = {"batch": "0.5", "task": 1, "rollout": 0, "first_version": "0.3", "last_version": "0.4", "turns": turns}
    batch = {"version": "0.5", "time_s": 12.0, "digest": "", "source": "main", "num_groups": 1, "missing": 0, "drops": []}
    batch["samples"] = [line | {"times": {"claimed": 1.0, "started": 2.0, "finished": 9.0, "scored": 11.0}}]
    async with page(run) as (base, token, _), opened(f"{base}/?token={token}", cut=True) as tab:
        await tab.route(f"{base}/api/batches/5", partial(fulfil, batch))
        await tab.route(f"{base}/api/samples?**", lambda route: route.abort())
        await tab.evaluate("location.hash = 'samples/5'")
        await tab.wait_for_selector("svg.lanes rect")
        said = await tab.evaluate(
            "[...document.querySelectorAll('svg.lanes rect')].map((one) => [one.getAttribute('class'), one.textContent])"
        )
    assert [(kind, text.partition(": ")[2]) for kind, text in said] == [
        ("wait", "waits 1 s"),
        ("wait", "waits for an engine 1 s"),
        ("f1", "version 0.3 generates 1 s"),
        ("tools", "tools and other code of the rollout 3 s"),
        ("f0", "version 0.4 generates 1 s"),
        ("tools", "tools and other code of the rollout 1 s"),
        ("reward", "reward 2 s"),
        ("after", "in the queue and in the step 1 s"),
    ]


async def test_the_version_that_each_engine_serves_is_drawn_and_those_left_out_are_counted(run: RunDir) -> None:
    write(run, batches(1, 3))
    with open_index(run) as index:
        for number in range(1, 6):
            digest = {"epoch": 0.0, "time_s": 1e9 + number, "digest_high": 1.0, "digest_low": float(number)}
            index.add(LEDGER_TABLE, {"version": number, "sequence": number, **digest}, source="ledger", mark=number)
        for engine in range(11):
            row = {"version": 1.0 + engine % 5, "epoch": 0.0, "time_s": 1e9 + engine}
            index.add(f"{COMMITS}engine-{engine}", row, source="events", mark=engine)
        index.commit()
    async with page(run) as (base, token, _), opened(f"{base}/?token={token}#versions") as tab:
        chart = tab.locator("section[aria-label='Version served, and trained']")
        await chart.locator("canvas").wait_for()
        said = await chart.locator(".u-legend").inner_text()
        assert [name in said for name in ("trained", "engine-3", "engine-10", "engine-2")] == [True, True, True, False]
        await tab.wait_for_selector("p:text-matches('; 3 more are not drawn')")


async def test_the_overview_has_what_became_of_tokens_the_lag_in_tokens_and_lengths_by_their_end(run: RunDir) -> None:
    ends = {"tokens/trained_total": 80.0, "tokens/masked_total": 5.0, "tokens/dropped_total/stale": 15.0}
    now = {"tokens/sampled_total": 90.0, "tokens/published_total": 60.0, "tokens/cut_total": 30.0, "lag/stream_tokens": 4321.0}
    now |= {f"lengths/{what}_{part}": 7.0 for what in ("finished", "cut", "trained", "dropped") for part in ("p50", "p95")}
    write(run, [batch(1e9 + 10 * at, at, ends) for at in (1, 2)])
    write(run, [Row(time_s=1e9 + 30 * at, kind=WINDOW, values=now) for at in (1, 2, 3)])
    async with page(run) as (base, token, _), opened(f"{base}/?token={token}") as tab:
        await unfold(tab)
        for title, names in {
            "Tokens a second": ("sampled", "published", "cut, never published"),
            "What became of published tokens, by batch": ("trained", "masked", "dropped: stale"),
            "Behind the newest batch, tokens": ("on the stream",),
            "Lengths of answers by their end, median, tokens": ("finished", "cut", "trained", "dropped"),
            "Lengths of answers by their end, p95, tokens": ("finished", "cut", "trained", "dropped"),
        }.items():
            await tab.wait_for_selector(f"section[aria-label='{title}'] canvas")
            said = await tab.locator(f"section[aria-label='{title}'] .u-legend").inner_text()
            assert [name for name in names if name not in said] == []
        cards = await tab.locator(".card").all_inner_texts()
        assert [card.split() for card in cards if "sampled" in card or "lag, tokens" in card] == [
            ["3", "tokens/s", "sampled"],
            ["4,321", "stream", "lag,", "tokens"],
        ]


async def test_the_first_row_says_whether_it_learns_and_the_rest_is_unfolded_and_stays_so(run: RunDir) -> None:
    parts = {"rollout/reward_part/right": 0.75, "rollout/reward_part/short": 0.25}
    write(run, [batch(1e9 + at, at, {"rollout/raw_reward": at / 40, **parts}) for at in range(1, 41)])
    asked = {"eval/gsm8k": 0.5, "eval/gsm8k-ci_low": 0.4, "eval/gsm8k-ci_high": 0.6}
    write(run, [Row(time_s=1e9 + at, kind=EVALUATION, version=f"0.{at}", step=at, values=asked) for at in (10, 40)])
    verdict = Verdict(learning=Learning.RISING, text=f"Learning {HOSTILE}: reward 0.3 -> 0.8; engines make 8.0k tokens/s: add engines.")
    account = Account(rollouts_ended=40, trained_share=0.75, trainer_s=100.0, engine_s=90.0, trainer_gpu_s=100.0, gpu_s=100.0)
    glance = Glance(verdict=verdict, account=account, heldout_set="gsm8k", steps_per_minute=7.25, left_s=3725.0)
    write_state(run, RunState(state="running", step=40, steps=99, glance=glance))
    with lock_run(run):
        async with page(run) as (base, token, _), opened(f"{base}/?token={token}") as tab:
            await tab.wait_for_selector("section[aria-label=Held-out] canvas")
            assert await tab.locator("p.verdict").inner_text() == verdict.text
            for title, names in {"Reward": ("mean of the batch", "right", "short"), "Held-out": ("gsm8k", "95 % from", "to")}.items():
                said = await tab.locator(f"section[aria-label='{title}'] .u-legend").inner_text()
                assert [name for name in names if name not in said] == []
            assert await tab.locator("section[aria-label=Reward] h2").inner_text() == "Reward mean of 20 batches"
            tiles = [
                (await tab.locator(f"section[aria-label='{name}']").inner_text()).split("\n")[0] for name in ("Steps a minute", "Time left")
            ]
            assert tiles == ["7.25", "1:02:05"]
            told = await tab.locator("p.soft:has-text('rollouts trained')").inner_text()
            assert told.split(" · ") == account_words(account)
            tops = [
                (await tab.locator(f"section[aria-label='{name}']").bounding_box() or {})["y"]
                for name in ("Reward", "Held-out", "Time left")
            ]
            assert len(set(tops)) == 1, "one row"
            hidden = tab.locator("section[aria-label='Reward, batch by batch'] canvas")
            assert await hidden.count() == 0
            await unfold(tab)
            await hidden.wait_for()
            await tab.reload()
            await hidden.wait_for()
            await unfold(tab)
            await hidden.wait_for(state="detached")
            write_state(run, RunState(state="running", step=41, steps=99))
            await tab.wait_for_selector("p.verdict", state="hidden")


async def test_smoothing_scale_and_axis_are_the_readers_and_stay_so(run: RunDir) -> None:
    """Rewards of 0, 0.5, 1, 0, ... of 10 tokens each: on a log scale a third of the points has no place."""
    values = [{"rollout/raw_reward": at % 3 / 2, "rollout/tokens_trained": 10.0} for at in range(30)]
    write(run, [batch(1e9 + at, at, {**one, "rollout/advantages_std": 1.0}) for at, one in enumerate(values, start=1)])
    async with page(run) as (base, token, _), opened(f"{base}/?token={token}") as tab:
        chart = tab.locator("section[aria-label=Reward]")
        await chart.locator(".u-legend:has-text('version')").wait_for()
        await tab.get_by_label("X axis").select_option("tokens")
        await tab.get_by_label("Smoothing").select_option("5 rows")
        await chart.locator(".u-legend:has-text('tokens trained')").wait_for()
        await chart.locator("h2:has-text('mean of 5 batches')").wait_for()
        await tab.get_by_label("log scale").set_checked(True)
        await chart.locator("p:text-is('a log scale has no place for values of 0 or less: 1 points are not drawn')").wait_for()
        await tab.get_by_label("Smoothing").select_option("1 rows")
        await chart.locator("p:has-text(': 10 points are not drawn')").wait_for()
        await tab.get_by_role("link", name="All metrics").click()
        std = tab.locator("section[aria-label^='rollout/advantages_std']")
        await std.locator(".u-legend:has-text('tokens trained')").wait_for()
        await tab.get_by_label("X axis").select_option("time_s")
        await std.locator(".u-legend:has-text('time')").wait_for()
        await tab.get_by_role("link", name="Overview").click()
        await tab.reload()
        await chart.locator(".u-legend:has-text('time')").wait_for()
        assert await tab.get_by_label("Smoothing").input_value() == "1 rows"


async def test_lengths_by_their_end_are_histograms_below_each_other_with_their_distance(run: RunDir) -> None:
    write(run, batches(1, 3))
    counts = {"lengths/finished": histogram([2, 40]), "lengths/trained": histogram([2, 2, 2]), "lengths/cut": histogram([40])}
    write_state(run, RunState(state="finished", step=3, lengths=counts, length_distance=0.5, length_cut=True))
    async with page(run) as (base, token, _), opened(f"{base}/?token={token}") as tab:
        await unfold(tab)
        rows = tab.locator("section.box:has(h2:text-is('Answer lengths by their end')) tbody tr")
        await rows.first.wait_for()
        assert [text.split("\t")[:3] for text in await rows.all_inner_texts()] == [
            ["finished", "2", "2"],
            ["cut, never stored", "1", "39"],
            ["trained", "3", "2"],
            ["dropped", "0", "\u2013"],
        ]
        await tab.wait_for_selector("p:text-is('distance 0.50 of the lengths trained from those trained, dropped or cut')")
        high = "row => [...row.querySelectorAll('rect')].filter((one) => one.getAttribute('height') > 0).map((one) => one.textContent)"
        assert await rows.nth(2).evaluate(high) == ["2 tokens: 100 % of the trained"]
        assert [text.partition(": ")[2] for text in await rows.nth(0).evaluate(high)] == ["50 % of the finished"] * 2
        write_state(run, RunState(state="finished", step=3, lengths=counts | {"lengths/dropped": histogram([7])}, length_distance=0.25))
        await tab.wait_for_selector("p:text-is('distance 0.25 of the lengths trained from those trained or dropped')")


async def test_a_tab_in_the_background_lets_go_of_the_line_and_is_up_to_date_when_it_is_back(run: RunDir) -> None:
    write(run, batches(1, 3))
    hide = (
        "(hidden) => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange')) }"
    )
    async with page(run, works=True) as (base, token, _), opened(f"{base}/?token={token}") as tab:
        lines: list[str] = []
        tab.on("request", lambda request: lines.append("asked") if request.url.endswith("/api/live") else None)
        tab.on("requestfailed", lambda request: lines.append("let go") if request.url.endswith("/api/live") else None)
        await tab.wait_for_selector("section[aria-label=Reward] canvas")
        await tab.evaluate(hide, True)
        await until(lambda: lines[-1:] == ["let go"], within_s=PATIENCE_MS / 1000)
        write(run, batches(4, 9, reward=7.0))
        await tab.evaluate(hide, False)
        await tab.wait_for_selector(".card b:text-is('7')")
        assert lines[-2:] == ["let go", "asked"]


async def test_an_engine_that_comes_later_has_its_line(run: RunDir) -> None:
    def swap(engine: str, at: int) -> Row:
        return Row(time_s=1e9 + at, kind=WINDOW, of=engine, values={"engine/swap_ms": float(at)})

    write(run, [*batches(1, 3), swap("engine-0", 1)])
    async with page(run, works=True) as (base, token, _), opened(f"{base}/?token={token}#versions") as tab:
        legend = "section[aria-label='Swap, ms'] .u-legend"
        await tab.wait_for_selector(f"{legend}:has-text('engine-0')")
        write(run, [swap("engine-1", 2)])
        await tab.wait_for_selector(f"{legend}:has-text('engine-1')")


async def test_text_of_a_run_is_text(run: RunDir) -> None:
    """Names of workers, notes, prompts and reasons come from a run, and anybody may have written them."""
    write(run, batches(1, 3))
    said = {"role": HOSTILE, "text": HOSTILE, "sampled": True, "start": 0, "num_tokens": 2, "engine": HOSTILE, "finish_reason": HOSTILE}
    group = [
        {"task": 1, "rollout": 0, "sample": 0, "reward": 1, "reward_parts": {HOSTILE: 1}, "status": HOSTILE, "num_tokens": 2}
        | {"prompt": HOSTILE, "label": HOSTILE, "tokens": [HOSTILE, "x"], "ids": [1, 2], "versions": [None, "0.1"], "mask": [0, 1]}
        | {"logprobs": [0, -0.5], "became": HOSTILE, "metadata": HOSTILE, "engine": HOSTILE, "producer": HOSTILE, "finish_reason": HOSTILE}
        | {"weights": [None, 1.5], "trainer_logprobs": [None, -0.1]}
        | {"conversation": [{**said, "seconds": 1}, {**said, "text": LONG, "seconds": None}]}
    ]
    drop = {"version": HOSTILE, "sequence": 1, "task": 1, "rollouts": [0], "reason": HOSTILE, "detail": HOSTILE}
    letter = {"time_s": 1, "sequence": 1, "subject": HOSTILE, "task": None, "num_bytes": 1, "reason": HOSTILE}
    answers = {
        "api/notes": [{"time_s": 1, "worker": HOSTILE, "kind": "notice", "text": HOSTILE}],
        "api/drops": [drop],
        "api/letters": [letter],
        "api/batches/1/tasks/1": {"samples": group, "more": 0, "weights": {}},
    }
    async with page(run) as (base, token, _), opened(f"{base}/?token={token}") as tab:
        for path, answer in answers.items():
            await tab.route(f"{base}/{path}", partial(fulfil, answer))
        for place, least in (("overview", 2), ("drops", 5), ("samples/1/1", 4)):
            await tab.goto(f"{base}/#{place}")
            await tab.reload()
            await holds(tab, f"document.querySelector('main').textContent.split('<script>').length > {least}")
            assert await tab.evaluate("document.querySelectorAll('main img, main script').length") == 0
            assert await tab.title() == "demo · streamrl"
        assert await tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), "a long line is broken, or scrolls within its box"
        for way in ("version", "logprob", "weight", "mask"):
            await tab.get_by_label("Shown").select_option(way)
            await holds(tab, "document.querySelector('.group').textContent.split('<script>').length > 4")
            assert await tab.evaluate("document.querySelectorAll('main img, main script').length") == 0


@pytest.mark.nats
@pytest.mark.timeout(400)
async def test_it_goes_on_while_a_run_trains_and_its_trainer_and_server_are_killed(start: Start, tmp_path: Path) -> None:
    write_digits(tmp_path, TABLE)
    streamrl = partial(start, *STREAMRL)
    run = RunDir(tmp_path / "runs" / "digits")
    up = await streamrl("up", "run.toml", "--plain", *sets(*ENDLESS, *HELD))
    await until(lambda: address_of(run), within_s=120)
    async with opened(address_of(run)) as tab:
        await tab.wait_for_selector("section[aria-label=Reward] canvas")
        await later(tab)
        await tab.wait_for_selector("td:has(span:text-is('starvation')) + td .bad:text-is('breach')")
        assert await tab.locator("tr:has(span:text-is('starvation')) td").last.inner_text() != ""
        assert await tab.locator("td:has(span:text-is('p95_age')) + td").inner_text() == "ok"
        await unfold(tab)
        for title in ("Where the trainer\\'s time goes", "Where the time of producers\\' slots goes", "Where the engines\\' time goes"):
            await tab.wait_for_selector(f"section[aria-label='{title}'] canvas")
        (trainer,) = find("worker", "trainer", str(run.path))
        send(trainer, signal.SIGKILL)
        await later(tab)
        server = server_pid(run)
        assert server is not None
        send(server, signal.SIGKILL)
        await later(tab)
        await tab.get_by_role("link", name="Versions").click()
        await tab.wait_for_selector("td .good:text-matches('^all .* = ledger$')")
        assert await tab.locator("td .bad").count() == 0
        await tab.get_by_role("link", name="Samples").click()
        await tab.wait_for_selector("svg.lanes rect")
        await tab.get_by_label("batches to look at").fill("20")
        await tab.get_by_label("status").select_option("completed")
        await tab.wait_for_selector("p:text-matches('samples of [0-9]+ batches')")
        await tab.locator("td:nth-child(2) a").first.click()
        await tab.wait_for_selector(".said.sampled")
        await tab.get_by_label("Shown").select_option("version")
        await tab.wait_for_selector(".tokens span[class^=v]")
        assert await tab.locator("#trouble").is_hidden()
    async with opened(address_of(run), cut=True) as tab:
        await later(tab)
        (server_of_the_page,) = find("page", str(run.path))
        send(server_of_the_page, signal.SIGKILL)
        await later(tab)
        await holds(tab, "document.getElementById('trouble').hidden")
    assert (await said(await streamrl("down", "digits")))[0] == 0
    assert f"page: {'http://127.0.0.1:'}" in (await said(up))[1]
    assert find("page", str(run.path)) == []
    assert [path for path in run.logs.iterdir() if page_token(run) in path.read_text()] == []

    over = await streamrl("page", "digits")
    assert over.stderr is not None
    address = (await over.stderr.readline()).decode().strip()
    async with opened(address) as tab:
        await tab.wait_for_selector("section[aria-label=Reward] canvas")
        await tab.get_by_role("link", name="Samples").click()
        await tab.wait_for_selector("svg.lanes rect")
    second = await said(await streamrl("page", "digits"))
    assert (second[0], address in second[1]) == (0, True)
    over.send_signal(signal.SIGINT)
    assert (await said(over))[0] == 0


async def unfold(tab: Page) -> None:
    """Show all charts of the overview."""
    await tab.get_by_text("All charts", exact=True).click()


async def fulfil(answer: Any, route: Route) -> None:
    await route.fulfill(json=answer)


async def later(tab: Page) -> None:
    """Return once the page shows a later step, without having been loaded again."""
    step = "Number((document.getElementById('state').textContent.match(/step (\\d+)/) || [])[1])"  # no number while the run begins
    await holds(tab, f"{step} >= 0")
    before = await tab.evaluate(step)
    await holds(tab, f"{step} > {before} + 3")


async def holds(tab: Page, condition: str) -> None:
    """Return once it does. Playwright's own way evaluates text within the page, which the page does not allow."""
    async with asyncio.timeout(PATIENCE_MS / 1000):
        while not await tab.evaluate(condition):
            await asyncio.sleep(0.1)
