"""OpSchema: what is true of an operator type on every device - arity, in-place rules, arguments, shapes, cost, help.

`verify` rejects a def before anything is built from it; `infer` gives output shapes and dtypes from those of the
inputs; `cost` estimates work. What the operator computes is an `Operator` subclass, in `dagexec.ops`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy.typing as npt

from dagexec.core.arguments import Arguments
from dagexec.core.common_arguments import READ_BY_NETS, UNREAD
from dagexec.core.dtypes import UINT8, TypeMeta
from dagexec.core.io_access import IO, needs_of
from dagexec.core.node import Node
from dagexec.core.onnx_name import OnnxName
from dagexec.core.shapes import element_count
from dagexec.core.traits import Crossing, ImageRole, LayerKind, PostOpsRule, Rows
from dagexec.errors import ArgumentError, ResourceError, SchemaError, ShapeError
from dagexec.platform.lazy import LazyModule
from dagexec.platform.records import dataclass

if not TYPE_CHECKING:
    difflib = LazyModule("difflib")
else:
    import difflib

    from dagexec.core.expressions import Expression


Found = TypeVar("Found")

UNBOUNDED = 1 << 30
_AS_NAMED = (-1, -1)
_MAX_BYTES = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and element type of a tensor."""

    shape: tuple[int, ...]
    meta: TypeMeta

    def __post_init__(self) -> None:
        """Raises ResourceError for a size that is negative, or sizes so large that no machine counts the bytes."""
        if element_count(self.shape) > _MAX_BYTES // self.meta.numpy.itemsize:
            raise ResourceError(f"shape {self.shape} of {self.meta} overflows: it has more than 2^63 - 1 bytes")

    def __eq__(self, other: object) -> bool:  # in half the time: nothing else is compared as often
        return other.__class__ is TensorType and self.meta is other.meta and self.shape == other.shape

    def __hash__(self) -> int:
        return hash((self.shape, self.meta))

    @property
    def elements(self) -> int:
        """Number of elements."""
        return element_count(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return element_count(self.shape) * self.meta.numpy.itemsize

    def __str__(self) -> str:
        return f"{self.meta}{list(self.shape)}"


NO_TENSOR = TensorType((0,), UINT8)
"""What inference sees of an input that holds another object than a tensor (`OpSchema.handles`)."""


FLOPS_PER_SECOND = 150e9
"""Of the nominal core of `Cost.seconds`."""

_BYTES_PER_SECOND, _CALL_SECONDS = 30e9, 1e-6


@dataclass(frozen=True, slots=True)
class Cost:
    """Estimated work of one run of an operator: floating-point operations, and bytes to and from memory."""

    flops: int
    bytes_read: int
    bytes_written: int

    @property
    def seconds(self) -> float:
        """A nominal time, the same everywhere: the larger of compute and memory time, plus a fixed cost.

        The rates are those of one core of a server of the 2020s, fitted to the networks of the zoo (docs/tuning.md).
        """
        return self.seconds_at(1.0)

    def seconds_at(self, speed: float) -> float:
        """The time on a core that computes `speed` times as much as the nominal one."""
        moved = self.bytes_read + self.bytes_written
        return max(self.flops / (FLOPS_PER_SECOND * speed), moved / _BYTES_PER_SECOND) + _CALL_SECONDS


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """What inference may look at: the def, its arguments, and types of the inputs.

    `values[i]` is the content of input i where it is known and the schema lists i in `value_inputs`; else None.
    """

    definition: Node
    arguments: Arguments
    inputs: tuple[TensorType, ...]
    values: tuple[npt.NDArray[Any] | None, ...]
    label: str
    _found: dict[object, object] = field(init=False, default_factory=dict, compare=False, repr=False)

    def once(self, find: Callable[[OperatorCall], Found]) -> Found:
        """What `find` finds for this call, called once: inference finds it first, and preparation needs it again."""
        if find not in self._found:
            self._found[find] = find(self)
        return cast(Found, self._found[find])

    def fail(self, problem: str) -> ShapeError:
        """A ShapeError naming this operator and its inputs; the caller raises it."""
        named = ", ".join(f"{name}: {kind}" for name, kind in zip(self.definition.input, self.inputs, strict=False))
        return ShapeError(f"{self.label}: {problem} (inputs: {named or 'none'})")

    def require_rank(self, index: int, *ranks: int) -> tuple[int, ...]:
        """Shape of input `index`, which must have one of `ranks` axes. Raises ShapeError."""
        shape = self.inputs[index].shape
        if len(shape) not in ranks:
            expected = " or ".join(str(rank) for rank in ranks)
            raise self.fail(f"input {self.definition.input[index]!r} must have {expected} axes, found {len(shape)}")
        return shape

    def require_shape(self, index: int, shape: tuple[int, ...], why: str) -> None:
        """Raise ShapeError unless input `index` has exactly `shape`."""
        if self.inputs[index].shape != shape:
            name = self.definition.input[index]
            raise self.fail(f"input {name!r} must have shape {shape} ({why}), found {self.inputs[index].shape}")

    def require_types(self, index: int, *metas: TypeMeta) -> TypeMeta:
        """Element type of input `index`, which must be one of `metas`. Raises ShapeError."""
        meta = self.inputs[index].meta
        if meta not in metas:
            expected = ", ".join(str(choice) for choice in metas)
            problem = f"input {self.definition.input[index]!r} must be one of {expected}, found {meta}"
            raise ElementTypeError(str(self.fail(problem)), problem)
        return meta

    def require_same_type(self, *indices: int) -> TypeMeta:
        """The one element type that inputs `indices` (all inputs when none are named) share. Raises ShapeError."""
        chosen = indices or range(len(self.inputs))
        metas = {self.inputs[index].meta for index in chosen}
        if len(metas) != 1:
            raise self.fail(f"inputs must share one element type, found {', '.join(sorted(map(str, metas)))}")
        return metas.pop()

    def axis(self, name: str, default: int, rank: int, *, end: bool = False) -> int:
        """Argument `name` as an axis of a tensor of `rank` axes; negative counts from the end. Raises ShapeError.

        With `end`, `rank` itself is allowed too (an axis that separates, as Flatten's).
        """
        axis = self.arguments.int(name, default)
        limit = rank + 1 if end else rank
        if not -rank <= axis < limit:
            raise self.fail(f"argument {name!r} must be in [{-rank}, {limit - 1}], found {axis}")
        return axis + rank if axis < 0 else axis

    def known_value(self, index: int) -> npt.NDArray[Any]:
        """The content of input `index`. Raises UnknownValueError when it is computed only at run time."""
        value = self.values[index]
        if value is None:
            raise UnknownValueError(f"{self.label}: the value of {self.definition.input[index]!r} is not known yet")
        return value


@dataclass(frozen=True, slots=True)
class BodyCall:
    """What inference may look at of an operator that runs nets, in place of an OperatorCall.

    Attributes:
        inputs, values: types and contents of its inputs without those that the nets capture; None where unknown.
        results: the types of what the net in an argument results in, from those of what it is given.
    """

    definition: Node
    arguments: Arguments
    inputs: tuple[TensorType | None, ...]
    values: tuple[npt.NDArray[Any] | None, ...]
    results: Callable[[str, Sequence[TensorType | None]], Sequence[TensorType | None]]


@dataclass(frozen=True, slots=True)
class BodyTypes:
    """Types that are so in every run: of outputs, and by argument of what a net is given in each of its executions."""

    outputs: Sequence[TensorType | None]
    given: Mapping[str, Sequence[TensorType | None]]


class ElementTypeError(ShapeError):
    """An operator does not compute with elements of that type. Another way to compute the same may.

    Attributes:
        problem: what is wrong with which input, without the operator and its other inputs.
    """

    def __init__(self, message: str, problem: str) -> None:
        super().__init__(message)
        self.problem = problem


class UnknownValueError(ShapeError):
    """Output shapes depend on a value that only a run computes; inference then says "unknown", not "wrong"."""


InferFunction = Callable[[OperatorCall], Sequence[TensorType]]
CostFunction = Callable[[OperatorCall, Sequence[TensorType]], Cost]
InplaceRule = Callable[[int, int], bool]
PiecesFunction = Callable[[OperatorCall, Sequence[TensorType]], Mapping[int, int]]
ShapeFunction = Callable[[OperatorCall], Sequence[npt.NDArray[Any]]]

BodyFunction = Callable[[BodyCall], BodyTypes]
Formula = Callable[..., Any]
ExpressionRule = Callable[[OperatorCall], "Expression | None"]


def memory_cost(call: OperatorCall, outputs: Sequence[TensorType], flops_per_element: float = 1.0) -> Cost:
    """Cost of an operator that touches every input and output element once."""
    written = sum(kind.nbytes for kind in outputs)
    read = sum(kind.nbytes for kind in call.inputs)
    return Cost(math.ceil(flops_per_element * sum(kind.elements for kind in outputs)), read, written)


def same_as_input(call: OperatorCall) -> Sequence[TensorType]:
    """Every output has the type of input 0."""
    return [call.inputs[0]] * len(call.definition.output)


def no_inplace(_input: int, _output: int) -> bool:
    """No output may take the name of an input."""
    return False


def one_to_one(input_index: int, output_index: int) -> bool:
    """Output i may take the name of input i."""
    return input_index == output_index


def first_to_first(input_index: int, output_index: int) -> bool:
    """Output 0 may take the name of input 0."""
    return input_index == output_index == 0


def any_to_first(_input: int, output_index: int) -> bool:
    """Output 0 may take the name of any input."""
    return output_index == 0


@dataclass(frozen=True, eq=False)
class OpSchema:
    """The contract of an operator type.

    Attributes:
        type: the name in `Node.type`.
        inputs, outputs: (least, most) counts, by default as many as have names; use UNBOUNDED for no limit.
        infer: output types from an OperatorCall; None when only a run can tell.
        doc: help text: what is computed, with shapes.
        input_names, output_names: names for the documentation, in order.
        args: argument name to help text; others are refused, but for those of `common_arguments`.
        unread_args: arguments that Caffe2's own nets have and nothing reads.
        part_of_arg: a pattern; an argument whose name begins with it is one of `args` for a part of what is computed.
        required_args: names that must be present.
        inplace: which (input, output) pairs may share a name.
        enforced_inplace: (input, output) pairs that must share a name when both are given.
        cost: estimated work; by default one operation an output element.
        value_inputs: inputs whose values, not just shapes, decide the output shapes.
        counted: the types of the outputs if values made a size of theirs so large; passes learn from it what does not
            depend on that size.
        values_read_if: an argument that must be true for that; without a name, it is always so.
        decided_by: of an operator whose nets tell its output types while a net is prepared: the inputs whose values
            decide what its nets do.
        inferred_if: an argument without which only a run can tell the output types; without a name, `infer` always can.
        from_types: the outputs of an operator that reads no elements, only what type its inputs have.
        view: output 0 holds input 0's elements unchanged, so it may share the storage.
        view_if: an argument that must be true for that; without a name, it is always so.
        joined: inputs whose bytes appear unchanged and in one piece in output 0, to the byte where each begins there:
            a net may have them written there in the first place, when the operator has the argument zero_copy=1.
        cut: outputs that are one unchanged piece of input 0, to the byte where each begins there; they may be views of
            it, when the operator has that argument.
        handles: inputs that hold another object than a tensor, a queue or a mutex, say; inference sees NO_TENSOR there.
        mutates: inputs whose object the operator changes without naming it as an output, such as a reader that it moves
            on; for the order of operators that counts as a write.
        keeps: names of memory beside the blobs that an operator changes, from its definition; it counts as written.
        effects: it does more than write its outputs (files, queues, messages), so it stays when nothing reads them.
        does_io: what it reaches beside the blobs of its workspace; it is only made where that is allowed.
        reproducible: the same input gives the same bytes; fillers from a random generator do not promise it.
        onnx: the ONNX operators that it computes as it is.
        formula: output 0 from arrays of float64, or of the other types that an input may have, element by element, for
            tests and for passes that recognize functions; its keywords are arguments of the operator, with the defaults
            that they have there. Not for speed, and written apart from what computes.
        results: outputs behind so many are for gradients or tell how it was done; inference may leave them out, and
            the others stay what they are. 0: all are results.
        sub_nets: arguments that hold nets which the operator runs (`dagexec.core.body`). What they read besides the
            values it hands them are the last inputs of the operator, under the names in its argument `captured`.
        infer_bodies: the types around such nets as far as they are the same in every run; None when nothing is known.

    What compiler and scheduler ask besides (`dagexec.core.traits`):
        expression: output 0 as an expression (`dagexec.core.expressions`) of elements of the inputs, which are
            stretched to it or, where the members of rows are joined, to input 0, whose last axis these are along; None
            where it is none.
        on_host: it works on the host, whatever device its net is for: it decides what runs, or holds what is no tensor.
        post_ops: what the operator is as post-ops; None for one that is never any.
        layer: what kind of layer it is, if it is one.
        fused: the operator type that does the same and applies post-ops to its result.
        image_role: how it takes part in the layout of images.
        moves_elements: its outputs hold elements of input 0, or of all inputs that it joins, chosen by their places or
            by comparison, and no others.
        narrows: it may be computed in 16 bits where what is around it is: rounded inputs do not harm it.
        has_weights: input 1 may be large and constant, so that whether it stays in a cache matters.
        is_quantized: it reads or writes integers that stand for other numbers.
        rows: on which axes its outputs have the rows of its inputs, each of which follows from the same row of the
            inputs alone; None for an output that no row has a part in. None: nothing is known. It is called with a
            `RowsCall`; `dagexec.core.rows` has the rules that operators share.
        foreign: another runtime computes it, for the reasons in its argument `reasons`.
        calls_application: it calls a function of the application, with the interpreter's lock. Nothing is known of
            it but its types, so it stays, is neither merged nor computed ahead, and is not tried on made-up inputs.
        crossing: which devices it reads and writes, if not its own alone.
    """

    type: str
    _: KW_ONLY
    infer: InferFunction | None
    doc: str
    inputs: tuple[int, int] = _AS_NAMED
    outputs: tuple[int, int] = _AS_NAMED
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    args: Mapping[str, str] = field(default_factory=dict)
    unread_args: tuple[str, ...] = ()
    part_of_arg: str = ""
    required_args: tuple[str, ...] = ()
    inplace: InplaceRule = no_inplace
    enforced_inplace: tuple[tuple[int, int], ...] = ()
    cost: CostFunction = memory_cost
    value_inputs: tuple[int, ...] = ()
    counted: Callable[[OperatorCall, int], Sequence[TensorType]] | None = None
    values_read_if: str = ""
    decided_by: tuple[int, ...] = ()
    inferred_if: str = ""
    from_types: ShapeFunction | None = None
    view: bool = False
    view_if: str = ""
    joined: PiecesFunction | None = None
    cut: PiecesFunction | None = None
    handles: tuple[int, ...] = ()
    mutates: tuple[int, ...] = ()
    keeps: Callable[[Node], Sequence[str]] | None = None
    effects: bool = False
    does_io: IO = IO.NONE
    reproducible: bool = True
    onnx: tuple[OnnxName, ...] = ()
    formula: Formula | None = None
    results: int = 0
    sub_nets: tuple[str, ...] = ()
    infer_bodies: BodyFunction | None = None
    expression: ExpressionRule | None = None
    on_host: bool = False
    post_ops: PostOpsRule | None = None
    layer: LayerKind | None = None
    fused: str = ""
    image_role: ImageRole | None = None
    moves_elements: bool = False
    narrows: bool = False
    has_weights: bool = False
    is_quantized: bool = False
    rows: Callable[..., Sequence[Rows | None]] | None = None
    foreign: bool = False
    calls_application: bool = False
    crossing: Crossing | None = None
    _found: dict[object, object] = field(init=False, default_factory=dict, compare=False, repr=False)

    def once(self, find: Callable[[OpSchema], Found]) -> Found:
        """What `find` finds out about the operator type, called for the first who asks."""
        found = self._found
        if find not in found:
            found[find] = find(self)
        return cast(Found, found[find])

    def __post_init__(self) -> None:
        for counts, names in (("inputs", self.input_names), ("outputs", self.output_names)):
            if getattr(self, counts) == _AS_NAMED:
                object.__setattr__(self, counts, (len(names), len(names)))

    def verify(self, definition: Node) -> None:
        """Raise SchemaError, naming what was expected and found, when `definition` breaks this schema."""
        inputs, outputs = definition.input, definition.output
        self._verify_count("input", len(inputs), self.inputs)
        self._verify_count("output", len(outputs), self.outputs)
        if "" in inputs or "" in outputs:
            raise SchemaError("a blob name is empty")
        if len(outputs) > 1 and len(set(outputs)) != len(outputs):
            raise SchemaError(f"an output is named twice: {list(outputs)}")
        for o, target in enumerate(outputs):
            if target in inputs:
                self._verify_in_place(inputs, o, target)
        for i, o in self.enforced_inplace:
            if i < len(inputs) and o < len(outputs) and inputs[i] != outputs[o]:
                raise SchemaError(
                    f"output {o} must overwrite input {i} in place; expected {inputs[i]!r}, found {outputs[o]!r}"
                )
        for name in self.required_args:
            if name not in definition.values:
                raise SchemaError(f"argument {name!r} is required")

    def knows_argument(self, name: str) -> bool:
        """True when an operator of this type may have an argument of that name."""
        if name in self.args or name in READ_BY_NETS or name in UNREAD or name in self.unread_args:
            return True
        return bool(self.part_of_arg) and re.sub(f"^(?:{self.part_of_arg})+", "", name) in self.args

    def unknown_argument(self, name: str, label: str) -> ArgumentError:
        """The error for an argument that the operator does not know, which suggests a name; the caller raises it."""
        close = difflib.get_close_matches(name, self.args, n=1)
        known = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(self.args) or 'no arguments'}"
        return ArgumentError(f"{label}: {self.type} does not know the argument {name!r}; {known}")

    def is_view(self, definition: Node) -> bool:
        """True when output 0 of `definition` holds the elements of its input 0."""
        return self.view and (not self.view_if or definition.arguments().bool(self.view_if))

    def values_read(self, definition: Node) -> tuple[int, ...]:
        """The inputs of `definition` whose values decide its output shapes."""
        if not self.value_inputs or (self.values_read_if and not definition.arguments().bool(self.values_read_if)):
            return ()
        return tuple(index for index in self.value_inputs if index < len(definition.input))

    def can_infer(self, definition: Node) -> bool:
        """True when the output types of `definition` follow from those of its inputs."""
        if self.infer is None:
            return False
        return not self.inferred_if or self.inferred_if in definition.values

    def formula_defaults(self) -> dict[str, int | float]:
        """The arguments that the formula takes, with their defaults."""
        if self.formula is None or type(self.formula).__name__ == "ufunc":
            return {}
        parameters = inspect.signature(self.formula).parameters.values()
        return {one.name: one.default for one in parameters if one.default is not one.empty}

    def function(self, arguments: Arguments) -> Formula | None:
        """The formula with an operator's arguments bound to it; None when there is none."""
        if self.formula is None:
            return None
        values = {
            name: arguments.int(name, default) if isinstance(default, int) else arguments.float(name, default)
            for name, default in self.formula_defaults().items()
        }
        return partial(self.formula, **values)

    def _verify_in_place(self, inputs: Sequence[str], output: int, name: str) -> None:
        for index, source in enumerate(inputs):
            allowed = self.inplace(index, output) or (index, output) in self.enforced_inplace
            if source == name and not allowed:
                raise SchemaError(f"output {output} may not overwrite input {index} in place (blob {name!r})")

    @staticmethod
    def _verify_count(what: str, count: int, bounds: tuple[int, int]) -> None:
        least, most = bounds
        if not least <= count <= most:
            limit = f"at least {least}" if most >= UNBOUNDED else f"{least}" if least == most else f"{least} to {most}"
            raise SchemaError(f"expected {limit} {what}(s), found {count}")

    def help(self) -> str:
        """The operator's help text: what it computes, its inputs, outputs and arguments."""
        lines = [self.type, "", self.doc.strip(), ""]
        lines += [f"  input {index}: {name}" for index, name in enumerate(self.input_names)]
        lines += [f"  output {index}: {name}" for index, name in enumerate(self.output_names)]
        lines += [f"  argument {name}: {text}" for name, text in self.args.items()]
        lines += [f"  {needs_of(self.does_io)}: only where that is allowed"] if self.does_io else []
        lines += [f"  argument {name}: not read; nets of Caffe2 have it" for name in self.unread_args]
        return "\n".join(lines)
