"""The pictures of the site's first page, made by dagexec itself: python docs/site/pictures.py

It measures, so that a picture differs from time to time; the schedule that fails is the same each time.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import sync_playwright

import dagexec
from dagexec.analysis import compare
from dagexec.analysis.plot import plot_comparison
from dagexec.analysis.story import explain
from dagexec.core.drawing.pictures import lanes_picture
from dagexec.report.document import Report
from dagexec.report.exploration import ExplorationSection
from dagexec.scheduler.exploration import explore_seeds
from dagexec.testing import random_feeds
from dagexec.tracing import Trace
from tests.scheduler.exploration.test_exploration_pool import EarlyPool
from tests.scheduler.scenarios import DIAMOND, pool_scenario

IMAGES = Path(__file__).parents[1] / "images"


async def embed(path: Path, requests: int = 8) -> None:
    """Requests of tasks of an event loop on two workers, a color for each request."""
    trace = Trace()
    async with dagexec.compile(
        "zoo:squeezenet", net_type="dag", num_workers=2, replicas=4, warm_start=True
    ) as executor:
        feeds = random_feeds(executor.model)
        await asyncio.gather(*(executor.run_async(feeds) for _ in range(requests)))
        await asyncio.gather(*(executor.run_async(feeds, trace=trace) for _ in range(requests)))
    began = min(chain.start for chain in trace.chains)
    lanes = [
        (
            f"worker {number}",
            [
                (one.start - began, one.end - began, f"request {one.run}", one.run)
                for one in trace.chains
                if one.thread == thread
            ],
        )
        for number, thread in enumerate(sorted({chain.thread for chain in trace.chains}))
    ]
    picture = lanes_picture(lanes).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" color="#888" ', 1)
    path.write_text(picture + "\n")


def stress(path: Path) -> None:
    """The story of a schedule in which a pool with a planted mistake starts a chain too early."""
    scenario = pool_scenario(DIAMOND, 2, EarlyPool)
    result = explore_seeds(scenario, range(200))
    assert result.failed is not None
    story = explain(scenario, result.failed)
    section = ExplorationSection(result, "seeds", "dagexec explore MODEL --replay 1:1", story)
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_path = Path(folder) / "report.html"
        Report("net", (), [section]).write(page_path)
        chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 900, "height": 900}, color_scheme="light")
        page.goto(page_path.as_uri())
        page.wait_for_selector("html[data-drawn]")
        lanes = page.locator("#exploration .lanes").bounding_box()
        operators = page.locator("#exploration .lanes .executing").evaluate_all(
            "all => all.map(one => one.getBoundingClientRect().top)"
        )
        assert lanes is not None
        top, bottom = min(operators) - 110, max(operators) + 50
        area = {"x": lanes["x"], "y": top, "width": 455, "height": bottom - top}
        page.screenshot(path=path, full_page=True, clip=area)
        browser.close()


if __name__ == "__main__":
    asyncio.run(embed(IMAGES / "use-embed.svg"))
    comparison = compare("zoo:squeezenet_towers", net_types=("dag", "async_dag"), workers=(1, 2))
    plot_comparison(comparison, IMAGES / "use-compare.svg")
    stress(IMAGES / "use-stress.png")
