"""Task graphs: what is made or read has the tasks, edges and lengths that it should, and what is wrong is named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec.errors import CycleError, DagexecError, ModelFormatError, ResourceError, SchemaError, SettingError
from dagexec.lab.graph import WorkGraph, work_graph
from dagexec.lab.patterns import PATTERNS, Bench, bench_graph
from dagexec.lab.random_wired import MODELS, random_wired
from dagexec.lab.stg import parse_stg, read_stg
from dagexec.lab.suites import suite_graphs
from dagexec.lab.wfformat import parse_wfformat

STG = """\
    3
    0   0   0
    1   4   1   0
    2   6   1   0      # the longer way
    3   5   2   1   2
    4   0   1   3
# CP Length : 11
"""


def of_networkx(graph: WorkGraph) -> networkx.DiGraph[int]:
    """The same graph, a task's seconds on the edges into it, behind a node before all."""
    found: networkx.DiGraph[int] = networkx.DiGraph()
    for number, task in enumerate(graph.tasks):
        for parent in task.parents or (-1,):
            found.add_edge(parent, number, weight=task.seconds)
    return found


def edges(graph: WorkGraph) -> set[tuple[str, str]]:
    return {(graph.tasks[parent].name, task.name) for task in graph.tasks for parent in task.parents}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("width", [1, 5, 8])
def test_a_pattern_is_acyclic_and_its_critical_path_is_that_of_networkx(pattern: str, width: int) -> None:
    graph = bench_graph(pattern, Bench(width, 6, 2.0, imbalance=0.7))
    reference = of_networkx(graph)
    assert networkx.is_directed_acyclic_graph(reference)
    assert graph.critical_path == pytest.approx(networkx.dag_longest_path_length(reference))
    assert all(0.6 <= task.seconds <= 3.4 for task in graph.tasks)


def test_a_stencil_waits_for_its_neighbors() -> None:
    assert edges(bench_graph("stencil_1d", Bench(3, 2))) == {
        ("0.0", "1.0"), ("0.1", "1.0"), ("0.0", "1.1"), ("0.1", "1.1"), ("0.2", "1.1"), ("0.1", "1.2"), ("0.2", "1.2"),
    }  # fmt: skip


def test_an_fft_of_eight_points_brings_all_to_all_in_three_steps() -> None:
    reference = of_networkx(bench_graph("fft", Bench(8, 4)))
    assert set(reference.predecessors(8 + 3)) == {2, 3, 4}  # first neighbors, then points twice as far
    assert set(reference.predecessors(16 + 3)) == {8 + 1, 8 + 3, 8 + 5}
    assert all(networkx.ancestors(reference, 24 + point) >= set(range(8)) for point in range(8))


def test_a_tree_doubles_until_it_is_wide() -> None:
    names = [task.name for task in bench_graph("tree", Bench(4, 4)).tasks]
    assert names == ["0.0", "1.0", "1.1", "2.0", "2.1", "2.2", "2.3", "3.0", "3.1", "3.2", "3.3"]


@pytest.mark.parametrize("model", MODELS)
def test_a_random_net_has_one_beginning_and_one_end(model: str) -> None:
    graph = random_wired(model, seed=3)
    assert len(graph.tasks) == 34
    children = {parent for task in graph.tasks for parent in task.parents}
    assert [task.name for task in graph.tasks if not task.parents] == ["first"]
    assert [task.name for number, task in enumerate(graph.tasks) if number not in children] == ["last"]


def test_an_stg_file_has_the_length_that_its_comment_says_and_the_optimum_of_the_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "small.stg").write_text(STG)
    (tmp_path / "small.optimal").write_text("2 11\n")
    graph = read_stg(tmp_path / "small.stg")
    assert (graph.work, graph.critical_path) == (15.0, 11.0)
    assert (graph.lower_bound(1), graph.lower_bound(2)) == (15.0, 11.0)
    assert graph.taking(1e-3).optimum == {2: pytest.approx(2.2e-3)}  # three tasks of 15 take 3 ms


@pytest.mark.parametrize(
    ("changed", "to", "message"),
    [
        ("    3\n", "    three\n", "line 1: the number of tasks: expected a number of 0 or more, found 'three'"),
        ("    3\n", "    4\n", "the file ends after 5 of 6 tasks"),
        ("    3\n", "    2\n", "line 6: expected 4 tasks, found another one"),
        ("2   6", "2  -6", "line 4: task '2': expected a time of 0 or more, found '-6'"),
        ("2   6", "2 nan", "line 4: task '2': expected a time of 0 or more, found 'nan'"),
        ("2   6", "7   6", "line 4: task '7': expected task 2"),
        ("2   1   2\n", "3   1   2\n", "line 5: task '3': waits for 3 tasks, but names 2"),
        ("2   1   2\n", "2   1   9\n", "line 5: task '3': waits for 9, but the last task is 4"),
        ("    2   6   1   0  ", "    2   ", "line 4: task '2': expected a time and how many tasks it waits for"),
    ],
)
def test_an_error_of_an_stg_file_names_line_and_task(changed: str, to: str, message: str) -> None:
    assert changed in STG
    with pytest.raises(ModelFormatError, match="file") as error:
        parse_stg(STG.replace(changed, to), "file.stg")
    assert message in str(error.value)


def test_a_cycle_is_named() -> None:
    with pytest.raises(CycleError) as error:
        parse_stg(STG.replace("    1   4   1   0", "    1   4   1   3"), "file.stg")
    assert set(error.value.operators) == {"1", "3"}
    assert "file.stg" in str(error.value)


def test_a_huge_graph_is_refused_before_it_is_made() -> None:
    for make in (
        lambda: parse_stg("99999999999\n", "file.stg"),
        lambda: bench_graph("stencil_1d", Bench(width=10**12)),
        lambda: bench_graph("nearest", Bench(width=10**4, steps=10, radix=10**12)),
        lambda: bench_graph("tree", Bench(width=2, steps=10**12)),
        lambda: bench_graph("all_to_all", Bench(width=10**4, steps=2)),
        lambda: random_wired("erdos_renyi", nodes=10**9),
        lambda: bench_graph("trivial", Bench(100, 100)).taking(1.0),
    ):
        with pytest.raises(ResourceError):
            make()


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_work_that_nobody_can_do_is_refused(seconds: float) -> None:
    with pytest.raises(SchemaError, match="task 'b': expected seconds of 0 or more"):
        work_graph("g", [("a", 1.0, []), ("b", seconds, [0])])


def test_a_graph_in_any_order_comes_parents_first() -> None:
    graph = work_graph("g", [("c", 1.0, [2]), ("a", 1.0, []), ("b", 1.0, [1, 1])])
    assert [(task.name, task.parents) for task in graph.tasks] == [("a", ()), ("b", (0,)), ("c", (1,))]


def workflow() -> dict[str, object]:
    """A diamond, whose edges some tasks tell as parents, others as children."""
    tasks = [
        {"id": "split", "parents": [], "children": ["left"]},
        {"id": "left", "parents": ["split"], "children": ["join"]},
        {"id": "right", "parents": ["split"]},
        {"id": "join", "parents": ["right"], "children": []},
    ]
    ran = [{"id": task["id"], "runtimeInSeconds": 1 + number} for number, task in enumerate(tasks)]
    return {
        "name": "diamond",
        "schemaVersion": "1.6",
        "workflow": {"specification": {"tasks": tasks}, "execution": {"makespanInSeconds": 9, "tasks": ran}},
    }


def test_a_workflow_has_edges_told_from_either_side() -> None:
    graph = parse_wfformat(json.dumps(workflow()), "file.json")
    assert edges(graph) == {("split", "left"), ("split", "right"), ("left", "join"), ("right", "join")}
    assert (graph.work, graph.critical_path) == (10.0, 8.0)


@pytest.mark.parametrize(
    ("changed", "to", "message"),
    [
        ('"1.6"', '"1.7"', "schemaVersion: expected 1.5 or 1.6, found '1.7'"),
        ('"runtimeInSeconds": 2', '"runtimeInSeconds": -2', "line 46: task 'left': runtimeInSeconds: expected 0 or"),
        ('"runtimeInSeconds": 2', '"runtime": 2', "task 'left': runtimeInSeconds: expected 0 or more, found None"),
        ('"runtimeInSeconds": 2', '"runtimeInSeconds": true', "expected 0 or more, found True"),
        ('"right"\n', '"wrong"\n', "line 30: task 'join': parents names 'wrong', which is no task"),
        ('"execution"', '"run"', "workflow: 'execution': expected an object, found None"),
        ('"name": "diamond",', '"name": "diamond"', "line 3: Expecting ',' delimiter"),
    ],
)  # fmt: skip
def test_an_error_of_a_workflow_names_line_and_task(changed: str, to: str, message: str) -> None:
    text = json.dumps(workflow(), indent=1)
    assert changed in text
    with pytest.raises(ModelFormatError, match="file") as error:
        parse_wfformat(text.replace(changed, to), "file.json")
    assert message in str(error.value)


def test_a_cycle_of_a_workflow_is_named() -> None:
    text = json.dumps(workflow()).replace('"parents": []', '"parents": ["join"]')
    with pytest.raises(CycleError, match="'split' -> "):
        parse_wfformat(text, "file.json")


LETTERS = st.sampled_from([*"0123456789 \n#-.e\x00\udc80", "nan", "inf", "1e999", "100000000000000000000", "\u0663"])


@given(st.lists(LETTERS, max_size=60).map("".join), st.integers(0, len(STG)), st.integers(0, 30))
def test_whatever_an_stg_file_says_only_errors_of_dagexec_come_out(text: str, place: int, length: int) -> None:
    try:
        parse_stg(STG[:place] + text + STG[place + length :], "file.stg")
    except DagexecError as error:
        str(error).encode()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.slow
@given(st.data())
def test_whatever_a_workflow_says_only_errors_of_dagexec_come_out(data: st.DataObject) -> None:
    content = workflow()
    owner: dict[str, object] | list[object] = content
    for _ in range(data.draw(st.integers(0, 5))):  # walk down, then put something else there
        inner = [one for one in (owner.values() if isinstance(owner, dict) else owner) if isinstance(one, dict | list)]
        if not inner:
            break
        owner = data.draw(st.sampled_from(inner))
    if isinstance(owner, dict):
        owner[data.draw(st.sampled_from([*owner, "id"]))] = data.draw(VALUES)
    else:
        owner.append(data.draw(VALUES))
    try:
        parse_wfformat(json.dumps(content), "file.json")
    except DagexecError as error:
        str(error).encode()


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 10_000, '{"schemaVersion": 1' + "0" * 10_000 + "}", ""])
def test_json_that_python_cannot_read_is_an_error_of_the_file(text: str) -> None:
    with pytest.raises(ModelFormatError, match="file"):
        parse_wfformat(text, "file.json")


def test_a_folder_is_a_suite_and_another_name_is_not(tmp_path: Path) -> None:
    (tmp_path / "a.stg").write_text(STG)
    (tmp_path / "b.json").write_text(json.dumps(workflow()))
    assert [graph.name for graph in suite_graphs(str(tmp_path), Bench())] == ["a", "b"]
    with pytest.raises(SettingError, match="did you mean 'taskbench'"):
        list(suite_graphs("taskbnech", Bench()))


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.stg")
    with pytest.raises(ModelFormatError, match="cannot be read: not a regular file"):
        list(suite_graphs(str(tmp_path / "a.stg"), Bench()))


@pytest.mark.parametrize("seconds", [0.0, 5e-324])
def test_a_graph_with_hardly_any_work_cannot_be_scaled(seconds: float) -> None:
    with pytest.raises(SchemaError, match="task graph 'g'"):
        work_graph("g", [("a", seconds, [])]).taking(1.0)


def test_a_file_that_is_no_text_is_an_error_of_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.stg").write_bytes(b"3\n\xff")
    with pytest.raises(ModelFormatError, match="line 2: no UTF-8"):
        list(suite_graphs(str(tmp_path / "a.stg"), Bench()))
