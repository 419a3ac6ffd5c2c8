"""docs/scheduling.md, followed: its policy is short and runs, and the table is complete; and the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dagexec.scheduler.exploration import explore_seeds
from dagexec.scheduling import policy_names
from tests.command_line import Cli
from tests.scheduler.scenarios import expected, fed, outputs_of, sums
from tests.scheduling.test_policies import WIDE, pool_scenario
from tests.test_examples import blocks

PAGE = "docs/scheduling.md"


def test_the_policy_of_the_page_has_under_50_lines_and_runs_in_every_schedule() -> None:
    (source,) = blocks(PAGE)
    assert source.count("\n") < 50
    names: dict[str, Any] = {}
    exec(compile(source, "balanced.py", "exec"), names)
    net, workspace = sums(WIDE), fed()
    with workspace.create_net(net, "dag", 2, policy=names["Balanced"]) as made:  # type: ignore[attr-defined]
        made.run()
        assert outputs_of(workspace, net) == expected(net)
    assert explore_seeds(pool_scenario(WIDE, names["Balanced"](), 2, 2), range(20)).failed is None


def test_the_table_of_the_page_has_all_bundled_policies() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (Path(__file__).parents[2] / PAGE).read_text(), re.MULTILINE)
    assert tuple(rows) == policy_names()


@pytest.mark.slow
def test_the_command_line_races_policies_runs_them_and_explores_them(cli: Cli) -> None:
    status, out, err = cli(
        "compare", "zoo:lenet", "--policy", "heft,min_min", "--num-workers", 2, "--repeat", 2, "--what-if", 4, "--json"
    )
    assert status == 0, err
    rows = json.loads(out)["rows"]
    assert [row["net_type"] for row in rows] == ["simple", "dag", "dag:heft", "dag:min_min"]
    assert all(row["same_bytes"] for row in rows)
    assert cli("run", "zoo:lenet", "--policy", "work_stealing")[0] == 0
    assert cli("explore", "zoo:lenet", "--policy", "ios", "--seeds", 2)[0] == 0


def test_the_command_line_says_which_policies_there_are(cli: Cli) -> None:
    for words in (["run"], ["compare", "--repeat", 1], ["explore"]):
        status, _, err = cli(words[0], "zoo:lenet", *words[1:], "--policy", "hefd")
        assert status == 2
        assert "policy 'hefd' is unknown" in err
        assert "did you mean 'heft'" in err


@pytest.mark.slow
def test_names_of_policies_leave_the_table_of_a_comparison_as_wide_as_a_terminal(cli: Cli) -> None:
    status, out, err = cli("compare", "zoo:lenet", "--policy", "work_stealing", "--num-workers", 2, "--repeat", 7)
    assert status == 0, err
    table = out[out.index("rounds") :]
    assert "work_" in table
    assert "stealing" in table
    assert "median" in table
    assert "\N{HORIZONTAL ELLIPSIS}" not in table
