"""Reports in headless Chromium: `make test-browser`. With `APPROVE=1` it takes the pictures of docs/images."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dagexec.analysis.story import explain
from dagexec.platform.threads import threads
from dagexec.report.document import Report
from dagexec.report.exploration import ExplorationSection
from dagexec.report.graph import GraphSection
from dagexec.report.hazards import HazardsSection
from dagexec.report.training import TrainingSection
from dagexec.scheduler.exploration import explore_seeds
from dagexec.training.trainer import StepReport
from tests.chromium import chromium
from tests.nets import net_of
from tests.report.pages import HOSTILE, hostile_report, large_report, made_up_report, plan_of
from tests.report.test_findings import racing_proof
from tests.scheduler.exploration.test_exploration_pool import EarlyPool
from tests.scheduler.scenarios import DIAMOND, pool_scenario

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

PICTURES = Path(__file__).parents[2] / "docs" / "images"
Open = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Opens a report. In the end nothing has been written to the console, and nothing but the file was asked for."""
    complaints: list[str] = []
    pages = []

    def opened(report: Report, width: int = 1600, scheme: str = "light") -> Page:
        path = tmp_path / "report.html"
        report.write(path)
        page = browser.new_page(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if scheme == "dark" else "light",
            offline=True,
            reduced_motion="reduce",
        )
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda asked: complaints.append(asked.url) if asked.url != path.as_uri() else None)
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-drawn]")
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.close()
    assert complaints == []


def test_search_finds_an_operator_and_shows_it(open_page: Open) -> None:
    page = open_page(made_up_report())
    page.get_by_role("searchbox").fill("INCEPTION_5B/3X3_R")
    assert page.locator("#graph [role=status]").inner_text() == "1 of 2"
    found = page.locator(".node.found")
    assert found.count() == 1
    assert found.get_attribute("aria-label") == "Conv inception_5b/3x3_reduce"
    assert found.is_visible()
    inside = page.locator("#graph .drawing").bounding_box()
    box = found.bounding_box()
    assert inside is not None
    assert box is not None
    assert inside["y"] <= box["y"] <= inside["y"] + inside["height"]
    page.get_by_role("searchbox").fill("no such operator")
    assert page.locator("#graph [role=status]").inner_text() == "0 found"


def test_the_operator_under_the_cursor_is_described(open_page: Open) -> None:
    page = open_page(made_up_report())
    page.locator(".node").first.hover()
    text = page.locator("#graph .panel").inner_text()
    assert text.startswith("Conv conv1")
    assert "inputs\ndata, conv1_w, conv1_b" in text
    page.locator("#timeline .span").first.hover()
    assert page.locator("#timeline .panel").inner_text().startswith("Conv conv1\nbegins\n2 µs\ntakes\n20 µs")


def test_the_drawing_zooms_and_pans_by_wheel_mouse_and_keys(open_page: Open) -> None:
    page = open_page(made_up_report())
    drawing = page.locator("#graph .drawing")

    def view() -> list[float]:
        return [float(part) for part in (drawing.get_attribute("viewBox") or "").split()]

    before = view()
    drawing.hover()
    page.mouse.wheel(0, -300)
    narrower = "before => document.querySelector('#graph .drawing').viewBox.baseVal.width < before"
    page.wait_for_function(narrower, arg=before[2])
    zoomed = view()
    page.mouse.down()
    page.mouse.move(400, 300)
    page.mouse.up()
    assert view()[:2] != zoomed[:2]
    drawing.focus()
    width = view()[2]
    page.keyboard.press("-")
    assert view()[2] > width
    left = view()[0]
    page.keyboard.press("ArrowRight")
    assert view()[0] > left
    page.keyboard.press("0")
    lowest = page.locator(".node").last.bounding_box()
    box = drawing.bounding_box()
    assert lowest is not None
    assert box is not None
    assert lowest["y"] < box["y"] + box["height"]  # all of it is shown


def test_everything_is_reached_by_keys_and_told_in_tables(open_page: Open) -> None:
    page = open_page(made_up_report())
    page.locator(".node").first.focus()
    page.keyboard.press("Tab")
    assert page.locator("#graph .panel").inner_text().startswith("Relu conv1")
    summary = page.get_by_text("All 142 operators as a table")
    summary.focus()
    page.keyboard.press("Enter")
    page.locator("#graph tbody tr").last.wait_for()
    assert page.locator("#graph tbody tr").count() == 142
    assert page.locator("#graph tbody tr").last.inner_text().split("\t")[1] == "Softmax"
    texts = "elements => elements.map(one => one.getAttribute('aria-label') || one.textContent)"
    names = page.locator("svg[role], button, input").evaluate_all(texts)
    assert all(names)


def test_ten_thousand_operators_open_as_modules(open_page: Open) -> None:
    page = open_page(large_report(10_000))
    assert page.locator("*").count() < 500  # what is not shown is not drawn: it opens at once
    groups = page.locator(".node.group")
    assert groups.count() == 20
    groups.nth(3).focus()
    page.keyboard.press("Enter")
    assert page.locator(".node.group").first.get_attribute("aria-label") == "block.0 50 operators"
    assert page.locator("#graph select").count() == 0  # no times are known: colors are those of chains
    page.get_by_role("searchbox").fill("op9999")
    assert page.locator(".node.found").get_attribute("aria-label") == "NoOp /encoder/layer.19/block.9/op9999"
    page.get_by_role("button", name="whole net").click()
    assert page.locator(".node.group").count() == 20


def test_names_of_a_model_do_nothing(open_page: Open) -> None:
    page = open_page(hostile_report())
    page.locator(".node").first.hover()
    assert page.title() == HOSTILE
    assert HOSTILE in page.locator("#graph .panel").inner_text()
    assert page.locator("img").count() == 0


def test_findings_are_shown(open_page: Open) -> None:
    proof, graph = racing_proof()
    page = open_page(Report("net", (), [HazardsSection(proof, graph.plan.graph), graph]))
    assert page.locator("#hazards tbody tr").count() == 1
    assert page.locator(".edge.missing").count() == 1
    steps = [StepReport(n + 1, 1, {"loss": 1 / (n + 1)}, 10, 0.5) for n in range(50)]
    page = open_page(Report("task", (), [TrainingSection(steps, [(50, {"loss": 0.1})])]), 400)
    assert page.locator("#training .chart .curve").count() == 2
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


@pytest.mark.parametrize("width", [400, 1200])
def test_the_story_of_a_schedule_is_drawn_as_swim_lanes(open_page: Open, width: int) -> None:
    result = explore_seeds(pool_scenario(DIAMOND, 2, EarlyPool), range(200))
    assert result.failed is not None
    story = explain(pool_scenario(DIAMOND, 2, EarlyPool), result.failed)
    section = ExplorationSection(result, "seeds", "dagexec explore --replay 1:1", story)
    page = open_page(Report("net", (), [section]), width)
    assert page.locator("#exploration .lanes .step").count() == len(story.steps)
    assert page.locator("#exploration .lanes .preempting").count() == story.preemptions
    assert page.locator("#exploration .lanes .failing").count() == 1
    assert page.locator("#exploration .lanes .doomed").count() == 1
    assert page.locator("#exploration .lanes .wrong").count() == len(set(story.findings[0].steps))
    assert page.locator("#exploration .lanes .arrow").count() == sum(step.passed_from >= 0 for step in story.steps)
    executed = page.locator("#exploration .lanes .executing + .label").all_text_contents()
    assert {"operator 0", "operator 1", "operator 2", "operator 3"} == set(executed)
    assert page.locator("#exploration .story li").all_inner_texts() == [
        line.removesuffix(":") for line in list(story.lines())[1:] if not line.startswith("  ")
    ]
    assert page.locator("#exploration code").inner_text() == "dagexec explore --replay 1:1"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert story.moment is not None
    doomed = page.locator("#exploration .lanes .doomed").bounding_box()
    step = page.locator("#exploration .lanes .step").nth(story.moment.step).bounding_box()
    assert doomed is not None
    assert step is not None
    assert abs(doomed["y"] - step["y"]) < 3


@pytest.mark.parametrize("width", [400, 1200])
def test_no_text_of_a_chart_stands_on_another_or_is_cut_off(open_page: Open, width: int) -> None:
    steps = [StepReport(n + 1, 1, {"loss": 2.3 / (n + 1), "tiny": n * 1e-9}, 10, 0.0123) for n in range(12_345)]
    explored = explore_seeds(lambda: threads().start(lambda: None, "other").join(), range(20))
    reports = [
        made_up_report(),
        Report(
            "task", (), [TrainingSection(steps, [(500, {"loss": 0.1})]), ExplorationSection(explored, "seeds 0 to 19")]
        ),
    ]
    for report in reports:
        page = open_page(report, width)
        found = page.locator("svg.chart, svg.lanes").evaluate_all(
            """drawings => drawings.map(drawing => [drawing, ...drawing.querySelectorAll("text.label")].map(one => {
                const {left, right, top, bottom} = one.getBoundingClientRect();
                return [one.textContent, left, right, top, bottom];
            }))"""
        )
        assert len(found) >= 3
        for (_, left, right, top, bottom), *texts in found:
            assert len(texts) >= 2
            for text in texts:
                inside = left - 1 <= text[1] and text[2] <= right + 1 and top - 1 <= text[3] and text[4] <= bottom + 1
                assert inside, text
            for one, other in combinations(texts, 2):
                beside = one[2] <= other[1] or other[2] <= one[1] or one[4] <= other[3] + 2 or other[4] <= one[3] + 2
                assert beside, (one, other)


def test_ticks_of_every_axis_are_round(open_page: Open) -> None:
    page = open_page(made_up_report())
    for drawing in ("#comparison", "#timeline"):
        texts = page.locator(f"{drawing} .tick").all_text_contents()
        numbers = [float(text.split()[0]) for text in texts]
        step = numbers[1] - numbers[0]
        assert len(numbers) >= 4
        assert min(abs(step / 10 ** round(np.log10(step / one)) - one) for one in (1, 2, 5)) < 1e-9
        assert all(abs(number / step - round(number / step)) < 1e-6 for number in numbers)


def test_the_net_fits_the_view_at_first(open_page: Open) -> None:
    for width in (400, 1200):
        page = open_page(made_up_report(), width)
        shape = page.locator("#graph .drawing").bounding_box()
        assert shape is not None
        boxes = page.locator("#graph .node").evaluate_all("all => all.map(one => one.getBoundingClientRect().toJSON())")
        assert len(boxes) == 142
        scrolled = page.locator("#graph .drawing").evaluate("one => one.getBoundingClientRect().toJSON()")
        assert all(scrolled["left"] <= one["left"] and one["right"] <= scrolled["right"] for one in boxes)
        assert all(scrolled["top"] <= one["top"] and one["bottom"] <= scrolled["bottom"] for one in boxes)


def test_colors_of_the_net_mean_time_or_by_a_key_the_chain(open_page: Open) -> None:
    page = open_page(made_up_report())
    fill = "one => getComputedStyle(one.querySelector('rect')).fill"
    colors = page.locator("#graph select")
    assert colors.input_value() == "time"
    legend = page.locator("#graph .legend")
    assert legend.inner_text().split("\n")[0].strip() == "0"
    by_time = page.locator(".node").evaluate_all(f"all => all.map({fill})")
    assert len(set(by_time)) == 1  # all take the same time here
    colors.focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_function("document.querySelector('#graph .legend').textContent.includes('chain ')")
    by_chain = page.locator(".node").evaluate_all(f"all => all.map({fill})")
    assert len(set(by_chain)) > 30


def test_the_net_is_shown_as_it_is_given_too(open_page: Open) -> None:
    plan, given = plan_of(net_of([[], [0]])), plan_of(net_of([[], [0], [0], [1, 2]]))
    page = open_page(Report("net", (), [GraphSection(plan, given=given)]))
    assert page.locator(".node").count() == 2
    button = page.get_by_role("button", name="As it is given: 4 operators, 4 chains")
    button.focus()
    page.keyboard.press("Enter")
    assert page.locator(".node").count() == 4
    assert button.get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize(("width", "scheme"), [(1600, "light"), (1600, "dark"), (400, "light"), (400, "dark")])
def test_it_looks_as_it_was_approved(open_page: Open, width: int, scheme: str) -> None:
    page = open_page(made_up_report(), width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # nothing is cut off at the side
    taken = page.screenshot(full_page=True)
    approved = PICTURES / f"report-{width}-{scheme}.png"
    if os.environ.get("APPROVE"):
        approved.write_bytes(taken)
    assert differing_share(taken, approved.read_bytes()) < 0.02  # fonts differ a little between versions


def differing_share(taken: bytes, approved: bytes) -> float:
    """Of all pixels, those that are another color; 1 for another size."""
    from matplotlib.image import imread

    found, expected = imread(io.BytesIO(taken)), imread(io.BytesIO(approved))
    if found.shape[1] != expected.shape[1] or abs(found.shape[0] - expected.shape[0]) > 40:
        return 1.0
    height = min(found.shape[0], expected.shape[0])
    return float(np.mean(np.abs(found[:height, :, :3] - expected[:height, :, :3]).max(axis=2) > 0.15))
