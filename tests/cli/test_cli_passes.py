"""`dagexec inspect --passes`: what compilation does to a model."""

from __future__ import annotations

import json

from dagexec.compiler.passes.catalog import GRAPH_PASSES
from tests.command_line import Cli


def test_each_pass_has_a_row_with_what_it_changed(cli: Cli) -> None:
    status, out, _ = cli("inspect", "zoo:lenet", "--passes")
    assert status == 0
    for step in GRAPH_PASSES:
        assert step.name in out
    assert "FC 'fc3/1' applies relu of Relu 'fc3'" in out


def test_json_has_counts_and_all_changes(cli: Cli) -> None:
    status, out, _ = cli("inspect", "zoo:squeezenet", "--passes", "--json")
    passes = {entry["name"]: entry for entry in json.loads(out)["passes"]}
    assert status == 0
    fusion = passes["activation-fusion"]
    assert len(fusion["changes"]) == 26
    assert fusion["operators_before"] - fusion["operators_after"] == 26
    assert len(passes["single-assignment"]["changes"]) == 26
    assert "passes" not in json.loads(cli("inspect", "zoo:lenet", "--json")[1])


def test_a_pass_can_be_left_out_by_name(cli: Cli) -> None:
    _, out, _ = cli("inspect", "zoo:lenet", "--without-pass", "activation-fusion", "--without-pass", "layout", "--json")
    names = [entry["name"] for entry in json.loads(out)["passes"]]
    assert "elementwise-fusion" in names
    assert not {"activation-fusion", "layout"} & set(names)


def test_an_unknown_pass_is_refused_with_the_list(cli: Cli) -> None:
    status, _, err = cli("inspect", "zoo:lenet", "--without-pass", "activation-fuson")
    assert status != 0
    assert "did you mean 'activation-fusion'?" in err.replace("\n", " ")
    assert "constant-folding" in err
