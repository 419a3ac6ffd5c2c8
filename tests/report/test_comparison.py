"""What a page of a comparison says first, against the comparison; and the round places of its axes."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import dagexec
import dagexec.core.drawing
from dagexec.analysis.comparison import compare
from dagexec.report.comparison import ComparisonSection, figures
from dagexec.report.gather import TracedRuntimes
from tests.report.pages import data_of, made_up_comparison, made_up_report

SCRIPT = Path(dagexec.core.drawing.__file__).parent / "page" / "svg.js"


def test_the_verdict_and_three_figures_come_before_all_else() -> None:
    page = made_up_report().html()
    comparison = made_up_comparison()
    header = page[page.index("<header>") : page.index("</header>")]
    assert header.index(comparison.finding) < header.index('class="figures"') < header.index("made up")
    assert re.findall(r'class="value">([^<]*)<', header) == ["1.48\u00d7", "\u2264 1.60\u00d7", "1.96\u00d7"]
    assert re.findall(r"<dt>([^<]*)<", header) == [
        "async_dag, 2 workers, over SimpleNet",
        "allowed by the DAG",
        "predicted for 4 workers",
    ]


def test_the_speed_up_has_the_interval_of_its_verdict_or_says_why_not() -> None:
    comparison = made_up_comparison()
    row = comparison.rows[-1]
    verdict = row.verdict
    assert verdict is not None
    assert figures(comparison, row)[0].detail == f"{1 / verdict.high:.2f} to {1 / verdict.low:.2f}"
    assert figures(comparison, replace(row, verdict=None))[0].detail == "too few rounds for an interval"
    assert len(figures(replace(comparison, what_if=()), row)) == 2


def test_peers_stand_beside_the_runtimes_with_their_samples_and_remarks() -> None:
    comparison = made_up_comparison()
    rows: Any = ComparisonSection(comparison.contenders).as_json()["rows"]
    assert [row["name"] for row in rows][-1] == "onnxruntime, 2 threads"
    assert [len(row["samples"]) for row in rows] == [16, 15, 15, 15]
    assert rows[-1]["predicted"] is None
    assert rows[-1]["remarks"][0].startswith("two speeds")
    assert rows[0]["interval"] is None


def test_the_foot_has_the_environment() -> None:
    page = made_up_report().html()
    foot = page[page.index("<footer") : page.index("</footer>")]
    assert "<dt>command</dt><dd>dagexec compare zoo:googlenet</dd>" in foot
    assert "<dt>cores</dt><dd>2</dd>" in foot


@pytest.mark.slow
def test_a_comparison_that_was_measured_is_reported() -> None:
    traced = TracedRuntimes(dagexec.load_model("zoo:lenet"))
    comparison = compare("zoo:lenet", net_types=["dag"], workers=[2], repeat=10, on_measured=traced.add)
    page = traced.report(comparison).html()
    assert data_of(page)[0]["kind"] == "comparison"
    assert "compile joined operators" in page
    assert f"<dd>{comparison.environment['processor']}</dd>" in page


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node; tests/report/test_browser.py sees them drawn")
@pytest.mark.parametrize(
    ("low", "high", "most"),
    [
        (0, 1, 5),
        (0, 56.3, 5),
        (0, 0.00234, 4),
        (1.2345e-3, 1.2361e-3, 8),
        (-3, 17, 6),
        (0, 3, 5),
        (0, 1e9, 3),
        (0, 7, 1),
    ],
)
def test_ticks_are_one_two_or_five_times_a_power_of_ten_apart(low: float, high: float, most: int) -> None:
    places, texts = _in_node(f"const found = ticks({low}, {high}, {most}); show([found, tickLabels(found, 's')])")
    steps = {round((b - a) / (high - low), 6) for a, b in pairwise(places)}
    assert len(steps) <= 1
    assert len(places) <= most + 1
    assert all(low - 1e-9 * (high - low) <= place <= high + 1e-9 * (high - low) for place in places)
    for place in places[1:]:
        step = places[1] - places[0]
        leading = step / 10 ** math.floor(math.log10(step) + 1e-9)
        assert min(abs(leading - one) for one in (1, 2, 5)) < 1e-6
        assert abs(place / step - round(place / step)) < 1e-6  # a multiple
    assert len(set(texts)) == len(texts)  # none is rounded to another


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="needs node; tests/report/test_browser.py sees them drawn")
def test_texts_of_ticks_have_one_unit_and_as_many_decimals() -> None:
    assert _in_node("show(tickLabels([0, 0.0005, 0.001, 0.0015], 's'))") == ["0", "0.5 ms", "1.0 ms", "1.5 ms"]
    assert _in_node("show(tickLabels([0, 2e7, 4e7], 'B'))") == ["0", "20 MB", "40 MB"]
    assert _in_node("show(tickLabels([0, 500, 1000], ''))") == ["0", "500", "1,000"]
    assert _in_node("show(tickLabels([0, 1e-9, 2e-9], ''))") == ["0", "1.0e-9", "2.0e-9"]
    assert _in_node("show(ticks(4, 4, 5))") == [4]


def _in_node(script: str) -> Any:
    """What `script` shows, which may use the functions of the page."""
    show = "const show = (found) => console.log(JSON.stringify(found));"
    text = f"{SCRIPT.read_text(encoding='utf-8')}\n{show}\n{script}"
    done = subprocess.run(["node", "-"], input=text, capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)
