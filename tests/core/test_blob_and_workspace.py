"""Blobs, workspaces and their parents; nets kept by name."""

import threading
from typing import Any

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.blob import Blob
from dagexec.core.tensor import Tensor
from dagexec.core.workspace import net_types
from dagexec.errors import BlobTypeError, DagexecError, MissingBlobError, SchemaError, ShapeError
from tests.ops.running import operator_def


def relu_net(name: str = "net", source: str = "x", target: str = "y") -> NetDef:
    return NetDef(name=name, op=[operator_def("Relu", [source], [target])])


def test_a_blob_holds_one_object_of_any_type() -> None:
    blob = Blob("b")
    with pytest.raises(MissingBlobError, match="blob 'b' is empty; expected a Tensor"):
        blob.get(Tensor)
    blob.value = "text"
    assert blob.get(str) == "text"
    with pytest.raises(BlobTypeError, match="blob 'b' holds a str; expected a Tensor"):
        blob.tensor()


def test_an_empty_blob_is_given_one_tensor() -> None:
    blob = Blob("b")
    tensor = blob.tensor()
    assert tensor.is_empty
    assert blob.tensor() is tensor


def test_what_is_fed_is_fetched_as_a_copy() -> None:
    workspace = Workspace()
    source = np.array([1.0, 2.0])
    workspace.feed_blob("x", source)
    workspace.feed_blob("n", [[1, 2], [3, 4]])
    workspace.feed_blob("s", 2.5)
    source[0] = 9
    workspace.fetch_blob("x")[1] = 9
    assert workspace.fetch_blob("x").tolist() == [1.0, 2.0]
    assert workspace.fetch_blob("n").shape == (2, 2)
    assert workspace.fetch_blob("s").shape == ()
    assert workspace.blobs() == workspace.local_blobs() == ["n", "s", "x"]


def test_a_missing_or_empty_blob_is_named() -> None:
    workspace = Workspace(Workspace())
    for ask in (workspace.get_blob, workspace.fetch_blob):
        with pytest.raises(MissingBlobError, match="blob 'x' does not exist in this workspace or its parents"):
            ask("x")
    assert workspace.get_blob_or_none("x") is None
    workspace.create_blob("x")
    with pytest.raises(MissingBlobError, match="blob 'x' is empty"):
        workspace.fetch_blob("x")


def test_feeding_refuses_other_types_and_ragged_lists() -> None:
    workspace = Workspace()
    workspace.create_blob("b").value = object()
    with pytest.raises(BlobTypeError, match="blob 'b' holds a object; expected a Tensor"):
        workspace.feed_blob("b", 1.0)
    with pytest.raises(ShapeError, match="timedelta64"):
        workspace.feed_blob("c", np.zeros(2, "timedelta64[s]"))


def test_a_child_reads_through_to_its_parents_and_writes_there_what_is_there() -> None:
    grandparent = Workspace()
    child = Workspace(Workspace(grandparent))
    grandparent.feed_blob("w", 1.0)
    assert child.has_blob("w")
    assert child.create_blob("w") is grandparent.get_blob("w")
    child.feed_blob("w", 2.0)
    assert grandparent.fetch_blob("w") == 2.0
    child.feed_blob("own", 3.0)
    assert not grandparent.has_blob("own")
    assert (child.blobs(), child.local_blobs()) == (["own", "w"], ["own"])


def test_a_local_blob_hides_the_parents() -> None:
    parent = Workspace()
    parent.feed_blob("w", 1.0)
    child = Workspace(parent)
    child.create_local_blob("w").tensor().feed(np.array(5.0))
    assert (child.fetch_blob("w"), parent.fetch_blob("w")) == (5.0, 1.0)
    child.remove_blob("w")
    assert child.fetch_blob("w") == 1.0
    with pytest.raises(MissingBlobError, match="'w' is not in this workspace itself"):
        child.remove_blob("w")


def test_adopting_hides_the_parents_blob_and_takes_no_copy() -> None:
    parent = Workspace()
    parent.feed_blob("w", [1.0, 2.0])
    child, mine = Workspace(parent), np.array([3.0, 4.0])
    child.adopt_blob("w", mine)
    assert np.shares_memory(child.get_blob("w").tensor().array, mine)
    assert parent.fetch_blob("w").tolist() == [1.0, 2.0]


def test_threads_that_create_one_blob_get_the_same() -> None:
    workspace, ready, found = Workspace(), threading.Barrier(8), []

    def create() -> None:
        ready.wait()
        found.append([workspace.create_blob(f"b{index}") for index in range(50)])

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(one is other for blobs in found for one, other in zip(blobs, found[0], strict=True))


def test_a_net_is_kept_and_run_by_its_name() -> None:
    workspace = Workspace()
    workspace.feed_blob("x", [-1.0, 2.0])
    net = workspace.create_net(relu_net())
    assert workspace.nets == {"net": net}
    workspace.run_net("net")
    assert workspace.fetch_blob("y").tolist() == [0.0, 2.0]
    workspace.delete_net("net")
    for act in (workspace.run_net, workspace.delete_net):
        with pytest.raises(DagexecError, match=r"net 'net' does not exist in this workspace; nets: \[\]"):
            act("net")
    with pytest.raises(DagexecError, match="closed"):
        net.run()


def test_a_net_name_is_used_once_unless_overwritten() -> None:
    workspace = Workspace()
    workspace.feed_blob("x", [-1.0, 2.0])
    first = workspace.create_net(relu_net())
    with pytest.raises(SchemaError, match="net 'net' already exists; pass overwrite=True"):
        workspace.create_net(relu_net(target="z"))
    second = workspace.create_net(relu_net(target="z"), overwrite=True)
    assert workspace.nets["net"] is second
    with pytest.raises(DagexecError, match="closed"):
        first.run()
    workspace.run_net("net")
    assert workspace.fetch_blob("z").tolist() == [0.0, 2.0]
    workspace.delete_net("net")


def test_a_net_that_cannot_be_built_leaves_the_old_one() -> None:
    workspace = Workspace()
    workspace.feed_blob("x", [1.0])
    kept = workspace.create_net(relu_net())
    with pytest.raises(MissingBlobError, match=r"Relu 'y' \(operator 0\) of net 'net': input blob 'q' does not exist"):
        workspace.create_net(relu_net(source="q"), overwrite=True)
    assert workspace.nets["net"] is kept
    workspace.run_net("net")
    workspace.delete_net("net")


def test_names_and_types_of_nets_are_checked() -> None:
    workspace = Workspace()
    workspace.feed_blob("x", [1.0])
    with pytest.raises(SchemaError, match="a net needs a name"):
        workspace.create_net(relu_net(""))
    with pytest.raises(SchemaError, match=r"net 'net': type 'fancy' is unknown; expected one of \[.*'simple'"):
        workspace.create_net(relu_net(), "fancy")
    assert {"simple", "dag", "async_dag"} <= set(net_types())


@pytest.mark.parametrize("net_type", ["simple", "dag", "async_dag"])
def test_the_type_is_the_arguments_else_the_defs(net_type: str) -> None:
    workspace = Workspace()
    workspace.feed_blob("x", [-3.0])
    definition = relu_net()
    definition.type = net_type
    plain = workspace.create_net(definition)
    definition.name = "other"
    asked = workspace.create_net(definition, "simple", 2)
    assert type(plain).net_type == net_type  # type: ignore[attr-defined]
    assert type(asked).net_type == "simple"  # type: ignore[attr-defined]
    for name in ("net", "other"):
        workspace.run_net(name)
        workspace.delete_net(name)
    assert workspace.fetch_blob("y").tolist() == [0.0]


def test_run_net_once_runs_in_list_order_and_keeps_no_net() -> None:
    workspace = Workspace()
    definition = NetDef(
        name="init",
        type="a type that does not matter here",
        op=[operator_def("ConstantFill", [], ["a"], shape=[2], value=-1.0), operator_def("Relu", ["a"], ["a"])],
    )
    workspace.run_net_once(definition)
    assert workspace.fetch_blob("a").tolist() == [0.0, 0.0]
    assert workspace.nets == {}
    workspace.run_operator_once(operator_def("ConstantFill", [], ["b"], value=4))
    assert workspace.fetch_blob("b") == 4


def test_a_net_of_a_child_reads_the_parents_parameters_and_keeps_its_outputs() -> None:
    parent = Workspace()
    parent.feed_blob("x", [-1.0, 1.0])
    children = [Workspace(parent) for _ in range(2)]
    for child in children:
        child.run_net_once(relu_net())
    assert not parent.has_blob("y")
    assert children[0].get_blob("y") is not children[1].get_blob("y")
    assert children[1].fetch_blob("y").tolist() == [0.0, 1.0]


def test_lists_of_unequal_lengths_are_a_shape_error_that_names_the_blob() -> None:
    workspace = Workspace()
    with pytest.raises(ShapeError, match="blob 'x' cannot be fed"):
        workspace.feed_blob("x", [[1.0], [1.0, 2.0]])
    assert not workspace.has_blob("x")


def test_of_two_nets_of_one_name_made_at_the_same_time_the_second_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace()
    definition = NetDef(name="n", op=[operator_def("NoOp", [], [])])
    build, made = Workspace.build_net, []

    def build_after_another(self: Workspace, *arguments: Any) -> Any:
        monkeypatch.setattr(Workspace, "build_net", build)
        made.append(self.create_net(definition))
        return build(self, *arguments)

    monkeypatch.setattr(Workspace, "build_net", build_after_another)
    with pytest.raises(SchemaError, match="'n' already exists"):
        workspace.create_net(definition)
    assert workspace.nets["n"] is made[0]
    workspace.run_net("n")
