"""Operator: one node of a net, bound to its blobs. Subclasses in `dagexec.ops` say what is computed.

A subclass implements `prepare`: with inputs and outputs sized, it resolves views, scratch memory and constants, and
returns a step - a callable without arguments that computes the outputs once, as often as it is called. Prepared
steps call NumPy with `out=`, so a run allocates nothing. What a net may use besides the step comes back with it, as a
`Prepared`; the operator keeps nothing of it, so that many preparations of one operator may be alive at once.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import Arguments
from dagexec.core.blob import Blob
from dagexec.core.body import Body
from dagexec.core.conversion import Conversion, ConvertedStep
from dagexec.core.descriptor import TensorDescriptor
from dagexec.core.device import CPU
from dagexec.core.dtypes import STRING
from dagexec.core.exclusive import LibraryState, library_state
from dagexec.core.form import Form
from dagexec.core.node import Node, node_of, operator_label
from dagexec.core.proto import OperatorDef
from dagexec.core.runtime import runtime_of
from dagexec.core.schema import NO_TENSOR, OperatorCall, OpSchema, TensorType
from dagexec.core.shared_buffer import SharedBuffer
from dagexec.core.tensor import Tensor
from dagexec.core.workspace import Workspace
from dagexec.errors import DagexecError, DeviceError, MissingBlobError, ShapeError
from dagexec.platform.cached import cached_property
from dagexec.platform.host_memory import check_fits, fits
from dagexec.platform.records import dataclass

logger = logging.getLogger("dagexec")

Step = Callable[[], object]
Array = npt.NDArray[Any]
Rebind = Callable[[Array], None]
MemorySource = Callable[[int], Array]
T = TypeVar("T")


def nothing_to_do() -> None:
    """The step of an operator whose outputs are already right, such as a view."""


def in_sequence(steps: Sequence[Step]) -> Step:
    """One step that calls `steps` in order, those with nothing to do left out."""
    active = [step for step in steps if step is not nothing_to_do]
    if len(active) < 2:
        return active[0] if active else nothing_to_do

    def run_all() -> None:
        for step in active:
            step()

    run_all.parts = tuple(active)  # type: ignore[attr-defined]
    return run_all


def parts_of(step: Step) -> tuple[Step, ...]:
    """The steps that `in_sequence` made `step` of, in order, down to those that it did not make."""
    parts: tuple[Step, ...] = getattr(step, "parts", ())
    return tuple(inner for part in parts for inner in parts_of(part)) if parts else (step,)


class Repeat(Protocol):
    """Prepares operators together that differ from one that was prepared in nothing but where their tensors are."""

    def __call__(self, operators: Sequence[Operator], addresses: npt.NDArray[np.int64]) -> Sequence[Step | None]:
        """The step of each of `operators`; None for one that has to be prepared alone.

        `addresses`, [operators, tensors], are those of inputs and outputs. A caller's arrays cannot take their place.
        """


_NO_REBINDS: Mapping[int, Rebind] = MappingProxyType({})


def _no_rebinds() -> Mapping[int, Rebind]:
    return _NO_REBINDS


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A step, and what else a net may use of an operator that is prepared for the tensors its blobs hold.

    Attributes:
        step: computes the outputs from the inputs, once whenever it is called.
        input_rebinds, output_rebinds: by index, what has the step read that input from, or write that output to,
            another packed array of the same shape and dtype from then on; for steps that offer it.
        inputs_in_place: inputs that lie in output 0 already where the step would put them, so that it touches neither
            them nor that part of the output.
        outputs_in_place: outputs that lie in input 0 already, likewise.
        working_memory: the arrays that the step was given as working memory.
        scratch: those that it was given as scratch, which it alone has.
        nbytes: of the memory that it keeps for itself, as far as it is known: scratch, generated code, tables.
        shared_buffer: the buffer whose memory it takes while it runs; None when it has its own.
        is_settled: the outputs have their values already, for every run, and nothing writes them any more.
        keeps: whatever has to live as long as this.
        parts: steps that do what `step` does when they are called one after another; empty where it has none.
        name_part: how errors name one of them.
        blobs: those of nets inside that have to hold what they hold now when the step is called.
    """

    step: Step
    input_rebinds: Mapping[int, Rebind] = field(default_factory=_no_rebinds)
    output_rebinds: Mapping[int, Rebind] = field(default_factory=_no_rebinds)
    inputs_in_place: tuple[int, ...] = ()
    outputs_in_place: tuple[int, ...] = ()
    working_memory: tuple[Array, ...] = ()
    scratch: tuple[Array, ...] = ()
    nbytes: int = 0
    shared_buffer: SharedBuffer | None = None
    is_settled: bool = False
    keeps: object = None
    parts: tuple[Step, ...] = ()
    name_part: Callable[[Step], str] | None = None
    blobs: tuple[Blob, ...] = ()

    def __call__(self) -> None:
        """Run the step."""
        self.step()


class _Preparing:
    """What an operator works with while it is prepared.

    Attributes:
        memory: gives working memory; None when each step has its own.
        call: the operator with the inputs that it is prepared for; None until somebody asks.
        old_shape: that of input 0 before the outputs were sized, () when there is none.
        given: what it has given.
        scratch: what `Operator.scratch` has given.
        kept_bytes: what `Operator.keeps` was told.
        is_inferred: the outputs' types were known before.
        packed_inputs, packed_outputs: arrays in place of strided tensors, by the id of the tensor.
    """

    __slots__ = (
        "call", "given", "is_inferred", "kept_bytes", "memory", "old_shape", "packed_inputs", "packed_outputs",
        "scratch",
    )  # fmt: skip

    def __init__(
        self,
        memory: MemorySource | None,
        old_shape: tuple[int, ...],
        call: OperatorCall | None = None,
        *,
        is_inferred: bool = True,
    ) -> None:
        self.is_inferred = is_inferred
        self.memory = memory
        self.call = call
        self.old_shape = old_shape
        self.given: list[Array] = []
        self.scratch: list[Array] = []
        self.kept_bytes = 0
        self.packed_inputs: dict[int, Array] = {}
        self.packed_outputs: dict[int, Array] = {}


def packed_copy(tensor: Tensor) -> Array:
    """A read-only packed copy of the tensor's values."""
    array = tensor.fetch()
    array.flags.writeable = False
    return array


def _strided(blobs: Sequence[Blob]) -> list[tuple[Blob, Tensor]]:
    """The blobs that hold a strided tensor, with it; each tensor once."""
    found = [(blob, tensor) for blob in blobs if isinstance(tensor := blob.value, Tensor) and not tensor.is_packed]
    return list({id(tensor): (blob, tensor) for blob, tensor in found}.values()) if found else found


class Operator(ABC):
    """An operator of a net, with its input and output blobs looked up.

    Attributes:
        definition: the Node it was made from.
        runtime: of the device it runs on.
        input_blobs, output_blobs: its blobs, in the def's order.
        shared_buffer: the buffer its working memory may be taken from, None when it has its own.
        library_state: on a device with a library of operators, the state it uses there; None when it uses none.
        reads_strided, writes_strided: inputs, or outputs, may have any strides when `prepare` is called; by default
            they are packed there, as copies where the tensors are not.
        crosses_devices: it may read from one device and write to another.
        waits_for_device: its step on a device waits there for results, so that it cannot be captured.
        bodies: the nets it runs, by the argument that holds each; none for most.
        run_check: for an operator whose device finds what is wrong with values and cannot raise; None for others. It is
            called on the host when all work of a run is done, gives the error that the run should end with, None for
            a good one, and forgets it.
    """

    schema: ClassVar[OpSchema]
    reads_strided: ClassVar[bool] = False
    writes_strided: ClassVar[bool] = False
    crosses_devices: ClassVar[bool] = False
    waits_for_device: ClassVar[bool] = False
    bodies: Mapping[str, Body] = MappingProxyType({})
    run_check: Callable[[], Exception | None] | None = None
    __slots__ = (
        "__weakref__", "_arguments", "_index", "_label", "_net", "_preparing", "definition", "input_blobs",
        "library_state", "output_blobs", "runtime", "shared_buffer",
    )  # fmt: skip

    def __init__(self, definition: OperatorDef | Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        """Raises MissingBlobError when an input blob does not exist; output blobs are created."""
        self.definition = definition = node_of(definition)
        self._index, self._net = index, net
        self._label: str | None = None
        self._arguments: Arguments | None = None
        self._preparing: _Preparing | None = None
        self.shared_buffer: SharedBuffer | None = None
        self.library_state: LibraryState | None = None
        self.runtime = runtime_of(definition.device)
        inputs = []
        for name in definition.input:
            blob = workspace.get_blob_or_none(name)
            if blob is None:
                raise MissingBlobError(
                    f"{self.label}: input blob {name!r} does not exist: feed it, or run the init net"
                )
            inputs.append(blob)
        self.input_blobs = tuple(inputs)
        self.output_blobs = tuple([workspace.create_blob(name) for name in definition.output])
        engine = definition.engine
        if "CUDNN" in engine and "CUDNN" in engine.split(",") and self.runtime.device.kind not in (CPU.kind, "cuda"):
            self.library_state = library_state(self.runtime.device, self.arguments.int("cudnn_state", 0))

    @property
    def label(self) -> str:
        """How messages name it."""
        found = self._label
        if found is None:
            found = self._label = operator_label(self.definition, self._index, self._net)
        return found

    @property
    def arguments(self) -> Arguments:
        """Typed access to the arguments of its definition."""
        found = self._arguments
        if found is None:
            found = self._arguments = self.definition.arguments(self.label)
        return found

    @property
    def common_form(self) -> Form:
        """What it has in common with operators that differ from it in no more than the names of their blobs."""
        return self.definition.form.of_class(type(self))

    @property
    def values_read(self) -> tuple[int, ...]:
        """The inputs whose values decide its output shapes."""
        return self.schema.values_read(self.definition)

    @cached_property
    def random(self) -> np.random.Generator:
        """The operator's own random generator, from the seed of its device option or from fresh entropy."""
        return np.random.default_rng(self.definition.seed)

    @property
    def circumstances(self) -> Hashable | None:
        """What decides how it is prepared beside where its tensors are, and of which types; None where more does."""
        return None

    def repeat(self, prepared: Prepared) -> Repeat | None:
        """What prepares others of its form with packed tensors of the same types, as it was just `prepared`.

        None where they differ in more than where their tensors are, or where that is not known.
        """
        return None

    @property
    def is_batch_invariant(self) -> bool:
        """True unless the bytes of a row may depend on the other rows of its batch: argument `batch_invariant`=0."""
        return self.arguments.bool("batch_invariant", True)

    @property
    def inputs_checked(self) -> Sequence[int]:
        """The inputs that `run_check` reads: they must have their values when the run is over."""
        return ()

    def input(self, index: int) -> Tensor:
        """Input tensor `index`. Raises MissingBlobError, naming operator and blob, when it holds nothing."""
        blob = self.input_blobs[index]
        value = blob.value
        if isinstance(value, Tensor):
            return value
        if value is None:
            raise MissingBlobError(f"{self.label}: input blob {blob.name!r} is empty")
        return blob.get(Tensor)

    def handle(self, index: int, kind: type[T]) -> T:
        """The object, a `kind`, that input `index` holds.

        Raises MissingBlobError when there is none and BlobTypeError for another type; both name operator and blob.
        """
        try:
            return self.input_blobs[index].get(kind)
        except DagexecError as error:
            raise type(error)(f"{self.label}: input {error}") from None

    def output(self, index: int) -> Tensor:
        """Output tensor `index`, made on this operator's device if the blob is empty."""
        return self.output_blobs[index].tensor(self.runtime.device)

    def x(self, index: int) -> npt.NDArray[Any]:
        """The array of input `index`; while `prepare` is called, a packed copy of it unless `reads_strided`."""
        tensor = self.input(index)
        if tensor.is_empty:
            raise MissingBlobError(f"{self.label}: input blob {self.input_blobs[index].name!r} is empty")
        array, preparing = tensor.array, self._preparing
        if preparing is not None and preparing.packed_inputs:
            array = preparing.packed_inputs.get(id(tensor), array)
        return self.runtime.host_view(array)

    def host_value(self, index: int) -> npt.NDArray[Any]:
        """The values of input `index`, which shapes depend on, as an array of the host."""
        return self.x(index)

    def y(self, index: int) -> npt.NDArray[Any]:
        """The array of output `index`; while `prepare` is called, a packed one unless `writes_strided`."""
        tensor = self.output(index)
        array, preparing = tensor.array, self._preparing
        if preparing is not None and preparing.packed_outputs:
            array = preparing.packed_outputs.get(id(tensor), array)
        return self.runtime.host_view(array)

    @property
    def old_shape(self) -> tuple[int, ...]:
        """The shape of input 0, () if there is none; in `prepare` that before outputs were sized, maybe in place."""
        if self._preparing is not None:
            return self._preparing.old_shape
        tensor = self.input_blobs[0].value if self.input_blobs else None
        return tensor.shape if isinstance(tensor, Tensor) else ()

    @property
    def is_inferred(self) -> bool:
        """True while `prepare` is called for outputs whose types were known before the run, and are sized."""
        return self._preparing is not None and self._preparing.is_inferred

    @property
    def given_memory(self) -> Sequence[Array]:
        """The working memory that it was given so far, while `prepare` is called."""
        return () if self._preparing is None else self._preparing.given

    def scratch(self, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Memory of this prepared step alone, kept between runs; its content is undefined.

        Raises ResourceError, naming the operator, when the machine cannot hold it.
        """
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        check_fits(nbytes, f"{self.label}: working memory of shape {tuple(shape)}")
        self.keeps(nbytes)
        buffer = self.runtime.host_view(self.runtime.allocate(nbytes))
        if self._preparing is not None:
            self._preparing.scratch.append(buffer)
        return buffer.view(dtype).reshape(tuple(shape))

    def keeps(self, nbytes: int) -> None:
        """Say in `prepare` that the step keeps `nbytes` bytes to itself, beside `scratch`, which is counted."""
        if self._preparing is not None:
            self._preparing.kept_bytes += nbytes

    def working_memory(self, nbytes: int) -> Array:
        """`nbytes` bytes, on a cache line, for this prepared step; their content is undefined whenever it begins.

        Raises ResourceError, naming the operator, when the machine cannot hold it.
        """
        preparing = self._preparing
        if preparing is None or preparing.memory is None:
            array = self.scratch((nbytes,), np.uint8)  # which is both
        else:
            if not fits(nbytes):
                check_fits(nbytes, f"{self.label}: working memory of {nbytes} bytes")
            array = preparing.memory(nbytes)
        if preparing is not None:
            preparing.given.append(array)
        return array

    def call(self, types: Sequence[TensorType] | None = None) -> OperatorCall:
        """What inference sees of this operator with the tensors its input blobs hold now, or will hold by `types`.

        While `prepare` is called it is always the same.
        """
        preparing = self._preparing if types is None else None
        if preparing is not None:
            if preparing.call is None:
                preparing.call = self._new_call(None)
            return preparing.call
        return self._new_call(types)

    def _new_call(self, types: Sequence[TensorType] | None) -> OperatorCall:
        if types is None:
            self.check_input_devices()
            types = [self.input_type(index) for index in range(len(self.input_blobs))]
        read = self.values_read
        values = tuple([self.host_value(i) if i in read else None for i in range(len(types))])
        return OperatorCall(self.definition, self.arguments, tuple(types), values, self.label)

    def input_type(self, index: int) -> TensorType:
        """The type of the tensor that input `index` holds now, NO_TENSOR for a handle.

        Raises MissingBlobError when it holds nothing.
        """
        if index in self.schema.handles:
            self.handle(index, object)
            return NO_TENSOR
        tensor = self.input(index)
        if tensor.is_empty:
            raise MissingBlobError(f"{self.label}: input blob {self.input_blobs[index].name!r} is empty")
        return TensorType(tensor.shape, tensor.meta)

    def check_input_devices(self) -> None:
        """Raise DeviceError, or MissingBlobError, unless every input is a tensor where this operator works."""
        for index, blob in enumerate(self.input_blobs):
            if index not in self.schema.handles:
                self._check_device("input", blob, self.input(index))

    def _check_device(self, kind: str, blob: Blob, tensor: Tensor) -> None:
        """Raise DeviceError unless the tensor is where this operator works, or the operator crosses devices."""
        if tensor.runtime is self.runtime or self.crosses_devices or tensor.device == self.runtime.device:
            return
        raise DeviceError(
            f"{self.label}: {kind} blob {blob.name!r} is on {tensor.device}; expected it on {self.runtime.device}, "
            f"where the operator runs: put a Copy (or, towards the host, an EnsureCPUOutput) between"
        )

    def infer(self, call: OperatorCall | None = None) -> tuple[TensorType, ...] | None:
        """Types of the outputs for the inputs as they are now, which `call` has; None when the schema cannot tell."""
        if self.schema.infer is None or not self.schema.can_infer(self.definition):
            return None
        return tuple(self.schema.infer(call or self.call()))

    def bind(
        self,
        types: Sequence[TensorType] | None,
        *,
        as_view: bool = False,
        placed: Collection[int] = (),
        memory: MemorySource | None = None,
        call: OperatorCall | None = None,
    ) -> Prepared:
        """Size the outputs to `types` and prepare. With `as_view`, output 0 shares input 0's packed storage.

        `call` is what inference saw, where it is known; in place it is not what `prepare` finds.

        The outputs in `placed` have their types and their memory already. `memory` gives working memory that operators
        share which never run at the same time; without it the step has its own.
        The step converts strided tensors for an operator that works on packed ones. Call `check_output_layouts` first.
        """
        preparing = self._preparing = _Preparing(
            memory, self.old_shape, None if self._is_in_place else call, is_inferred=types is not None
        )
        try:
            resized = [] if types is None else self.size_outputs(types, as_view, placed)
            before = [] if self.reads_strided else self._pack_inputs(preparing)
            after = [] if self.writes_strided else self._pack_outputs(preparing)
            made = self.prepare()
        finally:
            self._preparing = None
        prepared = made if isinstance(made, Prepared) else Prepared(made, shared_buffer=self.shared_buffer)
        if prepared.step is nothing_to_do and not after:
            before = []
        if resized or before or after:
            step = ConvertedStep((*resized, *before), prepared.step, tuple(after))
            prepared = replace(prepared, step=step, parts=())
        elif not preparing.given and not preparing.kept_bytes:
            return prepared
        return replace(
            prepared, working_memory=tuple(preparing.given), scratch=tuple(preparing.scratch),
            nbytes=prepared.nbytes + preparing.kept_bytes,
        )  # fmt: skip

    @property
    def _is_in_place(self) -> bool:
        return not set(map(id, self.input_blobs)).isdisjoint(map(id, self.output_blobs))

    def size_outputs(
        self, types: Sequence[TensorType], as_view: bool = False, placed: Collection[int] = ()
    ) -> list[Conversion]:
        """Size the outputs but those in `placed`, and have them convert what that moves in a run."""
        moved: list[Conversion] = []
        first = 0
        if as_view and self.input(0).is_packed:
            self.output(0).share(self.input(0), types[0].shape)
            first = 1
        for index in range(first, len(types)):
            self._check_device("output", self.output_blobs[index], self.output(index))
            if index not in placed:
                moved += self._resize_output(index, types[index])
        return moved

    def _resize_output(self, index: int, kind: TensorType) -> list[Conversion]:
        """Size an output. A strided tensor that is also an input and gets packed is converted in the run.

        The operator finds its values in the new memory, and those before it in the net write to the old one.
        """
        tensor = self.output(index)
        in_place = not tensor.is_packed and any(blob.value is tensor for blob in self.input_blobs)
        before = tensor.current_array() if in_place else None
        array = tensor.resize(kind.shape, kind.meta)
        if before is None or array is before or array.dtype != before.dtype or array.size != before.size:
            return []
        return [self._conversion("input", self.output_blobs[index], before, array.reshape(before.shape))]

    def check_output_layouts(self) -> None:
        """Raise ShapeError, naming the blob, when an output has an overlapping layout."""
        for blob, tensor in _strided(self.output_blobs):
            descriptor = tensor.descriptor
            if descriptor.is_overlapping:
                raise ShapeError(
                    f"{self.label}: output blob {blob.name!r} has an overlapping layout, shape {descriptor.shape} and "
                    f"strides {descriptor.strides}: two results would go to one element; feed it packed, or remove it"
                )

    def _pack_inputs(self, preparing: _Preparing) -> list[Conversion]:
        """Have `x` give packed arrays for strided inputs; gives what fills them in every run."""
        before: list[Conversion] = []
        for blob, tensor in _strided(self.input_blobs):
            if tensor.constant is not None:
                preparing.packed_inputs[id(tensor)] = tensor.constant.derived("packed", partial(packed_copy, tensor))
                continue
            array = preparing.packed_inputs[id(tensor)] = self._memory_for(tensor)
            before.append(self._conversion("input", blob, tensor.array, array))
            before[-1].copy()  # a step may be prepared from the values
        return before

    def _pack_outputs(self, preparing: _Preparing) -> list[Conversion]:
        """Have `y` give packed arrays for strided outputs; gives what brings these there in every run."""
        after: list[Conversion] = []
        for blob, tensor in _strided(self.output_blobs):
            known = preparing.packed_inputs.get(id(tensor))  # in place
            array = preparing.packed_outputs[id(tensor)] = self._memory_for(tensor) if known is None else known
            after.append(self._conversion("output", blob, array, tensor.array))
        return after

    def _memory_for(self, tensor: Tensor) -> Array:
        if tensor.meta is STRING:
            return np.full(tensor.shape, b"", np.object_)
        return self.scratch(tensor.shape, tensor.array.dtype)

    def _conversion(self, kind: str, blob: Blob, source: Array, target: Array) -> Conversion:
        copy = partial(self.runtime.copy_now, target, source)
        conversion = Conversion(blob.name, TensorDescriptor.of(source), TensorDescriptor.of(target), copy)
        logger.info(
            "%s: %s blob %r of shape %s is converted in every run, from %s to %s",
            self.label, kind, blob.name, source.shape, conversion.source.layout, conversion.target.layout,
        )  # fmt: skip
        return conversion

    def for_any_sizes(self) -> Step | None:
        """A step for whatever the blobs hold when it is called, which sizes the outputs; None where there is none.

        It is what computes an operator whose shapes a run decides, without preparing it again for each of them.
        """
        return None

    @abstractmethod
    def prepare(self) -> Step:
        """A step that computes the outputs from the inputs, both of their present sizes.

        It may be a `Prepared`, which says more of it; of a bare step all that is known is that it may use
        `shared_buffer`, if the operator has one.
        """
