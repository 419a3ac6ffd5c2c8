"""The backward pass on random nets: gradients against differences, pruning, order, and every schedule."""

from __future__ import annotations

import collections
from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef, Workspace
from dagexec.core.gradient import Gradient
from dagexec.core.registry import verify
from dagexec.errors import GradientError
from dagexec.training.backward import add_gradient_operators
from tests.training.random_nets import INPUTS, SIZE, RandomNet, random_nets, run

REFUSALS = ("overwrites", "no gradient leads", "depends on none")


def differentiated(net: NetDef, wanted: Collection[str] | None = None) -> tuple[NetDef, dict[str, Gradient]]:
    """A copy of a net with gradient operators of `loss`, and the gradients."""
    made = NetDef()
    made.CopyFrom(net)
    return made, add_gradient_operators(made, ["loss"], wanted=wanted)


def differentiated_or_refused(
    case: RandomNet, wanted: Collection[str] | None
) -> tuple[NetDef, dict[str, Gradient]] | None:
    """The same; None when the net overwrites what a gradient needs, or has no way from the loss."""
    try:
        return differentiated(case.net, wanted)
    except GradientError as error:
        if not any(reason in str(error) for reason in REFUSALS):
            raise
        return None


def feed(workspace: Workspace, case: RandomNet) -> None:
    """Give the net what it reads."""
    for name, array in case.feeds.items():
        workspace.feed_blob(name, array)


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(random_nets(), st.sampled_from([None, INPUTS, ["b"]]), st.integers(0, 1000))
def test_gradients_of_random_nets_are_the_numerical_ones(
    case: RandomNet, wanted: Collection[str] | None, seed: int
) -> None:
    made = differentiated_or_refused(case, wanted)
    if made is None:
        return
    net, gradients = made
    rng = np.random.default_rng(seed)
    for blob in INPUTS if wanted is None else wanted:
        direction = rng.uniform(-1, 1, (SIZE, SIZE))
        found = 0.0
        if blob in gradients:
            found = float(np.sum(run(net, case.feeds, [str(gradients[blob])])[0] * direction))
        np.testing.assert_allclose(found, case.slope(blob, direction), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(random_nets(in_place=False, smooth=True), st.integers(0, 1000))
def test_every_gradient_that_is_returned_holds_at_the_end_of_the_run(case: RandomNet, seed: int) -> None:
    made = differentiated_or_refused(case, None)
    if made is None:
        return
    net, gradients = made
    rng = np.random.default_rng(seed)
    names = [name for name in gradients if not name.startswith(("weight", "total", "loss"))]
    values = run(net, case.feeds, [*names, *(str(gradients[name]) for name in names)])
    for position, blob in enumerate(names):
        value, gradient = values[position], values[len(names) + position]
        direction = rng.uniform(-1, 1, (SIZE, SIZE))
        cut = NetDef(name="cut", op=[op for op in case.plain.op if op.output[0] != blob])
        behind = RandomNet(cut, cut, {**case.feeds, blob: value})
        np.testing.assert_allclose(np.sum(gradient * direction), behind.slope(blob, direction), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(random_nets(), st.sets(st.sampled_from(INPUTS), min_size=1))
def test_only_what_the_wanted_gradients_need_is_computed_and_to_the_same_bytes(
    case: RandomNet, wanted: set[str]
) -> None:
    made, whole = differentiated_or_refused(case, wanted), differentiated_or_refused(case, None)
    if made is None or whole is None:
        return
    net, gradients = made
    assert gradients.keys() == whole[1].keys() & wanted
    needed = {str(name) for name in gradients.values()}
    for definition in reversed(net.op[len(case.net.op) :]):
        assert needed.intersection(definition.output), f"nobody needs what {definition.type} computes"
        needed.difference_update(definition.output)
        needed.update(definition.input)
    names = sorted(gradients)
    few = run(net, case.feeds, [str(gradients[name]) for name in names])
    all_of_them = run(whole[0], case.feeds, [str(whole[1][name]) for name in names])
    assert [array.tobytes() for array in few] == [array.tobytes() for array in all_of_them]


@settings(max_examples=60, deadline=None)
@given(random_nets())
def test_no_gradient_operator_writes_a_forward_blob_or_breaks_its_schema(case: RandomNet) -> None:
    made = differentiated_or_refused(case, None)
    if made is None:
        return
    forward = {name for definition in case.net.op for name in (*definition.input, *definition.output)}
    for index, definition in enumerate(made[0].op[len(case.net.op) :]):
        verify(definition, index=index)
        assert forward.isdisjoint(definition.output)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(random_nets())
def test_every_schedule_gives_the_same_bytes(case: RandomNet) -> None:
    made = differentiated_or_refused(case, None)
    if made is None:
        return
    net, gradients = made
    names = [str(name) for name in gradients.values()]
    expected = [array.tobytes() for array in run(net, case.feeds, names)]
    for net_type in ("dag", "async_dag"):
        workspace = Workspace()
        feed(workspace, case)
        built = workspace.build_net(net, net_type, 2)
        try:
            for _ in range(2):
                feed(workspace, case)
                built.run()
                assert [workspace.fetch_blob(name).tobytes() for name in names] == expected
        finally:
            built.close()


@pytest.mark.slow
def test_most_random_nets_have_gradients() -> None:
    outcomes: collections.Counter[bool] = collections.Counter()

    @settings(max_examples=100, deadline=None, database=None, derandomize=True)
    @given(random_nets())
    def count(case: RandomNet) -> None:
        outcomes[differentiated_or_refused(case, None) is not None] += 1

    count()
    assert outcomes[True] > outcomes[False]
