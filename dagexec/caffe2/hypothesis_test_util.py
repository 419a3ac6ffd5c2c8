"""What Caffe2's own operator tests are written with: arrays by Hypothesis, and an operator beside NumPy.

class TestRelu(hu.HypothesisTestCase):
    @given(X=hu.tensor(), **hu.gcs)
    def test_relu(self, X, gc, dc):
        op = core.CreateOperator("Relu", ["X"], ["Y"])
        self.assertReferenceChecks(gc, op, [X], lambda X: [np.maximum(X, 0)])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import hypothesis.extra.numpy
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from dagexec.caffe2 import workspace
from dagexec.caffe2.creation import make_device_option
from dagexec.caffe2.gpus import place
from dagexec.caffe2.net import Net
from dagexec.caffe2.proto import caffe2_pb2
from dagexec.caffe2.references import BlobReference, GradientSlice
from dagexec.caffe2.test_util import TestCase
from dagexec.core.proto import DeviceOption, NetDef, OperatorDef
from dagexec.testing.gradients import analytic_gradients

__all__ = [
    "HypothesisTestCase", "arrays", "cpu_do", "device_options", "dims", "elements_of_type", "floats", "gcs",
    "gcs_cpu_only", "gcs_gpu_only", "gpu_do", "lengths", "lengths_tensor", "runOpOnInput", "segment_ids",
    "segmented_tensor", "sparse_lengths_tensor", "temp_workspace", "tensor", "tensor1d", "tensors", "tensors1d",
]  # fmt: skip

Array = npt.NDArray[Any]
Strategy = st.SearchStrategy[Any]
Devices = Mapping[str, DeviceOption] | None

# Values


def floats(min_value: float | None = None, max_value: float | None = None, **kwargs: Any) -> Strategy:
    """Numbers that are float32, by default from -1 to 1."""
    low, high = (None if value is None else float(np.float32(value)) for value in (min_value, max_value))
    return st.floats(low, high, width=32, allow_nan=False, allow_infinity=False, **kwargs)


def dims(min_value: int = 1, max_value: int = 5) -> Strategy:
    """The size of an axis."""
    return st.integers(min_value, max_value)


def elements_of_type(dtype: Any = np.float32, filter_: Callable[[Any], bool] | None = None) -> Strategy:
    """Elements: floats from -1 to 1, integers from 0 to 1000, truth values."""
    kind = np.dtype(dtype).kind
    elements = st.booleans() if kind == "b" else floats(-1, 1) if kind == "f" else st.integers(0, 1000)
    return elements if filter_ is None else elements.filter(filter_)


def arrays(dims: Any, dtype: Any = np.float32, elements: Strategy | None = None, unique: bool = False) -> Strategy:
    """Arrays of a shape."""
    made = elements_of_type(dtype) if elements is None else elements
    return hypothesis.extra.numpy.arrays(dtype, tuple(dims), elements=made, unique=unique)


def tensor(
    min_dim: int = 1, max_dim: int = 4, dtype: Any = np.float32, elements: Strategy | None = None, **kwargs: Any
) -> Strategy:
    """Arrays with so many axes; `kwargs` are those of `dims`."""
    shapes = st.lists(dims(**kwargs), min_size=min_dim, max_size=max_dim)
    return shapes.flatmap(lambda shape: arrays(shape, dtype, elements))


def tensor1d(
    min_len: int = 1, max_len: int = 64, dtype: Any = np.float32, elements: Strategy | None = None
) -> Strategy:
    """Arrays with one axis."""
    return tensor(1, 1, dtype, elements, min_value=min_len, max_value=max_len)


def tensors(
    n: int, min_dim: int = 1, max_dim: int = 4, dtype: Any = np.float32, elements: Strategy | None = None, **kwargs: Any
) -> Strategy:
    """Lists of `n` arrays of one shape."""
    shapes = st.lists(dims(**kwargs), min_size=min_dim, max_size=max_dim)
    return shapes.flatmap(lambda shape: st.lists(arrays(shape, dtype, elements), min_size=n, max_size=n))


def tensors1d(
    n: int, min_len: int = 1, max_len: int = 64, dtype: Any = np.float32, elements: Strategy | None = None
) -> Strategy:
    """Lists of `n` arrays with one axis, of one length."""
    return tensors(n, 1, 1, dtype, elements, min_value=min_len, max_value=max_len)


def segment_ids(size: int, is_sorted: bool) -> Strategy:
    """The segment of each of `size` rows."""
    if size == 0:
        return st.just(np.empty(0, np.int32))
    if is_sorted:
        steps = arrays([size], np.int32, st.booleans().map(int))
        return steps.map(lambda steps: (np.cumsum(steps, dtype=np.int32) - steps[0]).astype(np.int32))
    return arrays([size], np.int32, st.integers(0, 2 * size))


def lengths(size: int, min_segments: int | None = None, max_segments: int | None = None, **kwargs: Any) -> Strategy:
    """The lengths of segments that have `size` rows together."""
    least = (1 if size else 0) if min_segments is None else min_segments
    most = max(least, size if max_segments is None else max_segments)

    def cut(places: list[int]) -> Array:
        return np.diff([0, *sorted(places), size]).astype(np.int32)

    cuts = st.lists(st.integers(0, size), min_size=max(0, least - 1), max_size=max(0, most - 1))
    return st.just(np.empty(0, np.int32)) if most == 0 else cuts.map(cut)


def segmented_tensor(
    min_dim: int = 1,
    max_dim: int = 4,
    dtype: Any = np.float32,
    is_sorted: bool = True,
    elements: Strategy | None = None,
    segment_generator: Callable[..., Strategy] = segment_ids,
    allow_empty: bool = False,
    **kwargs: Any,
) -> Strategy:
    """Pairs of an array and the segments of its rows."""
    rows = dims(0 if allow_empty else 1)
    shapes = st.tuples(rows, st.lists(dims(**kwargs), min_size=min_dim - 1, max_size=max_dim - 1))
    return shapes.flatmap(
        lambda shape: st.tuples(
            arrays([shape[0], *shape[1]], dtype, elements), segment_generator(shape[0], is_sorted=is_sorted)
        )
    )


def lengths_tensor(min_segments: int | None = None, max_segments: int | None = None, **kwargs: Any) -> Strategy:
    """Pairs of an array and the lengths of its segments."""

    def generator(size: int, is_sorted: bool) -> Strategy:
        return lengths(size, min_segments, max_segments)

    return segmented_tensor(segment_generator=generator, **kwargs)


def sparse_lengths_tensor(dtype: Any = np.float32, itype: Any = np.int64, **kwargs: Any) -> Strategy:
    """Triples of an array, numbers of its rows, and the lengths of segments of these."""

    def picked(array: Array) -> Strategy:
        index = st.integers(0, len(array) - 1)
        return dims(1, 8).flatmap(lambda size: st.tuples(st.just(array), arrays([size], itype, index), lengths(size)))

    return tensor(dtype=dtype, **kwargs).flatmap(picked)


# Devices

cpu_do = make_device_option(caffe2_pb2.CPU)
gpu_do = make_device_option(caffe2_pb2.CUDA)
device_options = [cpu_do, *([gpu_do] if workspace.NumCudaDevices() else [])]


def _choice(options: Sequence[DeviceOption]) -> dict[str, Strategy]:
    return {"gc": st.sampled_from(options), "dc": st.just(list(options))}


gcs = _choice(device_options)
gcs_cpu_only = _choice([cpu_do])
gcs_gpu_only = _choice([gpu_do])

# Running


@contextmanager
def temp_workspace(name: str = "temp_ws") -> Iterator[None]:
    """Have a workspace of this name, empty before and behind, be the current one."""
    with workspace.WorkspaceGuard(name):
        workspace.ResetWorkspace()
        try:
            yield
        finally:
            workspace.ResetWorkspace()


def runOpOnInput(
    device_option: DeviceOption, op: OperatorDef, inputs: Sequence[Any], input_device_options: Devices = None
) -> list[Any]:
    """The outputs of an operator on a device. Raises ValueError for too few inputs."""
    with temp_workspace():
        _run(device_option, op, inputs, input_device_options)
        return [workspace.FetchBlob(blob) for blob in op.output]


def _on(device_option: DeviceOption, op: OperatorDef) -> OperatorDef:
    placed = OperatorDef()
    placed.CopyFrom(op)
    placed.device_option.CopyFrom(device_option)
    return placed


def _run(
    device_option: DeviceOption, op: OperatorDef, inputs: Sequence[Any], input_device_options: Devices = None
) -> Net:
    """The net of the operator, which has run in the current workspace."""
    if len(op.input) > len(inputs):
        raise ValueError(f"{op.type}: must supply an input for each of {list(op.input)}, found {len(inputs)}")
    for name, value in zip(op.input, inputs, strict=False):
        workspace.FeedBlob(name, value, (input_device_options or {}).get(name, device_option))
    net = Net("opnet")
    net.extend_ops([_on(device_option, op)])
    workspace.RunNetOnce(net)
    return net


class HypothesisTestCase(TestCase):
    """A test of operators. All checks raise AssertionError, with what differs."""

    def assertReferenceChecks(
        self,
        device_option: DeviceOption,
        op: OperatorDef,
        inputs: Sequence[Any],
        reference: Callable[..., Any],
        input_device_options: Devices = None,
        threshold: float = 1e-4,
        output_to_grad: str | None = None,
        grad_reference: Callable[..., Any] | None = None,
        atol: float | None = None,
        outputs_to_check: Sequence[int] | None = None,
        ensure_outputs_are_inferred: bool = False,
    ) -> list[Any]:
        """Compare the outputs with those of `reference(*inputs)`, a list or tuple, and return them.

        With `output_to_grad` and `grad_reference`, also the gradients of the inputs, for that output as the gradient of
        itself: with `grad_reference(gradient, reference's outputs, inputs)`, None for an input without one and a pair
        of rows' numbers and rows for a sparse one. With `ensure_outputs_are_inferred`, shapes and types that are told
        before a run must be those of the run.
        """
        with temp_workspace():
            net = _run(device_option, op, inputs, input_device_options)
            expected = reference(*inputs)
            if not isinstance(expected, list | tuple):
                raise RuntimeError(f"{op.type}: a reference returns a list or tuple of arrays, found {expected!r:.60}")
            chosen = list(range(len(op.output)) if outputs_to_check is None else outputs_to_check)
            _require(len(expected) == len(chosen), f"{op.type}: {len(expected)} outputs of the reference")
            outputs = [workspace.FetchBlob(op.output[index]) for index in chosen]
            for index, output, value in zip(chosen, outputs, expected, strict=True):
                _compare(output, value, threshold, atol, f"output {op.output[index]!r} of {op.type}")
            if ensure_outputs_are_inferred:
                self._assertInferredTensors(net, op.output)
            if grad_reference is not None:
                if output_to_grad is None:
                    raise ValueError("grad_reference needs output_to_grad")
                gradient = workspace.FetchBlob(output_to_grad)
                wanted = grad_reference(gradient, expected, inputs)
                self._assertGradients(net, op, output_to_grad, wanted, threshold)
        return outputs

    def _assertGradients(self, net: Net, op: OperatorDef, output: str, expected: Any, threshold: float) -> None:
        fed = BlobReference(f"{output}_grad")
        workspace.FeedBlob(fed, workspace.FetchBlob(output))
        gradients = net.AddGradientOperators({BlobReference(output): fed})
        workspace.RunOperatorsOnce(net.Proto().op[1:])
        _require(len(expected) == len(op.input), f"{op.type}: {len(expected)} gradients of the reference")
        for name, value in zip(op.input, expected, strict=True):
            gradient = gradients.get(name)
            _require((gradient is None) == (value is None), f"{op.type}: gradient of {name!r}: {gradient}, not {value}")
            if gradient is None:
                continue
            message = f"gradient of {name!r} of {op.type}"
            if isinstance(gradient, GradientSlice):
                for blob, part in zip(gradient, value, strict=True):
                    _compare(workspace.FetchBlob(blob), part, threshold, None, message)
            else:
                _compare(workspace.FetchBlob(gradient), value, threshold, None, message)

    def _assertInferredTensors(self, net: Net, outputs: Sequence[str]) -> None:
        feeds = [blob for blob in workspace.Blobs() if blob not in outputs]
        sizes = {blob: workspace.FetchBlob(blob).shape for blob in feeds}
        _, kinds = workspace.InferShapesAndTypes([])
        shapes, types = workspace.InferShapesAndTypes([net], sizes, blob_types=kinds)
        for blob in outputs:
            found = workspace.FetchBlob(blob).shape, kinds[blob]
            told = tuple(shapes.get(blob, ())), types.get(blob)
            _require(told == found, f"blob {blob!r}: shape and type {told} are told, {found} come")

    def assertDeviceChecks(
        self,
        device_options: Sequence[DeviceOption],
        op: OperatorDef,
        inputs: Sequence[Any],
        outputs_to_check: Sequence[int],
        input_device_options: Devices = None,
        threshold: float = 0.01,
    ) -> None:
        """Compare some outputs on all devices with those on the first."""
        results = [runOpOnInput(device, op, inputs, input_device_options) for device in device_options]
        for result, device in zip(results[1:], device_options[1:], strict=True):
            for index in outputs_to_check:
                message = f"output {op.output[index]!r} of {op.type} on device {device.device_type}"
                _compare(result[index], results[0][index], threshold, None, message)

    def assertGradientChecks(
        self,
        device_option: DeviceOption,
        op: OperatorDef,
        inputs: Sequence[Array],
        outputs_to_check: int,
        outputs_with_grads: Sequence[int],
        grad_ops: Any = None,
        threshold: float = 0.005,
        stepsize: float = 0.05,
        input_device_options: Devices = None,
        ensure_outputs_are_inferred: bool = False,
    ) -> None:
        """Compare the gradient of an input with differences of half the sum of squares of `outputs_with_grads`.

        `outputs_to_check` is the number of the input. A difference is that of two runs `stepsize` to both sides, and
        both may differ by `threshold` of the larger, of 1 at least. Raises ValueError where `grad_ops` names gradient
        operators: those of the operator are checked.
        """
        if grad_ops is not None:
            raise ValueError("assertGradientChecks checks the operator's own gradient operators, and no others")
        position, arrays = outputs_to_check, [np.asarray(array) for array in inputs]
        with temp_workspace():
            net = _run(device_option, op, arrays, input_device_options)
            results = [workspace.FetchBlob(blob) for blob in op.output]
            if ensure_outputs_are_inferred:
                self._assertInferredTensors(net, op.output)
        definition = NetDef(op=[_on(device_option, op)])
        place(definition)
        own = {index: results[index] for index in outputs_with_grads}
        found = analytic_gradients(definition.op[0], arrays, own, [position])[position]

        def loss(varied: Array) -> float:
            given = [varied if index == position else array for index, array in enumerate(arrays)]
            values = runOpOnInput(device_option, op, given, input_device_options)
            return sum(float((values[index].astype(np.float64) ** 2).sum()) / 2 for index in outputs_with_grads)

        estimated = np.zeros(found.shape)
        for place_ in np.ndindex(found.shape):
            sides = []
            for sign in (1, -1):
                varied = arrays[position].copy()
                varied[place_] += sign * stepsize
                sides.append(loss(varied))
            estimated[place_] = (sides[0] - sides[1]) / (2 * stepsize)
        limit = threshold * np.maximum(np.maximum(np.abs(found), np.abs(estimated)), 1)
        off = np.argwhere(np.abs(found - estimated) > limit)
        _require(
            not off.size, f"gradient of {op.input[position]!r} of {op.type} at {off.tolist()}: {found}, not {estimated}"
        )

    def assertValidationChecks(
        self,
        device_option: DeviceOption,
        op: OperatorDef,
        inputs: Sequence[Any],
        validator: Callable[..., Any],
        input_device_options: Devices = None,
        as_kwargs: bool = True,
        init_net: Any = None,
    ) -> None:
        """Call the validator with inputs and outputs by the names of their blobs, or else as two lists."""
        with temp_workspace():
            if init_net is not None:
                workspace.RunNetOnce(init_net)
            _run(device_option, op, inputs, input_device_options)
            outputs = [workspace.FetchBlob(blob) for blob in op.output]
        if as_kwargs:
            validator(**dict(zip([*op.input, *op.output], [*inputs[: len(op.input)], *outputs], strict=True)))
        else:
            validator(inputs=inputs, outputs=outputs)

    def assertRunOpRaises(
        self,
        device_option: DeviceOption,
        op: OperatorDef,
        inputs: Sequence[Any],
        input_device_options: Devices = None,
        exception: Any = (Exception,),
        regexp: str | None = None,
    ) -> None:
        """Check that running the operator raises, with a message that fits `regexp`."""
        with self.assertRaisesRegex(exception, regexp or ""), temp_workspace():  # noqa: PT027 - no pytest here
            _run(device_option, op, inputs, input_device_options)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _compare(output: Any, expected: Any, threshold: float, atol: float | None, message: str) -> None:
    if np.asarray(output).dtype.kind in "SO":
        np.testing.assert_array_equal(output, expected, err_msg=message)
    else:
        absolute = threshold if atol is None else atol
        np.testing.assert_allclose(output, expected, rtol=threshold, atol=absolute, err_msg=message)
