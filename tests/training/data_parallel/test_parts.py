"""The parts: replica devices, pairs, the order of additions, buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec.core.dtypes import FLOAT32, FLOAT64
from dagexec.core.proto import OperatorDef
from dagexec.core.schema import TensorType
from dagexec.errors import ArgumentError, DeviceError
from dagexec.training.data_parallel.bucketing import fill_buckets
from dagexec.training.data_parallel.pairing import NO_PARENT, DevicePair, device_pairs, merges_of
from dagexec.training.data_parallel.replica_devices import find_replica_devices


def test_places_have_scopes_by_device_and_hosts_are_counted() -> None:
    assert [place.scope for place in find_replica_devices(["cpu", "sim:7", "cpu"])] == ["cpu_0", "sim_7", "cpu_1"]


@pytest.mark.parametrize(
    ("devices", "problem"),
    [
        ([], "at least one"),
        ("cpu", "needs a list of at least one device; found 'cpu'"),
        (["cpu", "sim:99"], "entry 1 of the devices, sim:99, is missing here"),
        (["cuda:3"], "entry 0 of the devices, cuda:3, is missing here"),
        (["sim:1", "cpu", "sim:1"], "sim:1 is listed twice"),
        (["tpu:0"], "'tpu:0' is unknown"),
    ],
)
def test_bad_lists_of_devices_are_refused_by_name(devices: list[str], problem: str) -> None:
    with pytest.raises(DeviceError, match=problem):
        find_replica_devices(devices)


def test_neighbors_are_paired_round_by_round() -> None:
    def of(count: int) -> list[tuple[int, int]]:
        return [(pair.parent, pair.device) for pair in device_pairs(count)]

    assert of(1) == [(NO_PARENT, 0)]
    assert of(2) == [(NO_PARENT, 0), (0, 1)]
    assert of(4) == [(NO_PARENT, 0), (0, 1), (2, 3), (0, 2)]
    assert of(5) == [(NO_PARENT, 0), (0, 1), (2, 3), (0, 2), (0, 4)]
    assert of(6) == [(NO_PARENT, 0), (0, 1), (2, 3), (4, 5), (0, 2), (0, 4)]


def test_devices_that_are_close_are_paired_first() -> None:
    boards = {0: "a", 1: "b", 2: "a", 3: "b", 4: "c"}
    pairs = device_pairs(5, lambda one, other: boards[one] == boards[other])
    assert pairs[1:3] == (DevicePair(0, 2), DevicePair(1, 3))
    assert pairs[0] == DevicePair(NO_PARENT, 0)
    assert {pair.device for pair in pairs} == set(range(5))


@given(st.integers(1, 40), st.sampled_from([None, lambda a, b: a % 3 == b % 3, lambda a, b: True]))
def test_pairs_form_one_tree_of_all_devices(count: int, close: object) -> None:
    pairs = device_pairs(count, close)  # type: ignore[arg-type]
    parents = {pair.device: pair.parent for pair in pairs}
    assert len(pairs) == len(parents) == count
    assert [pair.parent for pair in pairs].count(NO_PARENT) == 1
    for device in range(count):
        seen = set()
        while parents[device] != NO_PARENT:
            assert device not in seen
            seen.add(device)
            device = parents[device]
        assert device == pairs[0].device


def summed_as_text(count: int) -> str:
    """What the merges of `count` micro-batches add to what, with brackets."""
    kept: dict[int, str] = {}
    total = ""
    for micro_batch in range(count):
        total = str(micro_batch)
        merges = merges_of(micro_batch, count)
        for level in merges.levels:
            total = f"({kept.pop(level)}+{total})"
        if merges.keep is not None:
            assert merges.keep not in kept
            kept[merges.keep] = total
    assert not kept
    return total


def summed_by_tree(count: int) -> str:
    """What the tree of pairs adds to what: a parent adds its children in the order of the pairs."""
    texts = {device: str(device) for device in range(count)}
    for pair in device_pairs(count)[1:]:
        texts[pair.parent] = f"({texts[pair.parent]}+{texts[pair.device]})"
    return texts[0]


@given(st.integers(1, 70))
def test_one_device_adds_its_micro_batches_in_the_order_of_the_tree(count: int) -> None:
    assert summed_as_text(count) == summed_by_tree(count)


def test_the_order_for_seven() -> None:
    assert summed_as_text(7) == "(((0+1)+(2+3))+((4+5)+6))"


def test_buckets_are_filled_in_the_order_in_which_gradients_are_made() -> None:
    operators = [OperatorDef(type="G", output=[name]) for name in ("c_grad", "b_grad", "other", "a_grad", "d_grad")]
    gradients = {name: f"{name}_grad" for name in "abcd"}
    types = {name: TensorType((4,), FLOAT32) for name in "abc"} | {"d": TensorType((4,), FLOAT64)}
    buckets = fill_buckets(operators, gradients, types, 20)
    assert [bucket.gradients for bucket in buckets] == [("c_grad", "b_grad"), ("d_grad",), ("a_grad",)]
    assert [bucket.after for bucket in buckets] == [1, 4, 3]
    assert [bucket.nbytes for bucket in buckets] == [32, 32, 16]
    assert len({bucket.name for bucket in buckets}) == 3
    with pytest.raises(ArgumentError, match="bucket_bytes must be at least 1, found 0"):
        fill_buckets(operators, gradients, types, 0)
