"""Shrinking keeps what makes a net fail and leaves out the rest."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef
from dagexec.core.graph import build_graph
from dagexec.scheduler.exploration import explore, explore_seeds
from dagexec.scheduler.exploration.shrink import shrink
from tests.nets import net_of, noop_nets
from tests.scheduler.exploration.test_exploration_pool import TwoStepPool
from tests.scheduler.scenarios import pool_scenario


def names(net: NetDef) -> list[str]:
    """The first output of each operator."""
    return [operator.output[0] for operator in net.op]


def test_what_does_not_matter_goes_whatever_depends_on_it() -> None:
    net = net_of([[], [0], [0], [1, 2], [3], [], [5, 4]])
    smaller = shrink(net, lambda candidate: {"b5", "b2"} <= set(names(candidate)))
    assert names(smaller) == ["b2", "b5"]
    assert not smaller.op[0].input


def test_readers_of_an_operator_that_goes_read_its_first_input() -> None:
    net = NetDef(name="through")
    net.external_input.append("x")
    for source, target in (("x", "a"), ("a", "b"), ("b", "c")):
        net.op.add(type="Relu", input=[source], output=[target])
    net.external_output.extend(["a", "c"])
    smaller = shrink(net, lambda candidate: "c" in names(candidate))
    assert [(list(op.input), list(op.output)) for op in smaller.op] == [(["x"], ["c"])]
    assert (list(smaller.external_input), list(smaller.external_output)) == (["x"], ["c"])


def test_control_inputs_are_kept_or_led_elsewhere() -> None:
    net = net_of([[], [0], []])
    net.op[2].control_input.append("b1")
    smaller = shrink(net, lambda candidate: any(op.control_input for op in candidate.op))
    assert [list(op.control_input) for op in smaller.op] == [[], ["b0"]]


def test_a_net_that_does_not_fail_is_not_shrunk() -> None:
    with pytest.raises(ValueError, match="net 'net' does not fail"):
        shrink(net_of([[]]), lambda net: False)


def test_the_limit_bounds_the_nets_that_are_tried() -> None:
    tried: list[int] = []
    net = net_of([[] for _ in range(40)])

    def fails(candidate: NetDef) -> bool:
        tried.append(len(candidate.op))
        return "b39" in names(candidate)

    assert names(shrink(net, fails)) == ["b39"]
    assert len(tried) < 40
    tried.clear()
    assert len(shrink(net, fails, limit=3).op) > 1
    assert len(tried) == 4


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(net=noop_nets(), data=st.data())
def test_a_shrunk_net_is_valid_and_none_smaller_by_one_operator_fails(net: NetDef, data: st.DataObject) -> None:
    wanted = data.draw(st.sets(st.sampled_from([tuple(op.output) for op in net.op]), min_size=1, max_size=2))

    def fails(candidate: NetDef) -> bool:
        build_graph(candidate)
        return wanted <= {tuple(op.output) for op in candidate.op}

    smaller = shrink(net, fails)
    assert fails(smaller)
    assert len(smaller.op) <= len(net.op)
    assert len(shrink(smaller, fails).op) == len(smaller.op)


@pytest.mark.slow
def test_a_net_that_shows_a_race_in_the_pool_becomes_a_join() -> None:
    """The planted bug loses an update of a count, so it needs a child and two parents that run side by side."""
    parents = [[], [0], [0], [1, 2], [3], [3], [4, 5], [0]]

    def fails(net: NetDef) -> bool:
        rows = _rows(net)
        return explore_seeds(pool_scenario(rows, 2, TwoStepPool), range(40)).failed is not None

    smaller = shrink(net_of(parents), fails)
    assert _rows(smaller) == [[], [], [0, 1]]
    assert explore(pool_scenario(_rows(smaller), 2), 0).failure is None


def _rows(net: NetDef) -> list[list[int]]:
    """The parents of each operator of a net in which each writes a blob of its own."""
    index_of = {name: index for index, name in enumerate(names(net))}
    return [[index_of[name] for name in dict.fromkeys(op.input)] for op in net.op]
