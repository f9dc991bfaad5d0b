"""The pictures of the page in docs/pictures, of a real run: `python scripts/page_pictures.py` trains the quickstart and looks at it.

It needs a Chromium and playwright, as the tests of the page do.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from playwright.async_api import Browser, async_playwright

from streamrl.page.address import address_of
from streamrl.runtime.rundir import RunDir
from tests.support.needs import browser

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
STEP = 110
"""The step of reinforcement learning that the pictures show."""


async def picture(
    chromium: Browser, address: str, place: str, *, scheme: str, name: str, wait_for: str, height: int, group: bool = False
) -> None:
    """One view; `group`: of the first task with a rollout that got it wrong, its tokens by log-probability."""
    context = await chromium.new_context(color_scheme="dark" if scheme == "dark" else "light", viewport={"width": 1180, "height": height})
    tab = await context.new_page()
    await tab.goto(address)
    await tab.goto(f"{tab.url}#{place}")  # below the run's own folder, which the token has led to
    await tab.wait_for_selector(wait_for)
    if group:
        await tab.get_by_label("reward ≤").fill("0.5")
        await tab.get_by_label("batches to look at").fill("4")
        await tab.wait_for_selector("td:nth-child(4):text-is('0')")
        await tab.locator("td:nth-child(2) a").first.click()
        await tab.get_by_label("Shown").select_option("logprob")
    await asyncio.sleep(3)
    await tab.screenshot(path=PICTURES / f"{name}.png")
    await context.close()


async def main() -> None:
    """Train, look, stop."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder) / "quickstart")
        words = (
            "up",
            "examples/quickstart/quickstart.toml",
            "--plain",
            "--set",
            f"run.dir={folder}",
            "--set",
            "metrics.window_s=2",
            "--set",
            "run.max_seconds=0",
        )
        up = await asyncio.create_subprocess_exec(sys.executable, "-m", "streamrl", *words, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
        assert up.stdout is not None
        async for line in up.stdout:
            if _step(line.decode()) >= STEP:
                break
        address = address_of(run)
        assert address, "the run has ended before it was looked at"
        async with async_playwright() as player:
            chromium = await player.chromium.launch(executable_path=browser(), args=["--no-sandbox", "--disable-gpu"])
            canvas = "section[aria-label=Reward] canvas"
            await picture(chromium, address, "overview", scheme="light", name="page", wait_for=canvas, height=1160)
            await picture(chromium, address, "overview", scheme="dark", name="page-dark", wait_for=canvas, height=1160)
            await picture(chromium, address, "samples", scheme="light", name="page-batch", wait_for="svg.lanes rect", height=620)
            link = "td:nth-child(2) a"
            await picture(chromium, address, "samples", scheme="dark", name="page-group", wait_for=link, height=960, group=True)
            await chromium.close()
        up.terminate()
        await up.communicate()


def _step(line: str) -> int:
    """Read the step from a line of `up --plain`; 0 for any other line."""
    text = line.partition(" step=")[2].partition("/")[0]
    return int(text) if text.isdigit() else 0


if __name__ == "__main__":
    asyncio.run(main())
