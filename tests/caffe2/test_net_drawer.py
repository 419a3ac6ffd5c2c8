"""Drawings of nets: which nodes and arrows there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dagexec.caffe2 import core, net_drawer


def net() -> core.Net:
    made = core.Net("drawn")
    made.Relu("x", "y")
    made.Add(["x", "y"], "y")
    made.Sum(["y", "x"], "z")
    return made


def arrows(graph: net_drawer.Graph) -> set[tuple[str, str]]:
    labels = dict(re.findall(r'^  "(.*)" \[label="(.*)", shape', graph.to_string(), re.M))
    found = re.findall(r'^  "(.*)" -> "(.*)";$', graph.to_string(), re.M)
    return {(labels[begin], labels[end]) for begin, end in found}


def test_operators_are_drawn_with_their_blobs_each_time_they_are_written() -> None:
    made = net()
    graph = net_drawer.GetPydotGraph(made, rankdir="BT")
    text = graph.to_string()
    assert text.startswith(f'digraph "{made.Name()}" {{\n  rankdir=BT;\n')
    assert text.count('label="y"') == 2
    kinds = {(begin.split()[0], end.split()[0]) for begin, end in arrows(graph)}
    assert kinds == {
        ("x", "Relu"),
        ("Relu", "y"),
        ("x", "Add"),
        ("y", "Add"),
        ("Add", "y"),
        ("y", "Sum"),
        ("x", "Sum"),
        ("Sum", "z"),
    }


def test_operators_alone_have_arrows_that_are_needed() -> None:
    chain = core.Net("chain")
    chain.Relu("x", "y")
    chain.Abs("y", "z")
    chain.Sum(["y", "z"], "u")
    every = net_drawer.GetPydotGraphMinimal(chain)
    least = net_drawer.GetPydotGraphMinimal(chain.Proto().op, "ops", minimal_dependency=True)
    assert len(arrows(every)) == 3
    [(begin, end)] = arrows(every) - arrows(least)
    assert (begin.split()[0], end.split()[0]) == ("Relu", "Sum")
    assert len(arrows(least)) == 2


def test_pictures_need_graphviz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = net_drawer.GetPydotGraph(net())
    graph.write_dot(str(tmp_path / "net.dot"))
    assert (tmp_path / "net.dot").read_text() == graph.to_string()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="not installed"):
        graph.create_png()
    program = tmp_path / "dot"
    program.write_text("#!/bin/sh\n[ $1 = -Tsvg ] && exec /bin/cat\necho broken >&2\nexit 1\n")
    program.chmod(0o755)
    assert graph.create_svg().decode() == graph.to_string()
    with pytest.raises(RuntimeError, match="broken"):
        graph.write_png(str(tmp_path / "net.png"))


def test_a_plan_is_drawn_step_by_step() -> None:
    nets = [core.Net(name) for name in ("drawn_one", "drawn_two", "report")]
    for net in nets:
        net.Copy("x", "y")
    inner = core.execution_step("inner", nets[:2], num_iter=3)
    until = core.execution_step("until", nets[0], should_stop_blob="stop", report_net=nets[2], report_interval=5)
    plan = core.Plan(core.execution_step("outer", [inner, until], concurrent_substeps=True))
    plan.AddStep(core.execution_step("last", nets[1], should_stop_blob="no", only_once=True, create_workspace=True))
    labels = arrows(net_drawer.GetPlanGraph(plan))
    found = {(re.sub(r"_\d+", "", begin), re.sub(r"_\d+", "", end)) for begin, end in labels}  # names are unique
    assert {(begin.split("\\n")[0], end.split("\\n")[0]) for begin, end in found} == {
        ("inner", "drawn_one"), ("drawn_one", "drawn_two"), ("until", "drawn_one"), ("until", "report"),
        ("outer", "inner"), ("outer", "until"), ("last", "drawn_two"), ("outer", "last"),
    }  # fmt: skip
    assert {label for arrow in found for label in arrow} == {
        "outer\\nat once", "inner\\nnum_iter: 3", "until\\nuntil stop\\nreports every 5 s", "drawn_one\\n1 operators",
        "last\\nunless no\\nin a workspace of its own", "drawn_two\\n1 operators", "report\\n1 operators",
    }  # fmt: skip
