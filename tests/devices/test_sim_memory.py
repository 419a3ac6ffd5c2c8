"""Memory of the simulated device: the host sees its shape and not its elements, and every byte is counted."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from dagexec.core.descriptor import TensorDescriptor
from dagexec.core.device import Device
from dagexec.core.runtime import runtime_of
from dagexec.core.tensor import Tensor
from dagexec.devices.sim import SimArray, SimRuntime, simulated, unwrapped
from dagexec.errors import DeviceError, ResourceError, ShapeError

SIM = Device("sim", 0)
VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def runtime() -> Iterator[SimRuntime]:
    with simulated("sim:0") as runtime:
        yield runtime


def tensor_of(values: Any, device: Device = SIM) -> Tensor:
    tensor = Tensor(device)
    tensor.feed(np.asarray(values))
    return tensor


TOUCHES: dict[str, Callable[[Any], object]] = {
    "asarray": np.asarray,
    "array": np.array,
    "ascontiguousarray": np.ascontiguousarray,
    "ufunc": lambda a: np.add(a, 1),
    "ufunc with out": lambda a: np.add(np.ones((3, 4)), 1, out=a),
    "ufunc method": lambda a: np.add.reduce(a),
    "operator": lambda a: a + 1,
    "reflected operator": lambda a: 1 - a,
    "operator with an array": lambda a: np.ones((3, 4)) * a,
    "in-place operator": lambda a: a.__iadd__(1),
    "matmul": lambda a: a @ a.T,
    "negation": lambda a: -a,
    "comparison": lambda a: a == a,
    "less": lambda a: a < 3,
    "copyto": lambda a: np.copyto(a, 0),
    "copyto from": lambda a: np.copyto(np.empty((3, 4), np.float32), a),
    "concatenate": lambda a: np.concatenate([a, a]),
    "sum": lambda a: a.sum(),
    "np.sum": np.sum,
    "allclose": lambda a: np.allclose(a, 0),
    "element": lambda a: a[1, 2],
    "advanced index": lambda a: a[[0, 2]],
    "mask": lambda a: a[np.ones((3, 4), bool)],
    "assignment": lambda a: a.__setitem__(0, 1),
    "slice assignment": lambda a: a.__setitem__(slice(None), VALUES),
    "iteration": list,
    "contains": lambda a: 3 in a,
    "float": lambda a: float(a[:1, :1].reshape(())),
    "int": lambda a: int(a[:1, :1].reshape(())),
    "index": lambda a: range(5)[a[:1, :1].reshape(())],
    "complex": lambda a: complex(a[:1, :1].reshape(())),
    "bool": bool,
    "item": lambda a: a.item(0),
    "tolist": lambda a: a.tolist(),
    "tobytes": lambda a: a.tobytes(),
    "copy": lambda a: a.copy(),
    "astype": lambda a: a.astype(np.float64),
    "fill": lambda a: a.fill(0),
    "data": lambda a: a.data,
    "address": lambda a: a.ctypes,
    "flat": lambda a: a.flat,
    "dlpack": np.from_dlpack,
    "copy module": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda a: np.save("/dev/null", a),
    "reshape that copies": lambda a: a.T.reshape(12),
}


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES.keys())
def test_the_host_cannot_touch_an_element(runtime: SimRuntime, touch: Callable[[Any], object]) -> None:
    tensor = tensor_of(VALUES)
    with pytest.raises(DeviceError, match="sim:0: the host touches elements of a float32 array of shape") as caught:
        touch(tensor.array)
    assert "copy it to the host first" in str(caught.value)
    assert tensor.fetch().tolist() == VALUES.tolist()


def test_metadata_and_views_are_the_hosts_to_see(runtime: SimRuntime) -> None:
    array: Any = tensor_of(VALUES).array
    assert isinstance(array, SimArray)
    assert repr(array) == str(array) == f"{array}" == "SimArray(shape=(3, 4), dtype=float32, device=sim:0)"
    assert (array.shape, array.dtype, array.strides, array.ndim) == ((3, 4), np.float32, (16, 4), 2)
    assert (array.size, array.itemsize, array.nbytes, len(array)) == (12, 4, 48, 3)
    assert array.flags.c_contiguous
    assert not array.T.flags.c_contiguous
    for view, same in (
        (array[1:, ::2], VALUES[1:, ::2]),
        (array[..., None], VALUES[..., None]),
        (array[1], VALUES[1]),
        (array.reshape(2, 6), VALUES.reshape(2, 6)),
        (array.reshape((4, 3)), VALUES.reshape(4, 3)),
        (array.reshape(-1), VALUES.reshape(-1)),
        (array.view(np.int32), VALUES.view(np.int32)),
        (array.transpose(1, 0), VALUES.transpose(1, 0)),
        (array.swapaxes(0, 1), VALUES.swapaxes(0, 1)),
        (array[None].squeeze(0), VALUES),
        (array.strided((2, 2), (4, 16)), np.lib.stride_tricks.as_strided(VALUES, (2, 2), (4, 16))),
    ):
        assert isinstance(view, SimArray)
        assert (view.shape, view.strides, view.dtype) == (same.shape, same.strides, same.dtype)
        assert unwrapped(view).tolist() == same.tolist()
        assert np.shares_memory(view, array)
    assert not np.shares_memory(array, tensor_of(VALUES).array)
    assert (np.shape(array), np.ndim(array), np.size(array)) == ((3, 4), 2, 12)
    with pytest.raises(AttributeError, match="'SimArray' object has no attribute 'cuda'"):
        array.cuda  # noqa: B018
    with pytest.raises(TypeError):
        hash(array)


def test_values_go_to_the_device_across_devices_and_back(runtime: SimRuntime) -> None:
    with simulated("sim:1") as other:
        near, far = tensor_of(VALUES), Tensor(Device("sim", 1))
        other.copy_now(far.resize(near.shape, near.meta), near.array)
        assert far.fetch().tolist() == VALUES.tolist()
        far.feed(VALUES + 1)
        assert near.fetch().tolist() == VALUES.tolist()
        twin = Tensor(SIM)
        runtime.copy_now(twin.resize(near.shape, near.meta), near.array)
        assert twin.fetch().tolist() == VALUES.tolist()


def test_a_strided_tensor_keeps_its_layout_on_the_device(runtime: SimRuntime) -> None:
    tensor = Tensor(SIM)
    tensor.feed(VALUES, TensorDescriptor((3, 4), (1, 3)))
    assert tensor.array.strides == (4, 12)
    assert tensor.fetch().tolist() == VALUES.tolist()


def test_device_arrays_keep_their_bytes_when_the_tensor_grows_in_place(runtime: SimRuntime) -> None:
    tensor, other = tensor_of(VALUES), Tensor(SIM)
    other.share(tensor)
    other.resize((12,), other.meta)  # leaves the shared memory, with its values
    assert other.fetch().tolist() == VALUES.reshape(-1).tolist()


def test_every_byte_is_counted_until_the_last_view_is_gone(runtime: SimRuntime) -> None:
    assert runtime.statistics().allocated_bytes == 0
    first, second = runtime.allocate(1000), runtime.allocate(24)
    assert runtime.statistics().allocated_bytes == 1024
    view = unwrapped(first)[10:20].reshape(2, 5)  # what a prepared step holds
    del first
    assert runtime.statistics().allocated_bytes == 1024
    del view
    assert runtime.statistics().allocated_bytes == 24
    del second
    assert runtime.statistics().allocated_bytes == 0
    third = runtime.allocate(8)
    moment = runtime.statistics()
    assert (moment.allocated_bytes, moment.peak_bytes, moment.limit_bytes) == (third.nbytes, 1024, None)


def test_tensors_give_their_memory_back(runtime: SimRuntime) -> None:
    tensor = tensor_of(VALUES)
    assert runtime.statistics().allocated_bytes == 48
    tensor.feed(np.zeros(100))
    assert runtime.statistics().allocated_bytes == 800
    del tensor
    assert runtime.statistics().allocated_bytes == 0


@pytest.mark.slow
def test_a_device_runs_out_of_memory_at_its_limit() -> None:
    with simulated("sim:0", memory_limit=1000) as runtime:
        held = runtime.allocate(600)
        with pytest.raises(ResourceError) as caught:
            runtime.allocate(401)
        expected = "sim:0: out of memory: an allocation of 401 bytes; the device holds 600 of 1,000 bytes"
        assert str(caught.value) == expected
        rest = runtime.allocate(400)
        assert runtime.statistics().limit_bytes == 1000
        del held, rest
        assert runtime.allocate(1000).nbytes == 1000


def test_memory_that_only_a_reference_cycle_holds_is_no_reason_to_fail() -> None:
    with simulated("sim:0", memory_limit=1000) as runtime:
        cycle: list[object] = [runtime.allocate(900)]
        cycle.append(cycle)
        del cycle
        assert runtime.allocate(900).nbytes == 900


def test_there_are_64_simulated_devices() -> None:
    assert runtime_of(Device("sim", 63)).device == Device("sim", 63)
    with pytest.raises(DeviceError, match="device sim:64 does not exist; simulated devices are sim:0 to sim:63"):
        runtime_of(Device("sim", 64))


def test_arrays_of_another_shape_or_dtype_are_not_copied(runtime: SimRuntime) -> None:
    stream = runtime.lease()
    array = tensor_of(VALUES).array
    with pytest.raises(ShapeError, match=r"a copy from a float64 array of shape \(3, 4\) to a float32 array"):
        runtime.copy(array, np.zeros((3, 4)), stream)
    with pytest.raises(ShapeError, match=r"of shape \(3,\) to a float32 array of shape \(3, 4\): expected the same"):
        runtime.copy(array, np.zeros(3, np.float32), stream)


def test_a_blocking_copy_is_made_on_the_current_stream(runtime: SimRuntime) -> None:
    stream, target = runtime.lease(), runtime.allocate(4)
    with runtime.using(stream):
        runtime.copy_now(target, np.arange(4, dtype=np.uint8))
    assert unwrapped(target).tolist() == [0, 1, 2, 3]
    assert stream.is_idle
    assert runtime.statistics().launches == 1
