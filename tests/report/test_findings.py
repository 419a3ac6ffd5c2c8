"""The pages of checks, explorations and trainings, against what was found."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dagexec.analysis.story import explain
from dagexec.core.graph import Hazard
from dagexec.platform.threads import threads
from dagexec.report.document import Report
from dagexec.report.exploration import ExplorationSection
from dagexec.report.graph import GraphSection
from dagexec.report.hazards import HazardsSection, missing_edges
from dagexec.report.training import TrainingSection
from dagexec.scheduler.exploration import explore, explore_seeds
from dagexec.scheduler.hazards import Proof, UnorderedAccesses
from dagexec.training.trainer import StepReport
from tests.command_line import Cli
from tests.nets import net_of
from tests.report.pages import data_of, plan_of


def racing_proof() -> tuple[Proof, GraphSection]:
    """The middle of a diamond races."""
    plan = plan_of(net_of([[], [0], [0], [1, 2]]))
    graph = plan.graph
    found = UnorderedAccesses("blob 'b1'", Hazard.WAW, graph.label(1), graph.label(2), "chain 2 must wait for chain 1")
    proof = Proof(4, 4, 4, 0, 0, {}, 1, 5, (found,))
    return proof, GraphSection(plan, missing=missing_edges(proof, graph))


def test_a_racing_pair_is_an_edge_that_is_missing() -> None:
    proof, section = racing_proof()
    assert section.as_json()["missing"] == [[1, 2]]
    found = HazardsSection(proof, section.plan.graph).as_json()
    assert found["holds"] is False
    (finding,) = found["findings"]  # type: ignore[misc]
    assert finding["kind"] == "WAW"
    assert finding["missing"] == "chain 2 must wait for chain 1"


def test_a_schedule_is_told_step_by_step() -> None:
    def scenario() -> None:
        raise ValueError("on purpose")

    result = explore_seeds(scenario, [3])
    assert result.failed is not None
    steps = [(event.thread, str(event)) for event in result.failed.trace]
    story = explain(scenario, result.failed)
    found: Any = ExplorationSection(result, "seed 3", "dagexec explore x --seed 3", story).as_json()["failed"]
    assert found["failure"] == "ValueError: on purpose"
    assert found["seed"] == 3
    assert found["command"] == "dagexec explore x --seed 3"
    assert found["text"][-1].startswith("It fails however it goes on")
    assert [(found["lanes"][lane], what) for lane, what, *_ in found["steps"]] == steps


def test_handovers_are_counted_from_the_schedules_themselves() -> None:
    """A handover: a step of one thread, and the next of another. Seeds that repeat bring no new one."""

    def scenario() -> None:
        others = [threads().start(lambda: None, name) for name in ("a", "b")]
        for other in others:
            other.join()

    seeds = [0, 1, 2, 3, 0, 1, 2, 3]
    result = explore_seeds(scenario, seeds)
    traces = [explore(scenario, seed).trace for seed in seeds]
    met: set[object] = set()
    counts = []
    for trace in traces:
        met |= {(one, other) for one, other in pairwise(trace) if one.thread != other.thread}
        counts.append(len(met))
    assert list(result.handovers) == counts
    assert counts[3] == counts[-1] > 0
    assert result.different == len(set(traces))
    found: Any = ExplorationSection(result, "seeds").as_json()
    assert found["failed"] is None
    assert [name for name, _, _ in found["strategies"]] == ["random", "pos", "surw", "pct"]
    assert sum(count for _, count, _ in found["strategies"]) == len(seeds)
    assert sum(new for _, _, new in found["strategies"]) == counts[-1]
    assert found["handovers"] == [[number + 1, count] for number, count in enumerate(counts)]


@pytest.mark.parametrize("count", [1, 7, 4321])
def test_a_learning_curve_has_all_steps_or_their_means(count: int) -> None:
    steps = [StepReport(n + 1, 1, {"loss": float(n)}, 10, 0.5) for n in range(count)]
    found: Any = TrainingSection(steps, [(count, {"loss": 1.0})]).as_json()
    curve = found["curves"]["loss"]
    assert len(curve) == len(found["steps"]) <= 2000
    assert found["steps"][-1] == count
    sizes = [b - a for a, b in zip([0, *found["steps"]], found["steps"], strict=False)]
    assert sum(value * size for value, size in zip(curve, sizes, strict=True)) == sum(range(count))


def test_a_loss_that_is_no_number_is_a_word() -> None:
    found = TrainingSection([StepReport(1, 1, {"loss": float("nan")}, 10, 0.5)], []).as_json()
    assert found["curves"]["loss"] == ["nan"]  # type: ignore[index]
    Report("net", (), [TrainingSection([StepReport(1, 1, {"loss": float("inf")}, 1, 1.0)], [])]).html()


@pytest.mark.slow
def test_the_commands_write_pages(cli: Cli, tmp_path: Path) -> None:
    page = tmp_path / "check.html"
    assert cli("check", "zoo:lenet", "--report", page)[0] == 0
    hazards, graph = data_of(page.read_text())
    assert hazards["data"]["holds"] is True  # type: ignore[index]
    assert graph["kind"] == "graph"
    page = tmp_path / "explore.html"
    assert cli("explore", "zoo:lenet", "--seeds", 1, "--report", page)[0] == 0
    (explored,) = data_of(page.read_text())
    assert explored["data"]["chosen"] == "seeds 0 to 0"  # type: ignore[index]
    assert explored["data"]["tried"] == 1  # type: ignore[index]
    page = tmp_path / "train.html"
    status, shown, _ = cli("train", "lenet_digits", "--epochs", 1, "--json", "--report", page)
    assert status == 0
    (training,) = data_of(page.read_text())
    assert training["data"]["steps"][-1] == json.loads(shown)["steps"]  # type: ignore[index]
