"""The site in headless Chromium, as `make docs` built it: `make test-browser`. APPROVE=1 takes docs/images/site.png."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"

PATIENCE = 300_000  # milliseconds: a machine that is busy takes long to index what is searched

SIZES = """async paths => {
    const content = document.querySelector(".md-content__inner"), found = [];
    for (const path of paths) {
        const page = new DOMParser().parseFromString(await (await fetch(path)).text(), "text/html");
        content.innerHTML = page.querySelector(".md-content__inner").innerHTML;
        const wide = [...content.querySelectorAll("p, li, h1, h2, h3, img, pre, table")].filter(one =>
            one.getBoundingClientRect().right > innerWidth + 1 && !one.closest("pre, table, .output"));
        found.push([path, document.documentElement.scrollHeight, wide.map(one => one.textContent.slice(0, 60))]);
    }
    return found;
}"""
"""Of each page in place of the one that is shown: its height, and what stands out at the side."""

RESULTS = """async queries => {
    const {search} = JSON.parse(document.getElementById("__config").textContent);
    const index = await (await fetch("/search/search_index.json")).json();
    const worker = new Worker(new URL(search, location.href));
    const ask = message => new Promise(resolve => {
        worker.onmessage = event => resolve(event.data.data);
        worker.postMessage(message);
    });
    await ask({type: 0, data: {config: index.config, docs: index.docs, options: {suggest: true}}});
    const found = {};
    for (const query of queries) {
        const [first] = (await ask({type: 2, data: query})).items;
        found[query] = first && first.toSorted((one, other) => other.score - one.score)[0].location;
    }
    return found;
}"""
"""The first result of each query, by the script that searches for the site's box."""

FIRST = {
    "custom operator": "adding-an-operator/",
    "new operator": "adding-an-operator/",
    "priority": "embedding/#priority",
    "timeout": "embedding/#cancellation-and-timeouts",
    "cancel": "embedding/#cancellation-and-timeouts",
    "asyncio": "embedding/#asyncio-trio-threads",
    "thread": "tuning/",
    "batching": "embedding/#batching",
    "session": "embedding/#sessions",
    "kv cache": "embedding/#kv-caches-of-decoders",
    "backpressure": "embedding/#backpressure-limits-of-the-queue",
    "warm up": "embedding/#warm-start",
    "shut down": "embedding/#shutting-down",
    "compile": "embedding/#what-compile-does",
    "install": "overview/#install-and-run",
    "serve": "serving/#what-is-served",
    "grpc": "serving/",
    "http": "serving/",
    "prometheus": "serving/#metrics-for-prometheus",
    "docker": "deployment/",
    "kubernetes": "deployment/",
    "gpu": "cuda/",
    "onnx": "onnx/",
    "export": "onnx/",
    "load model": "onnx/",
    "save model": "plans/",
    "int8": "precision/",
    "quantization": "precision/",
    "trace": "tracing/",
    "profile": "tracing/",
    "race": "hazards/",
    "deadlock": "exploration/",
    "plugin": "plugins/",
    "fine tune": "training/#fine-tuning-a-model-that-was-loaded",
    "optimizer": "optimizers/",
    "learning rate": "optimizers/#the-counter-and-the-learning-rate",
    "checkpoint": "storage/",
    "memory": "memory/",
    "notebook": "notebooks/",
    "convolution": "convolution/",
    "stress": "failures/#dagexec-stress",
    "onnxruntime": "comparison/#onnxruntime",
    "dask": "comparison/#dask",
}
"""What a user types, and what shall be found first."""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """A page of the site, as a server without the network would give it."""
    from playwright.sync_api import sync_playwright

    handler = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        found = browser.new_page(base_url=f"http://127.0.0.1:{server.server_port}", reduced_motion="reduce")
        found.set_default_timeout(PATIENCE)
        yield found
        browser.close()
    server.shutdown()


def _show(page: Page, path: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(path)


def _paths(folder: str = "") -> list[str]:
    return [f"/{path.parent.relative_to(SITE)}/" for path in sorted((SITE / folder).rglob("index.html"))]


def test_pages_of_operators_are_short(page: Page) -> None:
    _show(page, "/reference/operators/signal/", 1280)
    sizes = page.evaluate(SIZES, _paths("reference/operators"))
    assert len(sizes) > 50
    assert [(path, height) for path, height, _ in sizes if height >= 5000] == []


def test_nothing_stands_out_at_the_side_of_a_narrow_page(page: Page) -> None:
    _show(page, "/tutorial/", 400)
    paths = [path for path in _paths() if not re.search(r"operators/.*-\d", path)]  # one of each family
    assert len(paths) > 130
    assert [(path, wide) for path, _, wide in page.evaluate(SIZES, paths) if wide] == []


def test_what_users_type_finds_its_page_first(page: Page) -> None:
    page.goto("/404.html")
    assert page.evaluate(RESULTS, list(FIRST)) == FIRST


def test_the_box_shows_what_is_found(page: Page) -> None:
    _show(page, "/", 1280)
    page.locator(".md-search__input").click()
    page.locator(".md-search__input").fill("custom operator")
    first = page.locator(".md-search-result__item a").first
    first.wait_for()
    assert "/adding-an-operator/" in (first.get_attribute("href") or "")


def test_the_first_page_has_the_three_uses_with_pictures_and_tabs(page: Page) -> None:
    _show(page, "/", 1280)
    assert page.locator(".md-tabs__link").all_inner_texts() == [
        "Start",
        "How to",
        "Reference",
        "Explanations",
        "Benchmarks",
    ]
    titles = page.locator("article h2").all_inner_texts()
    assert [title.split()[0] for title in titles] == ["Embed", "Compare", "Stress"]
    pictures = page.locator("article img")
    assert pictures.count() == 3
    assert all(pictures.evaluate_all("all => all.map(one => one.complete && one.naturalWidth > 300)"))
    if os.environ.get("APPROVE"):
        page.screenshot(path=ROOT / "docs" / "images" / "site.png")


def test_the_reference_begins_with_compile_and_its_examples_are_highlighted(page: Page) -> None:
    page.goto("/reference/modules/dagexec/")
    names = page.locator("article h2").evaluate_all("all => all.map(one => one.id)")
    assert names[:2] == ["dagexec.compile", "dagexec.Executor"]
    assert page.locator("[id='dagexec.Executor.run'], [id='dagexec.Executor.run_async']").count() == 2
    blocks = page.locator("article .highlight:not(.doc-signature):has(.k, .n)").all_inner_texts()
    for example in ("async with dagexec.compile", "with dagexec.Pool(workers=2) as pool:", "ws.run_net_once("):
        assert any(example in text for text in blocks)
    prose = page.locator("article p").all_inner_texts()
    assert [text for text in prose if "with dagexec." in text] == []
