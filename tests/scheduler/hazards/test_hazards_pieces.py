"""The pieces of operators: whatever one may not write or read is found, and nothing else is changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

import dagexec
from dagexec import NetDef, Workspace
from dagexec.analysis.comparison import random_feeds
from dagexec.core.native import can_run, may_merge
from dagexec.core.operator_def import op
from dagexec.executor.source.loading import load_model
from dagexec.scheduler.hazards import Proof, check_net
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.plan.task_graph import TaskGraph
from dagexec.scheduler.run.work import Work
from tests.ops.onednn.engine import needs_onednn
from tests.scheduler.pieced import PIECES, SIZE, Fault, pieced_net, pieced_operator

pytestmark = pytest.mark.skipif(not can_run(), reason="no machine code runs here")

LABEL = "TurnedParts 'y' (operator 0) of net 'pieced'"


@contextmanager
def prepared(definition: NetDef, **arrays: object) -> Iterator[DAGNet]:
    workspace = Workspace()
    for name, array in arrays.items():
        workspace.feed_blob(name, array)
    with DAGNet(definition, workspace, num_workers=2) as net:
        net.prepared()
        yield net


def proof_of(fault: Fault) -> Proof:
    with pieced_operator(fault), prepared(pieced_net(), x=np.arange(SIZE, dtype=np.float32)) as net:
        return check_net(net)


def test_pieces_that_are_apart_are_proved_and_counted() -> None:
    proof = proof_of("")
    assert proof.holds
    assert proof.pieces == 2 * PIECES


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("merged phases", f"RAW on working memory of {LABEL}: {LABEL}, phase 0, piece 0 and piece 7: "
         "the second reads what the first writes"),
        ("one scratch", f"WAW on working memory of {LABEL}: {LABEL}, phase 0, piece 0 and piece 1: "
         "both write the same bytes"),
        ("a piece less", f"CONTROL on blob 'y': {LABEL}, 64 bytes are written by no piece"),
        ("a piece twice", f"WAW on blob 'y': {LABEL}, phase 1, piece 1 and piece 4: both write the same bytes"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_pieces_of_an_operator_is_found(fault: Fault, found: str) -> None:
    proof = proof_of(fault)
    assert not proof.holds
    assert found in list(map(str, proof.faults))


def test_the_check_leaves_all_memory_as_it_was() -> None:
    x = np.arange(SIZE, dtype=np.float32)
    with pieced_operator(), prepared(pieced_net(2), x=x) as net:
        net.run()
        before = [net.workspace.fetch_blob(name) for name in ("x", "b1", "y")]
        assert check_net(net).holds
        after = [net.workspace.fetch_blob(name) for name in ("x", "b1", "y")]
        np.testing.assert_array_equal(before, after)


def in_the_chain(work: Work) -> tuple[int, int]:
    """The tasks of the two phases."""
    [first, second] = [task for task, pieces in enumerate(work.graph.pieces) if pieces == PIECES]
    return first, second


def without_the_wait(work: Work) -> Work:
    first, second = in_the_chain(work)
    children = [list(row) for row in work.graph.children]
    children[first].remove(second)
    counts = [count - (task == second) for task, count in enumerate(work.graph.parent_counts)]
    return replace(work, graph=TaskGraph(work.graph.pieces, children, counts, work.graph.chains))


def without_a_piece(work: Work) -> Work:
    return replace(work, steps=[[*pieces[:1], *pieces[2:]] for pieces in work.steps])


def with_a_piece_twice(work: Work) -> Work:
    return replace(work, steps=[[*pieces[:1], *pieces[:1], *pieces[2:]] for pieces in work.steps])


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (without_the_wait, [f"CONTROL: {LABEL}, phase 1: does not wait for phase 0"]),
        (without_a_piece, [f"CONTROL: {LABEL}, phase {phase}, piece 1: is left out" for phase in (0, 1)]),
        (with_a_piece_twice, [
            f"CONTROL: {LABEL}, phase {phase}, piece {piece}: {what}"
            for phase in (0, 1) for piece, what in ((0, "is handed out 2 times"), (1, "is left out"))
        ]),
    ],
)  # fmt: skip
def test_work_that_is_not_what_operators_were_prepared_into_is_found(
    plant: object, found: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGEXEC_JOIN", "off")  # steps for pieces, which are easily left out
    assert not may_merge()
    with pieced_operator(), prepared(pieced_net(), x=np.arange(SIZE, dtype=np.float32)) as net:
        work = plant(net.work(net.prepared()))  # type: ignore[operator]
        monkeypatch.setattr(net, "work", lambda _preparation: work)
        assert [str(fault) for fault in check_net(net).faults] == found


def test_the_tasks_in_machine_code_are_what_operators_were_prepared_into() -> None:
    with pieced_operator(), prepared(pieced_net(3), x=np.arange(SIZE, dtype=np.float32)) as net:
        work = net.work(net.prepared())
        assert work.native is not None
        assert sum(count == PIECES for count in work.graph.pieces) == 6
        assert check_net(net).holds


@needs_onednn
@pytest.mark.parametrize("operator", ["FusedElementwise", "SpatialBN"])
def test_what_is_cut_of_images_in_blocks_of_channels_ends_with_a_block(operator: str) -> None:
    """As in DenseNet: 56 x 56 pixels of 64 channels are worth more pieces than they have blocks."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((1, 4, 56, 56, 16)).astype(np.float32)
    scale, bias, mean, variance = (generator.random((4, 16)).astype(np.float32) + 0.5 for _ in range(4))
    net = NetDef(name="blocks", external_input=["x"], external_output=["y"])
    if operator == "SpatialBN":
        blobs = {"scale": scale, "bias": bias, "mean": mean, "variance": variance}
        given = {name: array.reshape(-1) for name, array in blobs.items()}
        net.op.append(op(operator, ["x", *given], ["y"], engine="ONEDNN", arg={"is_test": 1, "order": "NCHW16c"}))
        scale, bias = scale / np.sqrt(variance + 1e-5), bias - mean * scale / np.sqrt(variance + 1e-5)
    else:
        given = {name: array.reshape(1, 4, 1, 1, 16) for name, array in (("scale", scale), ("bias", bias))}
        net.op.append(op(operator, ["x", *given], ["y"], engine="ONEDNN", arg={"post_ops": ["mul:1", "add:2"]}))
    with prepared(net, x=x, **given) as driven:
        driven.run()
        expected = x * scale[:, None, None] + bias[:, None, None]
        np.testing.assert_allclose(driven.workspace.fetch_blob("y"), expected, rtol=1e-5, atol=1e-5)
        proof = check_net(driven)
        assert proof.holds
        assert proof.pieces > 1


@pytest.mark.slow
@needs_onednn
@pytest.mark.parametrize("name", ["squeezenet", "nasnet_a", "mobilenet_v2"])
def test_the_pieces_of_bundled_models_are_apart(name: str) -> None:
    model = load_model(f"zoo:{name}")
    with dagexec.compile(model, optimize=True, net_type="dag", num_workers=2) as executor:
        net = cast(DAGNet, executor.net())
        for blob, array in random_feeds(model, {}).items():
            net.workspace.feed_blob(blob, array)
        proof = check_net(net)
        assert proof.faults == ()
        assert proof.pieces > 0
