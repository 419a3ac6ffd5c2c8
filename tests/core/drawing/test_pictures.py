"""What notebooks show: small, whole, and text whatever the names in a model."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

import dagexec
from dagexec.analysis import compare
from dagexec.core.model import Model
from dagexec.errors import DagexecError
from dagexec.platform import extras
from dagexec.scheduler.observe.trace import Trace
from dagexec.testing import random_feeds
from tests.nets import net_of
from tests.report.pages import HOSTILE


def parsed(html: str) -> ElementTree.Element:
    """The markup, which must be well-formed."""
    return ElementTree.fromstring(html)


def nodes(html: str) -> list[str]:
    return [title.text or "" for title in parsed(html).iter("title")]


def test_a_model_shows_its_operators_inputs_and_outputs() -> None:
    model = dagexec.load_model("zoo:googlenet")
    html = model._repr_html_()
    assert len(nodes(html)) == len(model.net.op)
    cells = [cell.text for cell in parsed(html).iter("td")]
    assert cells[:3] == ["input", "data", str(model.inputs["data"])]
    assert cells[3:5] == ["output", "softmax"]
    assert len(list(parsed(html).iter("path"))) == 168  # dependencies; the net overwrites no blob


def test_names_are_text() -> None:
    net = net_of([[], [0]], name=HOSTILE)
    net.op[0].name = HOSTILE
    html = Model(HOSTILE, net, outputs=(HOSTILE,))._repr_html_()
    assert {element.tag for element in parsed(html).iter()}.isdisjoint({"script", "img"})
    assert f"NoOp {HOSTILE}" in nodes(html)


def test_a_large_net_is_small() -> None:
    html = Model("large", net_of([[index - 1] if index else [] for index in range(10_000)]))._repr_html_()
    assert len(html) < 100_000
    assert sum(int(node.rsplit(": ", 1)[1].split(" ")[0]) for node in nodes(html)) == 10_000


def test_an_executor_and_a_trace_show_what_ran() -> None:
    trace = Trace()
    assert "no runs" in trace._repr_html_()
    with dagexec.compile("zoo:lenet", net_type="dag", num_workers=2) as executor:
        executor.run(random_feeds(executor.model), trace=trace)
        operators = len(executor.net().plan.graph)
        html = executor._repr_html_()
    assert len(nodes(html)) == operators
    assert "dag, 2 workers" in html
    html = trace._repr_html_()
    assert len(set(nodes(html))) == operators
    table = trace.to_pandas()
    assert len(table) == operators
    assert (table.seconds > 0).all()
    assert list(table.type)[-1] == "Softmax"


def test_a_comparison_is_a_table() -> None:
    comparison = compare("zoo:lenet", net_types=["dag"], workers=[1, 2], repeat=2)
    rows = list(parsed(comparison._repr_html_()).iter("tr"))
    assert len(rows) == 1 + len(comparison.rows)
    table = comparison.to_pandas()
    assert list(table.net_type) == ["simple", "dag", "dag"]
    assert list(table.median_ms) == [row.median_ms for row in comparison.rows]
    wrong = replace(comparison, rows=(replace(comparison.rows[0], same_bytes=False),))
    assert "<td>no</td>" in wrong._repr_html_()


def test_without_pandas_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(DagexecError, match="pip install 'pandas"):
        extras.require_pandas()
