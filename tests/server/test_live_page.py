"""The live page in Chromium, of a server under load: `make test-browser`. With `APPROVE=1` it takes pictures."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest

from dagexec.options import CompileOptions
from dagexec.server.config import ModelConfig, ServerConfig
from dagexec.server.run import Server
from tests.chromium import chromium
from tests.held import PATIENCE, doubled_model
from tests.server.serving import on_loop, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=alert(1)>'\"&amp;\\u003c"
PICTURES = Path(__file__).parents[2] / "docs" / "images"
Open = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def loaded() -> Iterator[Server]:
    """A server of three models that four clients ask without a pause; one of the models cannot be loaded."""
    models = [
        ModelConfig(name="classifier", source="zoo:lenet"),
        ModelConfig(name="ranker", source=doubled_model(), options=CompileOptions(max_batch=8, max_wait=0.002)),
        ModelConfig(name=HOSTILE, source=doubled_model(), timeout=0.5),
        ModelConfig(name="missing", source="no-such.onnx"),
    ]
    config = ServerConfig(name=HOSTILE, models={one.name: one for one in models}, control=True)
    load = (
        ("classifier", (1, 1, 28, 28), "data", 0.1),
        ("ranker", (1, 3), "x", 0.03),
        ("ranker", (2, 3), "x", 0.03),
        (HOSTILE, (1, 3), "x", 0.1),
        (HOSTILE, (1, 4), "x", 0.2),  # is refused
    )
    with serving(config) as server, under_load(server, load, HOSTILE):
        yield server


@contextmanager
def under_load(server: Server, load: Iterable[tuple[str, tuple[int, ...], str, float]], id: str) -> Iterator[None]:
    """Clients that ask for a model again and again, with an input of this shape and name, after each a pause."""
    stop = threading.Event()

    def ask(model: str, shape: tuple[int, ...], name: str, pause: float) -> None:
        data = np.zeros(shape, np.float32)
        told = {"name": name, "datatype": "FP32", "shape": shape, "parameters": {"binary_data_size": data.nbytes}}
        text = json.dumps({"id": id, "inputs": [told]}).encode()
        headers = {"Inference-Header-Content-Length": str(len(text))}
        with httpx.Client(base_url=server.url, timeout=PATIENCE, headers=headers) as client:
            while not stop.wait(pause):
                client.post(f"/v2/models/{quote(model, safe='')}/infer", content=text + data.tobytes())

    clients = [threading.Thread(target=ask, args=how) for how in load]
    for one in clients:
        one.start()
    try:
        yield
    finally:
        stop.set()
        for one in clients:
            one.join(PATIENCE)


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens the page of a server. In the end nothing was written to the console, and nobody else was asked."""
    complaints: list[str] = []
    with ExitStack() as ending:

        def opened(server: Server, width: int = 1600, scheme: str = "light", times: int = 3, **more: Any) -> Page:
            page = browser.new_page(
                viewport={"width": width, "height": 900},
                color_scheme="dark" if scheme == "dark" else "light",
                **more,
            )
            ending.callback(page.close)
            page.set_default_timeout(4000 * PATIENCE)
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("dialog", lambda dialog: complaints.append(dialog.message))
            page.on("request", lambda asked: complaints.append(asked.url) if _is_foreign(asked.url, server) else None)
            page.goto(f"{server.url}/")
            if times:
                wait_until_drawn(page, times)
            return page

        yield opened
    assert [one for one in complaints if "401 (Unauthorized)" not in one and "ERR_CONNECTION" not in one] == []


def _is_foreign(url: str, server: Server) -> bool:
    return not url.startswith((f"{server.url}/", "data:,"))


def wait_until_drawn(page: Page, times: int) -> None:
    """At least so often."""
    page.wait_for_selector("html[data-drawn]" + "".join(f':not([data-drawn="{few}"])' for few in range(times)))


def figure(page: Page, label: str) -> str:
    return page.locator(f'.figures div:has(dt:text-is("{label}")) .value').inner_text()


def test_a_server_under_load_is_seen(loaded: Server, open_page: Open) -> None:
    page = open_page(loaded, times=4)
    assert page.title() == f"{HOSTILE}: live"
    assert page.get_by_role("heading", level=1).inner_text() == HOSTILE
    assert page.get_by_role("status").inner_text() == "3 models serve; missing is unavailable."
    assert float(figure(page, "requests a second")) > 1
    assert page.locator(".card h3").all_inner_texts() == [
        "classifier version 1",
        "ranker version 1",
        f"{HOSTILE} version 1",
        "missing",
    ]
    assert page.locator(".card", has_text="missing").inner_text().split("\n")[-1].endswith("no such file or folder")
    assert page.locator(".card", has_text="ranker").locator("li").first.inner_text().startswith(("1 row", "2 rows"))
    assert page.locator(".card", has_text=HOSTILE).locator("dd.bad").count() == 1
    assert page.locator("#threads .span").count() > 5
    assert "event loop" in page.locator("#threads svg.drawing").text_content()  # type: ignore[operator]
    users = {text.strip() for text in page.locator("#threads .legend li").all_inner_texts()}
    assert users <= {"classifier", "ranker", HOSTILE}
    assert len(users) >= 2
    assert page.locator(".request").count() == 10
    assert page.locator("img").count() == 0
    names = page.locator("svg[role], button, input, select, form label").evaluate_all(
        "all => all.filter(one => one.checkVisibility()).map(one => one.getAttribute('aria-label') || one.textContent)"
    )
    assert all(names)


def test_it_is_used_by_keys_alone(loaded: Server, open_page: Open) -> None:
    page = open_page(loaded)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "pause"
    page.keyboard.press("Enter")
    drawn = page.locator("html").get_attribute("data-drawn")
    summary = page.get_by_text("These threads as a table")
    summary.focus()
    page.keyboard.press("Enter")
    page.locator("#threads tbody tr", has_text="event loop").first.wait_for()  # filled once the browser says it is open
    drawing = page.locator("#threads svg.drawing")
    drawing.focus()
    before = page.locator("#threads .tick").first.text_content()
    page.keyboard.press("+")
    page.keyboard.press("+")
    zoomed = page.locator("#threads .tick").first.text_content()
    assert zoomed != before
    page.keyboard.press("ArrowLeft")
    assert page.locator("#threads .tick").first.text_content() != zoomed
    follows = page.get_by_role("button", name="Show the last ten seconds")
    assert follows.get_attribute("aria-pressed") == "false"
    page.keyboard.press("0")
    assert follows.get_attribute("aria-pressed") == "true"
    page.locator(".request summary").first.focus()
    page.keyboard.press("Enter")
    page.locator(".request[open] .panel", has_text=HOSTILE).filter(has_text="came after").wait_for()
    page.get_by_label("Of which model").select_option(HOSTILE)
    assert set(page.locator(".request strong").all_inner_texts()) <= {HOSTILE, f"{HOSTILE} refused"}
    assert page.locator("html").get_attribute("data-drawn") == drawn  # it stands still
    page.locator("#pause").press("Enter")
    wait_until_drawn(page, int(drawn or 0) + 1)


def test_it_fits_a_narrow_screen_and_stands_still_for_who_wants_that(loaded: Server, open_page: Open) -> None:
    page = open_page(loaded, 400, times=2, reduced_motion="reduce")
    page.locator("summary").evaluate_all("all => all.forEach(one => one.click())")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    for svg in page.locator("svg.chart, svg.drawing").all():
        box = svg.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 400
    asked = "performance.getEntriesByType('resource').filter(one => one.name.includes('live.json'))"
    first, second = page.evaluate(f"{asked}.map(one => one.startTime)")[:2]
    assert second - first > 2900  # milliseconds


def test_models_come_and_go(loaded: Server, open_page: Open) -> None:
    page = open_page(loaded)
    with httpx.Client(base_url=loaded.url, timeout=PATIENCE) as client:
        client.post("/v2/repository/models/ranker/unload").raise_for_status()
        page.get_by_role("status").get_by_text("2 models serve; ranker is unavailable").wait_for()
        assert page.locator(".card", has_text="ranker").inner_text().split("\n")[-1] == "unavailable: unloaded"
        client.post("/v2/repository/models/ranker/load").raise_for_status()
    page.get_by_role("status").get_by_text("3 models serve").wait_for()
    assert page.locator(".card", has_text="ranker").locator("dl").count() == 1


def test_a_server_with_a_token_asks_for_it_and_one_that_ends_is_missed(
    tmp_path: Path, browser: Browser, open_page: Open
) -> None:
    file = tmp_path / "token"
    file.write_text("secret")
    model = ModelConfig(name="doubled", source=doubled_model())
    with serving(ServerConfig(models={"doubled": model}, token_file=file), loaded=False) as server:
        page = open_page(server, times=0)
        page.get_by_role("status").get_by_text("This server wants a token.").wait_for()
        assert page.evaluate("document.activeElement.id") == "token"
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        page.get_by_role("status").get_by_text("The server does not take this token.").wait_for()
        page.keyboard.type("secret")
        page.keyboard.press("Enter")
        wait_until_drawn(page, 2)
        assert not page.locator("form").is_visible()
        assert page.locator(".card h3").inner_text() == "doubled version 1"
        page.reload()
        wait_until_drawn(page, 1)  # the tab keeps it
        assert "secret" not in page.content() + page.url
        on_loop(server, server.stop)
        page.get_by_role("status").get_by_text("The server does not answer").wait_for()


@pytest.mark.skipif(not os.environ.get("APPROVE"), reason="takes the pictures of docs/images")
def test_pictures(open_page: Open) -> None:
    from PIL import Image

    models = [
        ModelConfig(name="squeezenet", source="zoo:squeezenet", options=CompileOptions(replicas=2)),
        ModelConfig(name="digits", source="zoo:lenet", options=CompileOptions(max_batch=8, max_wait=0.002)),
        ModelConfig(name="ranker", source=doubled_model()),
    ]
    load = [("squeezenet", (1, 3, 224, 224), "data", 0.4)]
    load += [("digits", (1, 1, 28, 28), "data", pause) for pause in (0.05, 0.1, 0.15)]
    load += [("ranker", (1, 3), "x", 0.1)]
    config = ServerConfig(name="images", models={one.name: one for one in models})
    with serving(config) as server, under_load(server, load, "a request"):
        for width, scheme in ((1600, "light"), (1600, "dark"), (400, "light"), (400, "dark")):
            page = open_page(server, width, scheme, times=12)
            page.locator(".request summary").first.click()
            taken = Image.open(io.BytesIO(page.screenshot(full_page=True)))
            taken.convert("RGB").quantize(128).save(PICTURES / f"live-{width}-{scheme}.png", optimize=True)
            page.close()
