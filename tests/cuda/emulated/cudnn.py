"""A stand-in for `cudnn` (nvidia-cudnn-frontend): graphs of convolutions, computed by NumPy on the emulated streams.

It has the part of the interface that dagexec uses, with the signatures of the real one, and refuses what that refuses,
or what it leaves undefined: a handle used by two threads at once, on another device or after its end, a plan that is
not built, a workspace that is too small, tensors that are not aligned.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dagexec.devices.cuda.binding import installed
from tests.cuda.emulated.arrays import _over
from tests.cuda.emulated.errors import EmulationError
from tests.cuda.emulated.installation import emulated
from tests.cuda.emulated.machine import Machine
from tests.cuda.emulated.work import Operation

Array = npt.NDArray[Any]


class data_type(enum.Enum):
    FLOAT = np.dtype(np.float32)
    DOUBLE = np.dtype(np.float64)
    HALF = np.dtype(np.float16)
    BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


heur_mode = enum.Enum("heur_mode", ["A", "B", "FALLBACK"])
build_plan_policy = enum.Enum("build_plan_policy", ["HEURISTICS_CHOICE", "ALL"])
numerical_note = enum.Enum(
    "numerical_note",
    ["TENSOR_CORE", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "NONDETERMINISTIC", "WINOGRAD"],
)


class cudnnGraphNotSupportedError(Exception):
    """No engine takes the graph."""


@dataclass(frozen=True)
class Engine:
    """An engine of the stand-in.

    Attributes:
        notes: what it does to numbers.
        workspace: bytes that it needs.
        repeats: how often it computes its result: a slow one does so more often.
        types: those it takes.
        fuses: it takes what follows a convolution.
    """

    name: str
    notes: tuple[numerical_note, ...] = ()
    workspace: int = 0
    repeats: int = 1
    types: tuple[data_type, ...] = (data_type.FLOAT, data_type.HALF, data_type.BFLOAT16)
    fuses: bool = True


ENGINES = (
    Engine("eng38_tf32", (numerical_note.TENSOR_CORE,), 4096, types=(data_type.FLOAT,)),
    Engine("eng7_atomics", (numerical_note.NONDETERMINISTIC,), 1 << 16),
    Engine("eng1", (), 2048),
    Engine("eng0", ()),
)


class Handle:
    def __init__(self, device: int) -> None:
        self.device_index = device
        self.stream: int | None = 0
        self.alive = True
        self.user: int | None = None
        self._lock = threading.Lock()

    @contextmanager
    def used(self, machine: Machine, what: str) -> Iterator[None]:
        """A call uses the handle. Raises EmulationError when that is undefined."""
        me = threading.get_ident()
        with self._lock:
            if not self.alive:
                raise EmulationError(f"{what} with a handle that was destroyed")
            if machine.device != self.device_index:
                raise EmulationError(f"{what} with a handle of device {self.device_index} on {machine.device}")
            if self.user not in (None, me):
                raise EmulationError(f"{what} with a handle that another thread is using")
            before, self.user = self.user, me
        try:
            yield
        finally:
            with self._lock:
                self.user = before


class Tensor:
    def __init__(self, uid: int, dim: Sequence[int], stride: Sequence[int] | None, kind: data_type | None) -> None:
        self.uid, self.dim, self.kind = uid, list(dim), kind
        self.stride = list(stride) if stride is not None else []
        self.name, self.output = "", False

    def set_output(self, value: bool) -> Tensor:
        self.output = value
        return self

    def set_data_type(self, kind: data_type) -> Tensor:
        self.kind = kind
        return self

    def set_dim(self, dim: Sequence[int]) -> Tensor:
        self.dim = list(dim)
        return self

    def set_stride(self, stride: Sequence[int]) -> Tensor:
        self.stride = list(stride)
        return self

    def set_name(self, name: str) -> Tensor:
        self.name = name
        return self

    def set_uid(self, uid: int) -> Tensor:
        self.uid = uid
        return self

    def get_uid(self) -> int:
        return self.uid


@dataclass
class Node:
    """One operation of a graph."""

    kind: str
    inputs: tuple[Tensor, ...]
    output: Tensor
    windows: Mapping[str, list[int]]


class Graph:
    """`cudnn.pygraph`."""

    def __init__(
        self,
        library: CudnnModule,
        name: str = "test_graph",
        io_data_type: Any = None,
        intermediate_data_type: Any = None,
        compute_data_type: Any = None,
        handle: Handle | None = None,
    ) -> None:
        self._library = library
        self._types = (io_data_type, intermediate_data_type, compute_data_type)
        self._handle = handle
        self._nodes: list[Node] = []
        self._tensors: list[Tensor] = []
        self._state = "new"
        self._plans: list[Engine] = []
        self._refused: set[numerical_note] = set()
        self._limit: int | None = None
        self._built: set[int] = set()
        self._selected: int | None = None
        self._user: int | None = None

    def tensor(
        self, dim: Sequence[int], stride: Sequence[int] | None = None, data_type: Any = None, *, name: str = "",
        uid: int = -1,
    ) -> Tensor:  # fmt: skip
        made = Tensor(uid if uid != -1 else 1000 + len(self._tensors), dim, stride, data_type or self._types[0])
        made.name = name
        self._tensors.append(made)
        return made

    def _node(self, kind: str, *inputs: Tensor, **windows: list[int]) -> Tensor:
        if self._state != "new":
            raise RuntimeError("the graph is frozen")
        output = Tensor(1000 + len(self._tensors), [], None, None)
        self._tensors.append(output)
        self._nodes.append(Node(kind, inputs, output, windows))
        return output

    def conv_fprop(self, image: Tensor, weight: Tensor, *, pre_padding: Any, post_padding: Any, stride: Any,
                   dilation: Any) -> Tensor:  # fmt: skip
        windows = {"before": pre_padding, "behind": post_padding, "stride": stride, "dilation": dilation}
        return self._node("fprop", image, weight, **windows)

    def conv_dgrad(self, loss: Tensor, filter: Tensor, *, pre_padding: Any, post_padding: Any, stride: Any,
                   dilation: Any) -> Tensor:  # fmt: skip
        windows = {"before": pre_padding, "behind": post_padding, "stride": stride, "dilation": dilation}
        return self._node("dgrad", loss, filter, **windows)

    def conv_wgrad(self, image: Tensor, loss: Tensor, *, pre_padding: Any, post_padding: Any, stride: Any,
                   dilation: Any) -> Tensor:  # fmt: skip
        windows = {"before": pre_padding, "behind": post_padding, "stride": stride, "dilation": dilation}
        return self._node("wgrad", image, loss, **windows)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return self._node("add", a, b)

    def bias(self, input: Tensor, bias: Tensor) -> Tensor:
        return self._node("bias", input, bias)

    def relu(self, input: Tensor) -> Tensor:
        return self._node("relu", input)

    def _step_to(self, state: str, *before: str) -> None:
        if self._state not in before:
            raise RuntimeError(f"{state} after {self._state}")
        self._state = state

    def validate(self) -> None:
        self._step_to("valid", "new")
        for node in self._nodes:
            last = node is self._nodes[-1]
            if last != node.output.output:
                raise RuntimeError("only the last tensor is an output")
            if not last and node.output.kind is not data_type.FLOAT:
                raise RuntimeError("a tensor within the graph has no type to be computed in")
        if self._types[1:] != (data_type.FLOAT, data_type.FLOAT):
            raise RuntimeError("what is computed in float32 is to be said so")
        first, result = self._nodes[0], self._nodes[-1].output
        if first.kind == "fprop":
            expected = [
                first.inputs[0].dim[0],
                first.inputs[1].dim[0],
                *_windows(first, first.inputs[0], first.inputs[1]),
            ]
            if result.dim != expected:
                raise RuntimeError(f"Y is {result.dim}, expected {expected}")
        else:
            image, other = (result, first.inputs[1]) if first.kind == "dgrad" else (first.inputs[0], result)
            loss = first.inputs[0] if first.kind == "dgrad" else first.inputs[1]
            if loss.dim[2:] != _windows(first, image, other):
                raise RuntimeError(f"dY is {loss.dim}")
        for tensor in (*first.inputs, result):
            if not tensor.dim or len(tensor.dim) != len(tensor.stride) or tensor.kind is None:
                raise RuntimeError("a tensor is not described")

    def build_operation_graph(self) -> None:
        self._step_to("operation graph", "valid")

    def create_execution_plans(self, modes: list[Any]) -> None:
        self._step_to("plans", "operation graph")
        kinds = [node.kind for node in self._nodes]
        known = kinds[1:] in ([], ["bias"], ["bias", "relu"], ["add", "bias"], ["add", "bias", "relu"])
        self._plans = [
            engine
            for engine in self._library.engines
            if known and self._nodes[0].inputs[0].kind in engine.types and (engine.fuses or len(kinds) == 1)
        ]
        if not self._plans:
            raise cudnnGraphNotSupportedError("No valid engine configs for the graph\n{}")

    def deselect_numeric_notes(self, notes: list[numerical_note]) -> Graph:
        self._refused |= set(notes)
        return self

    def deselect_workspace_greater_than(self, workspace_limit: int) -> Graph:
        self._limit = workspace_limit
        return self

    def _allowed(self, index: int) -> bool:
        engine = self._plans[index]
        return not self._refused & set(engine.notes) and (self._limit is None or engine.workspace <= self._limit)

    def check_support(self) -> None:
        self._step_to("supported", "plans")
        if not any(map(self._allowed, range(len(self._plans)))):
            raise cudnnGraphNotSupportedError("every engine is taken out")

    def get_execution_plan_count(self) -> int:
        return len(self._plans)

    def get_plan_name_at_index(self, index: int) -> str:
        return self._plans[index].name

    def build_plan_at_index(self, index: int) -> Graph:
        if self._state not in ("supported", "built") or not self._allowed(index):
            raise cudnnGraphNotSupportedError(f"plan {index} may not be used")
        self._library.pause("build")
        self._built.add(index)
        self._selected, self._state = index, "built"
        return self

    def build_plans(self, policy: Any = None) -> None:
        self.build_plan_at_index(next(index for index in range(len(self._plans)) if self._allowed(index)))

    def get_workspace_size(self) -> int:
        assert self._selected is not None
        return self._plans[self._selected].workspace

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        return self._plans[index].workspace

    def execute(
        self, tensor_dict: Mapping[int, int], workspace: int | None = None, handle: Handle | None = None
    ) -> None:
        if self._selected is None:
            raise RuntimeError("Call build() first")
        self.execute_plan_at_index(tensor_dict, workspace, self._selected, handle)

    def execute_plan_at_index(
        self, tensor_dict: Mapping[int, int], workspace: int | None = None, index: int = 0, handle: Handle | None = None
    ) -> None:
        if index not in self._built:
            raise RuntimeError(f"plan {index} is not built")
        machine, engine = self._library.machine, self._plans[index]
        if not isinstance(handle, Handle):
            raise TypeError(f"expected a cudnn.Handle, got {type(handle).__name__}")
        me = threading.get_ident()
        if self._user not in (None, me):
            raise EmulationError("a graph is executed by two threads at once")
        self._user = me
        try:
            with handle.used(machine, "execute"):
                machine.called("cudnn.execute", handle.stream, handle, engine.name, workspace, dict(tensor_dict))
                self._library.pause("execute")
                self._submit(tensor_dict, workspace or 0, engine, handle)
        finally:
            self._user = None

    def _submit(self, pack: Mapping[int, int], workspace: int, engine: Engine, handle: Handle) -> None:
        machine = self._library.machine
        touches = []
        if engine.workspace:
            touches.append(machine.device_touch(workspace, engine.workspace, True, machine.device))
        held: dict[int, Array] = {}
        result = self._nodes[-1].output
        given = {tensor.uid for node in self._nodes for tensor in node.inputs if tensor.uid in pack} | {result.uid}
        if given != set(pack):
            raise ValueError(f"the variant pack has {sorted(pack)}, expected {sorted(given)}")
        for tensor in {tensor.uid: tensor for node in self._nodes for tensor in (*node.inputs, node.output)}.values():
            if tensor.uid not in pack:
                continue
            if pack[tensor.uid] % 16:
                raise EmulationError(f"{tensor.name} is not aligned")
            assert tensor.kind is not None
            strides = [stride * tensor.kind.value.itemsize for stride in tensor.stride]
            array = held[tensor.uid] = _over(pack[tensor.uid], tuple(tensor.dim), tensor.kind.value, strides)
            span = int(sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)) + array.itemsize)
            touches.append(machine.device_touch(pack[tensor.uid], span, tensor is result, machine.device))
        label = f"cuDNN {engine.name} {' '.join(node.kind for node in self._nodes)}"

        def compute() -> None:
            self._library.pause("compute")
            values = {}
            for _ in range(engine.repeats):
                values = _computed(self._nodes, held)
            held[result.uid][...] = values[result.uid].astype(held[result.uid].dtype)
            if engine.workspace:
                _over(workspace, (engine.workspace,), np.dtype(np.uint8), None)[...] = 0x77

        assert handle.stream is not None
        machine.submit(handle.stream, Operation(label, compute, machine.device, touches, computes=True))


def _windows(node: Node, image: Tensor, weights: Tensor) -> list[int]:
    """The sizes of the output."""
    rows = zip(image.dim[2:], weights.dim[2:], *(node.windows[name] for name in _WINDOWS), strict=True)
    return [(n + a + b - (d * (k - 1) + 1)) // s + 1 for n, k, a, b, s, d in rows]


_WINDOWS = ("before", "behind", "stride", "dilation")


def _computed(nodes: Sequence[Node], held: Mapping[int, Array]) -> dict[int, Array]:
    """The value of every tensor of a graph, in float64."""
    values = {uid: array.astype(np.float64) for uid, array in held.items()}
    for node in nodes:
        if node.kind in ("fprop", "dgrad", "wgrad"):
            values[node.output.uid] = _convolution(node, values)
            continue
        first = values[node.inputs[0].uid]
        if node.kind == "relu":
            values[node.output.uid] = np.where(first > 0, first, 0)  # 0 for NaN, as it may be
        else:
            values[node.output.uid] = first + values[node.inputs[1].uid]
    return values


def _convolution(node: Node, values: Mapping[int, Array]) -> Array:
    first, second = (values[tensor.uid] for tensor in node.inputs)
    image = np.zeros(node.output.dim) if node.kind == "dgrad" else first
    weights = np.zeros(node.output.dim) if node.kind == "wgrad" else second
    pads = list(zip(node.windows["before"], node.windows["behind"], strict=True))
    padded = np.pad(image, [(0, 0), (0, 0), *pads])
    out = {"dgrad": first, "wgrad": second}.get(node.kind)
    if out is None:
        out = np.zeros(_output_shape(node, padded, weights))
    groups = image.shape[1] // weights.shape[1]
    rank = len(pads)
    grouped = weights.reshape(groups, weights.shape[0] // groups, *weights.shape[1:])
    outs = out.reshape(out.shape[0], groups, out.shape[1] // groups, *out.shape[2:])
    pixels = padded.reshape(padded.shape[0], groups, weights.shape[1], *padded.shape[2:])
    stride, dilation = node.windows["stride"], node.windows["dilation"]
    for tap in product(*map(range, weights.shape[2:])):
        where = tuple(
            slice(tap[a] * dilation[a], tap[a] * dilation[a] + (out.shape[2 + a] - 1) * stride[a] + 1, stride[a])
            for a in range(rank)
        )
        part, taps = pixels[(..., *where)], grouped[(..., *tap)]
        if node.kind == "fprop":
            outs += np.einsum("ngc...,gmc->ngm...", part, taps)
        elif node.kind == "dgrad":
            part += np.einsum("ngm...,gmc->ngc...", outs, taps)
        else:
            flat = (*part.shape[:3], -1)
            taps += np.einsum("ngcp,ngmp->gmc", part.reshape(flat), outs.reshape(*outs.shape[:3], -1))
    if node.kind == "fprop":
        return outs.reshape(out.shape)
    if node.kind == "wgrad":
        return grouped.reshape(weights.shape)
    inner = tuple(slice(before, before + size) for (before, _), size in zip(pads, image.shape[2:], strict=True))
    return pixels.reshape(padded.shape)[(..., *inner)]


def _output_shape(node: Node, padded: Array, weights: Array) -> tuple[int, ...]:
    rows = zip(padded.shape[2:], weights.shape[2:], node.windows["stride"], node.windows["dilation"], strict=True)
    return (padded.shape[0], weights.shape[0], *((n - (d * (k - 1) + 1)) // s + 1 for n, k, s, d in rows))


class CudnnModule:
    """The module `cudnn` of a machine.

    Attributes:
        engines: what it offers, best first.
        version: of cuDNN.
        pause: called with "execute" or "build" while a call is under way, with "compute" on the device.
        handles: all that were created.
    """

    __version__ = "1.32.0"
    data_type, numerical_note, heur_mode, build_plan_policy = data_type, numerical_note, heur_mode, build_plan_policy
    cudnnGraphNotSupportedError = cudnnGraphNotSupportedError
    Handle = Handle

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.engines: Sequence[Engine] = ENGINES
        self.version = 92800
        self.pause: Callable[[str], object] = lambda _what: None
        self.handles: list[Handle] = []

    def backend_version(self) -> int:
        return self.version

    def create_handle(self) -> Handle:
        self.machine.called("cudnn.create_handle")
        if self.machine.is_capturing:
            raise RuntimeError("CUDNN_STATUS_NOT_INITIALIZED")
        self.handles.append(Handle(self.machine.device))
        return self.handles[-1]

    def destroy_handle(self, handle: Handle) -> None:
        with handle.used(self.machine, "destroy_handle"):
            self.machine.called("cudnn.destroy_handle", handle.stream)
        handle.alive = False

    def set_stream(self, handle: Handle, stream: int) -> None:
        with handle.used(self.machine, "set_stream"):
            self.machine.called("cudnn.set_stream", stream, handle)
            if stream and self.machine.stream(stream).device != handle.device_index:
                raise EmulationError("set_stream of a stream of another device")
            handle.stream = stream

    def get_stream(self, handle: Handle) -> int | None:
        return handle.stream

    def pygraph(self, **options: Any) -> Graph:
        return Graph(self, **options)


@contextmanager
def emulated_cudnn(**settings: Any) -> Iterator[tuple[Machine, CudnnModule]]:
    """Within it, there are emulated CUDA devices with cuDNN; `settings` are a Machine's."""
    with emulated(**settings) as machine:
        module = CudnnModule(machine)
        with installed(cudnn=module):
            yield machine, module
