"""Net: a net under construction, whose operators are methods: `net.FC([x, w, b], "y")`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import count
from typing import Any

import numpy as np

from dagexec.caffe2 import python_operators
from dagexec.caffe2.creation import CreateOperator, make_device_option
from dagexec.caffe2.references import BlobReference, GradientSlice, ScopedName, as_list, as_references
from dagexec.core.arguments import make_argument
from dagexec.core.gradient import SparseGradient
from dagexec.core.operator_index import known_types
from dagexec.core.proto import DeviceOption, NetDef, OperatorDef
from dagexec.core.registry import is_registered, schema_of
from dagexec.core.schema import UNBOUNDED
from dagexec.core.subnets import ONLY_IN_MESSAGES
from dagexec.frontend.caffe2_int8 import OPERATORS as INT8
from dagexec.platform.locks import new_lock
from dagexec.training import backward

_CUDA = 1


class Net:
    """A net under construction. Its name is unique in the process: a second `train` is called `train_1`."""

    _names: set[str] = set()
    _lock = new_lock()

    def __init__(self, name_or_proto: str | NetDef | Net) -> None:
        """An empty net, or a copy of one."""
        source = name_or_proto.Proto() if isinstance(name_or_proto, Net) else name_or_proto
        self._net = NetDef(type="simple")
        if isinstance(source, NetDef):
            self._net.CopyFrom(source)
        self._net.name = _unique_name(source.name if isinstance(source, NetDef) else source)
        self._inputs = set(self._net.external_input)
        self._outputs = {blob for operator in self._net.op for blob in operator.output}
        self._reserved: set[str] = set()
        self._attributes: dict[str, list[Any]] = {}
        self._input_record: Any = None
        self._output_record: Any = None

    def Proto(self) -> NetDef:
        """The message of the net. What it is changed to, the net becomes; add operators by methods of the net."""
        return self._net

    def Name(self) -> str:
        """The name of the net."""
        return self._net.name

    def __str__(self) -> str:
        return self._net.name

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if op_type.startswith("_"):
            raise AttributeError(op_type)
        if not is_registered(op_type) and op_type not in ONLY_IN_MESSAGES and op_type not in INT8:
            close = get_close_matches(op_type, known_types())
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise AttributeError(f"{op_type!r} is neither a method of a net nor an operator type{hint}")
        return lambda inputs=(), outputs=None, **kwargs: self._add_operator(op_type, inputs, outputs, **kwargs)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *known_types()})

    # Names

    def AddExternalInput(self, *inputs: Any) -> Any:
        """Declare blobs that are there before the net runs, and return their references.

        Raises ValueError for one that the net has already.
        """
        references = as_references(inputs, self)
        for blob in references:
            if self.BlobIsDefined(blob):
                raise ValueError(f"net {self.Name()!r}: blob {str(blob)!r} is an input or the output of an operator")
            self._inputs.add(str(blob))
            self._net.external_input.append(str(blob))
        return _one_or_all(references)

    def AddExternalInputs(self, *inputs: Any) -> Any:
        """`AddExternalInput`, under its other name."""
        return self.AddExternalInput(*inputs)

    def AddScopedExternalInputs(self, *inputs: Any) -> Any:
        """`AddExternalInput`, whose names are in the name scope that is open."""
        return self.AddExternalInput(*inputs)

    def AddExternalOutput(self, *outputs: Any) -> None:
        """Declare blobs as results. Raises ValueError for one that the net does not have."""
        for blob in outputs:
            if not self.BlobIsDefined(blob):
                raise ValueError(f"net {self.Name()!r} has no blob {str(blob)!r}")
            self._net.external_output.append(str(blob))

    def AddExternalOutputs(self, outputs: Iterable[Any]) -> None:
        """Declare several blobs as results."""
        self.AddExternalOutput(*outputs)

    def AddScopedExternalOutputs(self, *outputs: Any) -> None:
        """`AddExternalOutput`, whose names are in the name scope that is open."""
        self.AddExternalOutput(*as_references(outputs, self))

    @property
    def external_inputs(self) -> list[BlobReference]:
        """The blobs that are there before the net runs."""
        return [BlobReference(name, self) for name in self._net.external_input]

    @property
    def external_outputs(self) -> list[BlobReference]:
        """The blobs that are results."""
        return [BlobReference(name, self) for name in self._net.external_output]

    def is_external_input(self, blob: Any) -> bool:
        """True for a blob that is there before the net runs."""
        return str(blob) in self._inputs

    def BlobIsDefined(self, blob: Any) -> bool:
        """True for an external input and for the output of an operator."""
        return str(blob) in self._inputs or str(blob) in self._outputs

    def input_record(self) -> Any:
        """The record of its inputs, if one was set."""
        return self._input_record

    def output_record(self) -> Any:
        """The record of its outputs, if one was set."""
        return self._output_record

    def set_input_record(self, input_record: Any) -> Any:
        """Let a record be that of the inputs, or a schema, which gets blobs. Raises ValueError where one is set."""
        if self._input_record is not None:
            raise ValueError(f"net {self.Name()!r} has a record of inputs already")
        record = input_record.clone()
        for name, column in record.columns():
            if column.blob is None:
                column.set(self.NextBlob(f"{self.Name()}/{name or 'unnamed_scalar'}"))
        self._input_record = record
        for blob in record.field_blobs():
            if not self.is_external_input(blob):
                self.AddExternalInput(blob)
        return record

    def set_output_record(self, record: Any) -> None:
        """Let a record be that of the outputs. Raises ValueError where one is set, or the net lacks a blob of it."""
        if self._output_record is not None:
            raise ValueError(f"net {self.Name()!r} has a record of outputs already")
        self.AddExternalOutput(*(blob for blob in record.field_blobs() if blob not in self.external_outputs))
        self._output_record = record

    def append_output_record_field(self, field_name: str, record: Any) -> None:
        """Add a field to the record of outputs. Raises ValueError where there is none, or the net lacks a blob."""
        if self._output_record is None:
            raise ValueError(f"net {self.Name()!r} has no record of outputs")
        self.AddExternalOutput(*(blob for blob in record.field_blobs() if blob not in self.external_outputs))
        self._output_record += type(self._output_record)((field_name, record))

    def UsedBlobNames(self) -> set[str]:
        """The blobs that operators read or write, or that are external."""
        blobs = {*self._net.external_input, *self._net.external_output}
        for operator in self._net.op:
            blobs.update(operator.input, operator.output)
        return blobs

    def GetBlobRef(self, blob_name: Any) -> BlobReference:
        """The reference of a blob that the net has. Raises ValueError where it has none of that name."""
        if not self.BlobIsDefined(blob_name):
            raise ValueError(f"net {self.Name()!r} has no blob {str(blob_name)!r}")
        return BlobReference(blob_name, self)

    def NextBlob(self, prefix: str = "unnamed") -> BlobReference:
        """A name that no blob of the net has, and that this method has not returned before."""
        names = _candidates(prefix, "_auto_", 0)
        name = next(name for name in names if name not in self._reserved and not self.BlobIsDefined(name))
        self._reserved.add(name)
        return BlobReference(name, self)

    def NextScopedBlob(self, prefix: str = "unnamed") -> BlobReference:
        """`NextBlob` in the name scope that is open."""
        return self.NextBlob(ScopedName(prefix))

    def NextName(self, prefix: str | None = None, output_id: int | None = None) -> str:
        """The name that the next output without one has: `<net>/<prefix>`, `<net>/<prefix>_2`, and so on."""
        suffix = "" if output_id is None else f":{output_id}"
        base = f"{self.Name()}/{prefix or 'unnamed'}"
        names = (f"{name}{suffix}" for name in _candidates(base, "_", 2))
        return next(name for name in names if not self.BlobIsDefined(ScopedName(name)))

    # Operators

    def _add_operator(self, op_type: str, inputs: Any, outputs: Any = None, **kwargs: Any) -> Any:
        read = as_references(inputs, self)
        written = as_references(self._output_names(op_type, len(read), outputs), self)
        self._declare_inputs(read)
        self.extend_ops([CreateOperator(op_type, read, written, **kwargs)])
        return _one_or_all([BlobReference(blob, self) for blob in written])

    def _output_names(self, op_type: str, inputs: int, outputs: Any) -> list[Any]:
        """The outputs as named, or so many names with numbers; by default as many names as there must be."""
        if outputs is None:
            least, most = (0, UNBOUNDED) if op_type in ONLY_IN_MESSAGES else schema_of(op_type).outputs
            number = max(least, min(1, most)) if most < UNBOUNDED else max(least, 1)
        elif isinstance(outputs, int):
            return [self.NextName(op_type, index) for index in range(outputs)]
        else:
            return as_list(outputs)
        if number == 1:
            return [self.NextName(op_type)]
        return [self.NextName(op_type, index) for index in range(number)]

    def _declare_inputs(self, blobs: Iterable[BlobReference]) -> None:
        for blob in blobs:
            if not self.BlobIsDefined(blob):
                self._inputs.add(str(blob))
                self._net.external_input.append(str(blob))

    def Const(self, array: Any, blob_out: Any = None, dtype: Any = None) -> Any:
        """A constant: of a float float32, of an int int64, and of an array or a list what it holds, in its shape."""
        values = np.asarray(array, dtype)
        fills = {
            "i": "GivenTensorInt64Fill",
            "b": "GivenTensorBoolFill",
            "U": "GivenTensorStringFill",
            "S": "GivenTensorStringFill",
        }
        fill = "GivenTensorIntFill" if values.dtype == np.int32 else fills.get(values.dtype.kind, "GivenTensorFill")
        return self._add_operator(fill, [], blob_out or 1, shape=list(values.shape), values=values.reshape(-1).tolist())

    def Python(
        self,
        f: Any,
        grad_f: Any = None,
        python_func_type: Callable[[Any], Any] | None = None,
        pass_workspace: bool = False,
        grad_output_indices: Sequence[int] | None = None,
        grad_input_indices: Sequence[int] | None = None,
    ) -> Callable[..., Any]:
        """What adds an operator that calls `f(inputs, outputs)`: `net.Python(f)(["x"], ["y"])`.

        `grad_f` computes the gradients of the inputs `grad_input_indices`, by default all, from the inputs, the outputs
        and the gradients of the outputs `grad_output_indices`. `python_func_type(f)` may have both, as `forward` and
        `backward`. With `pass_workspace` the function takes the workspace as well.
        """
        if python_func_type is not None:
            functions = python_func_type(f)
            f, grad_f = functions.forward, getattr(functions, "backward", None)
        arguments = {
            "token": python_operators.register(f),
            "grad_token": None if grad_f is None else python_operators.register(grad_f),
            "pass_workspace": pass_workspace,
            "grad_output_indices": grad_output_indices,
            "grad_input_indices": grad_input_indices,
        }
        settings = {name: value for name, value in arguments.items() if value is not None}

        def add(inputs: Any = (), outputs: Any = None, **kwargs: Any) -> Any:
            return self._add_operator(python_operators.PYTHON, inputs, outputs, **settings, **kwargs)

        return add

    def extend_ops(self, new_ops: Iterable[OperatorDef]) -> None:
        """Append operators as they are."""
        operators = list(new_ops)
        self._net.op.extend(operators)
        self._outputs.update(blob for operator in operators for blob in operator.output)

    def AppendNet(self, net: Net, device_option: DeviceOption | None = None) -> Net:
        """Append the operators of another net, which run on `device_option` where it is given; returns this net.

        What it reads and this net does not compute becomes an external input; its external outputs are added.
        """
        appended = net.Proto()
        self._declare_inputs(BlobReference(blob) for blob in appended.external_input)
        operators = []
        for operator in appended.op:
            copy = OperatorDef()
            copy.CopyFrom(operator)
            if device_option is not None:
                copy.device_option.CopyFrom(device_option)
            operators.append(copy)
        self.extend_ops(operators)
        self._net.external_output.extend(
            blob for blob in appended.external_output if blob not in self._net.external_output
        )
        for name, values in net._attributes.items():
            self._attributes.setdefault(name, []).extend(values)
        return self

    def Clone(
        self,
        name: str,
        blob_remap: Mapping[Any, Any] | None = None,
        op_id_mask: Sequence[int] | None = None,
        remap_funcs: Mapping[str, Callable[..., Any]] | None = None,
        keep_schema: bool = True,
    ) -> Net:
        """A copy under another name, with blobs renamed by `blob_remap`, and only the operators numbered in the mask.

        `remap_funcs` change operators of a type that name blobs in their arguments: each is called with the copy of an
        operator and the complete mapping of names. With `keep_schema` it has the records of this net.
        """
        renamed = {str(old): str(new) for old, new in (blob_remap or {}).items()}
        copy = NetDef()
        copy.CopyFrom(self._net)
        operators = list(copy.op) if op_id_mask is None else [copy.op[index] for index in op_id_mask]
        for operator in operators:
            for blobs in (operator.input, operator.output, operator.control_input):
                blobs[:] = [renamed.get(blob, blob) for blob in blobs]
            if remap_funcs and operator.type in remap_funcs:
                remap_funcs[operator.type](operator, renamed, name)
        for external in (copy.external_input, copy.external_output):
            external[:] = [renamed.get(blob, blob) for blob in external]
        kept = [operator.SerializePartialToString() for operator in operators]
        del copy.op[:]
        copy.op.extend(OperatorDef.FromString(content) for content in kept)
        copy.name = name
        net = Net(copy)
        if keep_schema:
            net._input_record, net._output_record = (
                _renamed(record, renamed, net) for record in (self._input_record, self._output_record)
            )
        return net

    def ClonePartial(self, name: str, inputs: Any, outputs: Any) -> tuple[Net, dict[Any, BlobReference]]:
        """What computes `outputs` from `inputs`, as a net of its own, and the references there of those blobs.

        `inputs` may be a mapping from blobs to their names in the new net. Raises ValueError when an output needs a
        blob that is neither one of the inputs nor an external input of this net.
        """
        renamed = dict(inputs) if isinstance(inputs, Mapping) else {blob: blob for blob in as_list(inputs)}
        taken, wanted = (
            {str(blob) for blob in renamed},
            {str(blob) for blob in as_list(outputs)} - set(map(str, renamed)),
        )
        mask: list[int] = []
        for index in reversed(range(len(self._net.op))):
            operator = self._net.op[index]
            if not wanted.intersection(operator.output):
                continue
            mask.insert(0, index)
            wanted.difference_update(set(operator.output) - set(operator.input))
            wanted.update(set(operator.input) - taken)
        missing = sorted(wanted - self._inputs)
        if missing:
            raise ValueError(f"net {self.Name()!r}: {list(map(str, as_list(outputs)))} need {missing}, too")
        net = self.Clone(name, renamed, mask)
        proto = net.Proto()
        proto.external_input[:] = [*(str(blob) for blob in renamed.values()), *sorted(wanted)]
        proto.external_output[:] = [str(renamed.get(blob, blob)) for blob in as_list(outputs)]
        net._inputs = set(proto.external_input)
        blobs = [*renamed, *as_list(outputs)]
        return net, {blob: BlobReference(renamed.get(blob, blob), net) for blob in blobs}

    # Gradients

    def AddGradientOperators(self, ys: Any, skip: int = 0) -> dict[str, Any]:
        """Append the gradient operators of the losses `ys`, and return the gradient of each blob that has one.

        `ys` is a list, or a mapping from losses to the blobs of their gradients, where None means ones. The first
        `skip` operators are left out. A gradient is a BlobReference, or a GradientSlice where it is sparse.
        """
        part = NetDef()
        part.CopyFrom(self._net)
        del part.op[:skip]
        losses: dict[str, str | None]
        if isinstance(ys, Mapping):
            losses = {str(loss): None if gradient is None else str(gradient) for loss, gradient in ys.items()}
        else:
            losses = {str(loss): None for loss in as_list(ys)}
        gradients = backward.add_gradient_operators(part, losses)
        self.extend_ops(part.op[len(self._net.op) - skip :])
        self._declare_inputs(BlobReference(name) for name in losses.values() if name is not None)
        return {name: self._gradient(gradient) for name, gradient in gradients.items()}

    def _gradient(self, gradient: str | SparseGradient) -> Any:
        if isinstance(gradient, SparseGradient):
            return GradientSlice(BlobReference(gradient.indices, self), BlobReference(gradient.values, self))
        return BlobReference(gradient, self)

    # The net as a whole

    def RunAllOnGPU(self, gpu_id: int = 0, use_cudnn: bool = False) -> None:
        """Have the net run on a GPU. `use_cudnn` asks for cuDNN where an operator has it."""
        self._net.device_option.CopyFrom(make_device_option(_CUDA, gpu_id))
        if use_cudnn:
            for operator in self._net.op:
                operator.engine = "CUDNN"

    def set_rand_seed(self, seed: int = 100, sequence_seed: bool = True, seed_on_op_def: bool = False) -> None:
        """Give the operators of the net the random seed `seed`, or one after another from it with `sequence_seed`.

        The seed is always that of the operator's device option; `seed_on_op_def` is there for Caffe2's sake.
        """
        for index, operator in enumerate(self._net.op):
            operator.device_option.random_seed = seed + (index if sequence_seed else 0)

    def add_attribute(self, name: str, value: Any) -> None:
        """Note `value` under `name`, beside what is there."""
        self._attributes.setdefault(name, []).append(value)

    def get_attributes(self, name: str) -> list[Any]:
        """What was noted under `name`."""
        return self._attributes.get(name, [])

    def AddArgument(self, name: str, value: Any) -> None:
        """Give the net, not an operator of it, an argument."""
        self._net.arg.append(make_argument(name, value))

    def LogInfo(self, *blobs: Any) -> None:
        """Have the net print these blobs."""
        for blob in blobs:
            self._add_operator("Print", [blob], [])


def _renamed(record: Any, names: Mapping[str, str], net: Net) -> Any:
    """A copy of a record, or None, with blobs of other names."""
    copy = None if record is None else record.clone()
    for column in () if copy is None else copy.all_scalars():
        column.set(BlobReference(names.get(str(column()), str(column())), net))
    return copy


def _unique_name(base: str) -> str:
    with Net._lock:
        name = next(name for name in _candidates(base, "_", 1) if name not in Net._names)
        Net._names.add(name)
    return name


def _candidates(base: str, separator: str, first: int) -> Iterator[str]:
    """`base`, then `base` with numbers."""
    yield base
    for number in count(first):
        yield f"{base}{separator}{number}"


def _one_or_all(references: Sequence[BlobReference]) -> Any:
    """What a call that adds blobs returns: nothing, the reference, or a tuple of several."""
    if not references:
        return None
    return references[0] if len(references) == 1 else tuple(references)
